"""Peak memory of log-probabilities with gradients on the CPU: whole logits against the fused head, in one process each.

    python -m benchmarks.head_memory [tokens] [vocabulary] [hidden]
"""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import resource, sys, torch
kind, tokens, vocabulary, hidden = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
states = torch.randn(tokens, hidden, requires_grad=True)
weight = torch.randn(vocabulary, hidden, requires_grad=True)
targets = torch.randint(0, vocabulary, (tokens,))
from rltool.megatron.output_head import head_logprobs
def step(n):
    if kind == "whole":
        logits = states[:n] @ weight.t()
        logprobs = torch.log_softmax(logits, dim=-1).gather(-1, targets[:n, None]).squeeze(-1)
    else:
        logprobs, _ = head_logprobs(
            states[:n], weight, targets[:n], temperature=1.0, vocab_size=vocabulary, chunk=int(kind)
        )
    logprobs.sum().backward()
step(8)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(tokens)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def main() -> None:
    sizes = sys.argv[1:4] or ["1024", "151936", "64"]
    logits = int(sizes[0]) * int(sizes[1]) * 4 / 2**20
    result = {"tokens": int(sizes[0]), "vocabulary": int(sizes[1]), "one_copy_of_the_logits_mib": round(logits)}
    for kind in ("whole", "128", "32"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, kind, *sizes], capture_output=True, text=True, check=True, timeout=600
        )
        name = "whole" if kind == "whole" else f"fused, chunks of {kind}"
        result[f"peak_mib: {name}"] = round(float(done.stdout))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
