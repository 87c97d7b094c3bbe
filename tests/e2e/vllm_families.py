"""Loads models that went through convert-ckpt, there and back, into the real vLLM, family after family in one process.

`python -m tests.e2e.vllm_families [family ...]` prints a JSON line for each: the largest difference of a prompt's
log-probabilities to transformers with the weights from before the conversion, in fp32, and the seconds that vLLM took.
All families without arguments.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path

# Before vLLM is imported. Its engine core inside this process: one import for all families.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)

import torch

from tests.e2e.megatron_models import KINDS, VOCAB, hf_logprobs, hf_model

HIDDEN = 128
"""With four heads, a head size of 32: vLLM's smallest on the CPU."""
TOKENS = 40


def convert(kind: str, work: Path) -> Path:
    from rltool.checkpoints.convert import hf_to_torch_dist, torch_dist_to_hf

    hf_model(kind, kind == "gemma3", hidden_size=HIDDEN).save_pretrained(work / "original")
    hf_to_torch_dist(work / "original", work / "dist", verify=False)
    torch_dist_to_hf(work / "dist", work / "back", verify=False)
    return work / "back"


def vllm_logprobs(model: Path, tokens: torch.Tensor) -> torch.Tensor:
    """[T]: log p(tokens[t] | before), 0 for the first."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.inputs import TokensPrompt

    options = dict(dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=2, skip_tokenizer_init=True)
    engine = LLM(str(model), **options)
    try:
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=tokens.tolist())], sampling, use_tqdm=False)
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()
    found = [output.prompt_logprobs[i][int(token)].logprob for i, token in enumerate(tokens) if i]
    return torch.tensor([0.0, *found])


def main(kinds: list[str]) -> None:
    tokens = torch.randint(3, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(3))
    with tempfile.TemporaryDirectory() as work:
        # All conversions first: vLLM leaves process groups of its own behind.
        models = {kind: convert(kind, Path(work) / kind) for kind in kinds}
        for kind, model in models.items():
            with torch.no_grad():
                expected = hf_logprobs(hf_model(kind, kind == "gemma3", hidden_size=HIDDEN), tokens, 1.0)
            started = time.monotonic()
            difference = (vllm_logprobs(model, tokens) - expected).abs().max().item()
            seconds = round(time.monotonic() - started, 1)
            print(json.dumps({"family": kind, "difference": difference, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(KINDS))
