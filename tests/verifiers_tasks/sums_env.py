"""Run as `rltool agents URL sums_env:run`; as a program it prints the data set."""

from __future__ import annotations

import json

from rltool.agents.verifiers_env import VerifiersEnv

env = VerifiersEnv(
    {"taskset": {"id": "rltool-sums"}, "agent": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
)
run = env.run

if __name__ == "__main__":
    for row in env.rows():
        print(json.dumps(row))
