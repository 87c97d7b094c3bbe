"""`python -m rltool.router.main`: sglang-router's own launcher, with the key read from a file.

sglang-router takes its key in argv only, where every user of the host can read it; its Python interface has no such
need.
"""

from __future__ import annotations

import argparse
from pathlib import Path

SHUTDOWN_GRACE_SECONDS = 5
"""Seconds that a stopped sglang-router waits for requests in flight; its default of 180 s outlasts our patience."""

BALANCE_REQUESTS = 4
BALANCE_RATIO = 1.1
"""cache_aware sends by prefix unless one worker has this many requests, and this ratio, more than another. Its defaults
(64 and 1.5) are made for chats; a rollout of 64 prompts on two engines then went 53 to 11, and a step waits for the
slower engine."""


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="rltool.router.main")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prometheus-port", type=int, required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--key-file", type=Path, required=True)
    parser.add_argument("--request-timeout", type=float, required=True)
    parser.add_argument("--health-check-interval", type=float, required=True)
    parser.add_argument("--worker-startup-timeout", type=float, required=True)
    parser.add_argument("--pd-disaggregation", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    arguments = parse_arguments()
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    # Annotated argparse.Namespace; its code and docstring take RouterArgs as well.
    launch_router(
        RouterArgs(  # pyright: ignore[reportArgumentType]
            host=arguments.host,
            port=arguments.port,
            # Its command line binds this one to 0.0.0.0 by default, and it knows no key.
            prometheus_host="127.0.0.1",
            prometheus_port=arguments.prometheus_port,
            policy=arguments.policy,
            # Its workers are registered later, each as prefill or decode; the command line would want them up now.
            pd_disaggregation=arguments.pd_disaggregation,
            # A pair answers 500 to what a weight sync aborts: the breaker of both would open with each sync, for 60 s.
            disable_circuit_breaker=arguments.pd_disaggregation,
            balance_abs_threshold=BALANCE_REQUESTS,
            balance_rel_threshold=BALANCE_RATIO,
            api_key=arguments.key_file.read_text().strip(),
            request_timeout_secs=max(1, round(arguments.request_timeout)),
            health_check_interval_secs=max(1, round(arguments.health_check_interval)),
            # How often, and for how long, it asks a worker that was just added whether it is up.
            worker_startup_check_interval=1,
            worker_startup_timeout_secs=max(1, round(arguments.worker_startup_timeout)),
            shutdown_grace_period_secs=SHUTDOWN_GRACE_SECONDS,
            # Two lines per request at level info: at 1,000 requests a second the log would be the bottleneck.
            log_level="warn",
        )
    )


if __name__ == "__main__":
    main()
