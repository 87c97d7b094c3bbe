"""As sums_env.py, for an `Env` of its own."""

from __future__ import annotations

import json

from rltool.agents.verifiers_env import VerifiersEnv

env = VerifiersEnv(
    {"taskset": {"id": "rltool-guess"}, "player": {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}}
)
run = env.run

if __name__ == "__main__":
    for row in env.rows():
        print(json.dumps(row))
