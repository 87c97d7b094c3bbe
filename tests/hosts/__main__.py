"""`sudo .venv/bin/python -m tests.hosts COUNT [SHARED ...]`: hosts to try rltool on, until standard input ends.

Prints how to enter each, then takes faults, one a line: `loss 0.01`, `delay 0.02`, `rate 1e9`, `partition a b`,
`block b 8101`, `kill c`, `boot c`, `heal`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.hosts import Hosts, missing


def apply(hosts: Hosts, line: str) -> None:
    """One fault. ValueError or KeyError where it is none."""
    by_name = {host.name: host for host in hosts}
    match line.split():
        case ["loss", share]:
            hosts.loss(float(share))
        case ["delay", seconds]:
            hosts.delay(float(seconds))
        case ["rate", bits, *names]:
            hosts.rate(int(float(bits)), *(by_name[name] for name in names))
        case ["partition", one, *others]:
            hosts.partition(by_name[one], *(by_name[name] for name in others))
        case ["block", to, port]:
            hosts.block(by_name[to], int(port))
        case ["kill", name]:
            hosts.kill(by_name[name])
        case ["boot", name]:
            hosts.boot(by_name[name])
        case ["heal"]:
            hosts.heal()
        case []:
            return
        case _:
            raise ValueError(f"no fault: {line.strip()}")


def main() -> None:
    if (why := missing()) is not None:
        sys.exit(f"error: {why}")
    with Hosts(int(sys.argv[1]), shared=[Path(word) for word in sys.argv[2:]]) as hosts:
        for host in hosts:
            print(
                f"{host.name} {host.address}: nsenter -t {host.pid} -n -m -u -p -T --wdns={host.here} bash", flush=True
            )
        for line in sys.stdin:
            try:
                apply(hosts, line)
                print("ok", flush=True)
            except (ValueError, KeyError) as error:
                print(f"error: {error}", flush=True)


if __name__ == "__main__":
    main()
