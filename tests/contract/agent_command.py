"""An agent as a program: environment variables, its task on stdin, a reward on the last line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

from tests.contract.agents import ask

task = json.load(sys.stdin)
how = task["row"]["metadata"].get("how")
if how == "fails":
    print("cannot find my tools")
    sys.exit(4)
if how == "hangs":
    subprocess.Popen(["sleep", "43210"])
    time.sleep(60)
if how == "has a bad reward":
    print(json.dumps({"reward": "much"}))
    sys.exit()
messages = [{"role": "user", "content": task["row"]["prompt"]}]
answer = ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], os.environ["RLTOOL_MODEL"], messages)
print("thinking aloud")
print(json.dumps({"reward": len(answer)} if how == "has an opinion" else {"answer": answer}))
