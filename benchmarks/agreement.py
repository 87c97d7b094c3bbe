"""What the difference of log-probabilities between vLLM and the trainer is made of, in bf16, on one device.

    python -m benchmarks.agreement MODEL --data prompts.jsonl --samples 64 --tokens 256

vLLM (in this process, with rltool's flags of a head in fp32) samples answers; the same tokens are then scored by vLLM
again as prompts, by the trainer in bf16 and in float32, and by transformers in bf16. The trainer in float32, with
the same bf16 weights, is the truth that the others are held against: what vLLM and the trainer each differ from it by
is their own rounding; what they differ from each other by cannot be less than what one of them does alone, unless they
round alike. KL is the mean of exp(d) - 1 - d (k3) over sampled tokens. The residual stream after each layer is compared
as well, as a relative 2-norm over all tokens. Prints one line of JSON per pair.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rltool.weights.verify.layers import Note, engine_parts, is_stream, trainer_parts, watching

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # layers are reached in this process


def by_vllm(args: argparse.Namespace, prompts: list[list[int]]) -> dict[str, Any]:
    """{"sequences", "prompt_lengths", "decode", "prefill": log-probabilities of the sampled tokens, "streams"}."""
    from vllm import LLM, SamplingParams, TokensPrompt

    cuda = torch.cuda.is_available()
    options: dict[str, Any] = {"gpu_memory_utilization": 0.4} if cuda else {}
    if cuda and not args.exact:
        options["hf_overrides"] = {"head_dtype": "float32"}
    engine: Any = LLM(str(args.model), dtype=args.dtype, max_model_len=args.longest, seed=0, enforce_eager=args.eager,
                 enable_prefix_caching=False, **{**options, **args.engine})  # fmt: skip
    sampling = SamplingParams(temperature=1.0, max_tokens=args.tokens, logprobs=0, ignore_eos=True, seed=0)
    outputs = engine.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], sampling, use_tqdm=False)
    answers = [list(output.outputs[0].token_ids) for output in outputs]
    decode = [[step[token].logprob for step, token in zip(output.outputs[0].logprobs, answer, strict=True)]
              for output, answer in zip(outputs, answers, strict=True)]  # fmt: skip
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    again = SamplingParams(max_tokens=1, prompt_logprobs=0)
    scored = engine.generate([TokensPrompt(prompt_token_ids=s) for s in sequences], again, use_tqdm=False)
    prefill = [[row[token].logprob for row, token in zip(o.prompt_logprobs[len(p) :], a, strict=True)]
               for o, p, a in zip(scored, prompts, answers, strict=True)]  # fmt: skip
    streams: list[list[Tensor]] = []
    if args.eager:
        parts = engine.apply_model(engine_parts)[0]
        for sequence in sequences[: args.streams]:
            with watching(parts, streams_into(streams, len(sequence))):
                engine.generate(TokensPrompt(prompt_token_ids=sequence), SamplingParams(max_tokens=1), use_tqdm=False)
    del engine
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return {"sequences": sequences, "decode": decode, "prefill": prefill, "streams": streams}


def streams_into(streams: list[list[Tensor]], length: int) -> Note:
    """Notes the residual stream after each layer, of one sequence, as the last of `streams`."""
    streams.append([])

    def note(name: str, vectors: Tensor) -> None:
        if is_stream(name):
            streams[-1].append(vectors.float().cpu().reshape(-1, vectors.size(-1))[:length])

    return note


def batch_of(sequences: list[list[int]], prompts: list[list[int]]) -> Any:
    from rltool.algorithms.batch import TrainBatch

    mask = torch.cat([(torch.arange(len(s)) >= len(p)).float() for s, p in zip(sequences, prompts, strict=True)])
    return TrainBatch(
        tokens=torch.tensor([token for sequence in sequences for token in sequence]),
        lengths=torch.tensor([len(sequence) for sequence in sequences]),
        loss_mask=mask, loss_weights=mask, rewards=torch.zeros(len(sequences)),
        group_ids=torch.arange(len(sequences)), advantages=mask.clone(),
    )  # fmt: skip


def by_trainer(
    args: argparse.Namespace, dtype: Any, sequences: list[list[int]], prompts: list[list[int]], *,
    exact: bool = False, **trainer: Any
) -> tuple[Tensor, list[list[Tensor]]]:  # fmt: skip
    """(log-probabilities of the sampled tokens, residual stream after each layer of the first sequences)."""
    from rltool.config.algorithm import AlgorithmConfig
    from rltool.config.sections import ModelConfig, OptimizerConfig, TrainerConfig
    from rltool.megatron.runtime import Rendezvous
    from rltool.megatron.trainer import MegatronTrainer, TrainingRun
    from rltool.processes.ports import reserved_ports

    with reserved_ports(1) as held:
        [port] = held.ports
    made = MegatronTrainer(
        ModelConfig(path=args.model, dtype=dtype), TrainerConfig(world_size=1, **trainer), OptimizerConfig(lr=1e-6),
        AlgorithmConfig(exact=exact), Rendezvous(0, "127.0.0.1", port, timeout=300.0), TrainingRun(10),
    )  # fmt: skip
    with closing(made):
        made.load_hf_weights(args.model)
        streams: list[list[Tensor]] = []
        for sequence, prompt in zip(sequences[: args.streams], prompts, strict=False):
            with watching(trainer_parts(made.gpt), streams_into(streams, len(sequence))):
                made.compute_logprobs([batch_of([sequence], [prompt])])
        batches = [batch_of(sequences[i : i + 16], prompts[i : i + 16]) for i in range(0, len(sequences), 16)]
        found = made.compute_logprobs(batches)
        assert found is not None
        kept = [x.cpu()[batch.loss_mask > 0] for x, batch in zip(found, batches, strict=True)]
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return torch.cat(kept), streams


@torch.no_grad()
def by_transformers(args: argparse.Namespace, sequences: list[list[int]], prompts: list[list[int]]) -> Tensor:
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model.to(device)
    rows = []
    for sequence, prompt in zip(sequences, prompts, strict=True):
        tokens = torch.tensor(sequence, device=device)
        hidden = model.model(tokens[None]).last_hidden_state[0, len(prompt) - 1 : -1]
        logits = hidden.float() @ model.lm_head.weight.float().T
        rows.append(torch.log_softmax(logits, -1).gather(-1, tokens[len(prompt) :, None]).squeeze(-1).cpu())
    return torch.cat(rows)


def compare(name: str, ours: Tensor, theirs: Tensor) -> None:
    """theirs: of the engine that sampled, or of the truth."""
    d = (ours - theirs).double()
    row = {"mean_abs": d.abs().mean(), "std": d.std(), "max": d.abs().max(), "kl": (d.exp() - 1 - d).mean()}
    print(json.dumps({"pair": name, **{k: float(f"{float(v):.4g}") for k, v in row.items()}}), flush=True)


def compare_streams(name: str, ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    if not ours or not theirs:
        return
    by_layer = []
    for layer in range(len(theirs[0])):
        a, b = (torch.cat([sequence[layer] for sequence in side]) for side in (ours, theirs))
        by_layer.append(float(f"{float((a - b).norm() / b.norm()):.3g}"))
    print(json.dumps({"streams": name, "relative_error_by_layer": by_layer}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines with a prompt or a question each")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--streams", type=int, default=4, help="sequences whose residual streams are compared")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation and CUDA graphs; with streams")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON: more arguments of vllm.LLM")
    parser.add_argument("--exact", action="store_true", help="batch-invariant vLLM, and the trainer with its kernels")
    parser.add_argument(
        "--variants",
        type=json.loads,
        default={},
        help='JSON: name -> [trainer] keys, e.g. {"eager": {"compile": false}}',
    )
    args = parser.parse_args()
    from transformers import AutoTokenizer

    if args.exact:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        args.engine = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}, **args.engine}
    tokenizer: Any = AutoTokenizer.from_pretrained(args.model)
    rows = [json.loads(line) for line in args.data.read_text().splitlines()[: args.samples]]
    chats = [[{"role": "user", "content": row.get("prompt") or row["question"]}] for row in rows]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        if tokenizer.chat_template
        else tokenizer(chat[0]["content"])["input_ids"]
        for chat in chats
    ]
    engine = by_vllm(args, prompts)
    sequences = engine["sequences"]
    decode, prefill = (torch.tensor([x for row in engine[name] for x in row]) for name in ("decode", "prefill"))
    truth, true_streams = by_trainer(args, "float32", sequences, prompts)
    compare("vLLM as it sampled, truth", truth, decode)
    compare("vLLM as prompts, truth", truth, prefill)
    compare("vLLM as prompts, vLLM as it sampled", prefill, decode)
    compare_streams("vLLM, truth", engine["streams"], true_streams)
    if not args.no_transformers:
        compare("transformers, truth", truth, by_transformers(args, sequences, prompts))
    exact: dict[str, Any] = {"trainer, exact": {"exact": True}} if args.exact else {}
    for name, keys in {"trainer": {}, **exact, **args.variants}.items():
        found, streams = by_trainer(args, args.dtype, sequences, prompts, **keys)
        compare(f"{name}, truth", truth, found)
        compare(f"{name}, vLLM as it sampled", found, decode)
        compare(f"{name}, vLLM as prompts", found, prefill)
        compare_streams(f"{name}, truth", streams, true_streams)
        compare_streams(f"{name}, vLLM", streams, engine["streams"])


if __name__ == "__main__":
    main()
