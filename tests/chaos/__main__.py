"""`make chaos ARGS="--seed N --minutes M"`: runs on fake engines that break all the time, seed after seed; with --real
one run on real ones."""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path

from rltool.quickstart.tiny_model import make_tiny_model
from tests.chaos.driver import events_or_seconds, run_seed
from tests.chaos.invariants import Violation
from tests.chaos.resources import Resources

SECONDS_PER_SEED = 12.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first run; the next ones count on")
    parser.add_argument("--minutes", type=float, default=1.0, help="for all runs together")
    parser.add_argument("--events", type=int, help="one run on fakes that ends after so many, whatever --minutes says")
    parser.add_argument("--soak", action="store_true", help="one run for all the time; fails if anything grows")
    parser.add_argument("--real", action="store_true", help="one run on real engines and a real router, on the CPU")
    parser.add_argument("--hosts", type=int, help="as --real, over so many hosts of namespaces; needs root")
    parser.add_argument("--served", action="store_true", help="clients of a served trainer, all of it real and killed")
    options = parser.parse_args()
    try:
        if options.served:
            return served(options.seed, options.minutes)
        if options.hosts:
            return hosts(options.seed, options.minutes, options.hosts)
        return real(options.seed, options.minutes) if options.real else fakes(options)
    except Violation as violation:
        print(f"VIOLATION: {violation}", flush=True)
        return 1


def real(seed: int, minutes: float) -> int:
    from tests.chaos.real import run_real

    print("\n".join([f"seed {seed}: every invariant held", *run_real(seed, minutes)]))
    return 0


def hosts(seed: int, minutes: float, count: int) -> int:
    from tests.chaos.hosts import run_hosts

    print("\n".join([f"seed {seed}: every invariant held", *run_hosts(seed, minutes, count)]))
    return 0


def served(seed: int, minutes: float) -> int:
    from tests.chaos.served import run_served

    print("\n".join([f"seed {seed}: every invariant held", *run_served(seed, minutes)]))
    return 0


def fakes(options: argparse.Namespace) -> int:
    steps = events = 0
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory), seed=0)
        ends = time.monotonic() + 60 * options.minutes
        for seed in itertools.count(options.seed):
            left = ends - time.monotonic()
            if seed > options.seed and (options.soak or options.events or left <= 0):
                break
            resources = Resources() if options.soak else None
            seconds = left if options.soak else min(left, SECONDS_PER_SEED)
            enough = events_or_seconds(options.events, None if options.events else seconds)
            try:
                report = run_seed(seed, model, enough=enough, resources=resources)
            except Violation as violation:
                raise Violation(f"seed {seed}: {violation}") from None
            print(report.line(), flush=True)
            for line in resources.lines() if resources else ():
                print(f"  {line}", flush=True)
            steps, events = steps + report.steps, events + report.events.total()
    print(f"every invariant held: {events} events, {steps} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
