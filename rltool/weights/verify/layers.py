"""The first layer in which trainer and vLLM differ: for the error of a run with algorithm.exact that met a difference.

The trainer still holds the weights that the token was sampled with. It, and a vLLM in eager mode in a process of its
own that loads an export of them, compute the sequence up to that token as a prompt. Of what each part of each layer
gives they keep one number per token, in which every bit of the token's vector counts, and these are compared in the
order of computing. Parts have the names that they have in the Hugging Face model and in vLLM.

    python -m rltool.weights.verify.layers DIRECTORY      # vLLM's side
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.errors import RltoolError
from rltool.processes.excerpt import excerpt

if TYPE_CHECKING:
    from rltool.megatron.trainer import MegatronTrainer

SECONDS = 400.0
"""For vLLM to start, load and compute one sequence: half a minute for a small model."""
ROOM, BESIDE = 1.5, 6 * 1024**3
"""What vLLM needs on the GPU: times its weights, and bytes beside them."""
SHOWN = 16
"""Numbers of each token's vector that are kept as they are."""
LOG_LINES = 6

Note = Callable[[str, Tensor], None]


class LayerUnknown(RltoolError):
    """The comparison by layers failed."""


def part_names(layers: int) -> list[str]:
    """In the order of computing."""
    parts = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
    return [*(f"model.layers.{layer}.{part}" for layer in range(layers) for part in parts), "model.norm"]


def is_stream(name: str) -> bool:
    """Whether `watching` notes under this name the residual stream behind a layer."""
    return name.startswith("input of ") and name.endswith((".input_layernorm", "model.norm")) and ".0." not in name


def trainer_parts(model: Any) -> dict[str, torch.nn.Module]:
    """model: of megatron.core, whole."""
    parts = (
        (layer.input_layernorm, layer.self_attention, layer.pre_mlp_layernorm, layer.mlp)
        for layer in model.decoder.layers
    )
    found = [*(part for layer in parts for part in layer), model.decoder.final_layernorm]
    return dict(zip(part_names(len(model.decoder.layers)), found, strict=True))


def engine_parts(model: Any) -> dict[str, torch.nn.Module]:
    """model: of vLLM. Without those that it does not have."""
    modules = dict(model.named_modules())
    return {name: modules[name] for name in part_names(len(model.model.layers)) if name in modules}


@contextmanager
def watching(parts: Mapping[str, torch.nn.Module], note: Note) -> Iterator[None]:
    """Inside, note(name, [..., hidden]) of what each part gives, and before it of what comes into each norm: the
    residual stream. vLLM's norms add to it themselves, and return it beside their result."""

    def hook(name: str) -> Callable[[Any, Any, Any], None]:
        def seen(_: Any, inputs: Any, output: Any) -> None:
            several = isinstance(output, tuple)
            if name.endswith("norm"):
                note(f"input of {name}", output[1] if several else inputs[0])
            note(name, output[0] if several else output)

        return seen

    handles = [part.register_forward_hook(hook(name)) for name, part in parts.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Trace:
    """bits: name -> [T] int64, equal where all bits of a token's vector are; shown: name -> [T, SHOWN] float32, its
    first numbers. A prompt may come in several pieces."""

    bits: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    shown: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def note(self, name: str, vectors: Tensor) -> None:
        rows = vectors.detach().reshape(-1, vectors.size(-1)).float() + 0.0  # -0.0 is 0.0
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(2**62, (rows.size(-1),), generator=generator).to(rows.device) | 1
        found = (rows.view(torch.int32).long() * factors).sum(-1).cpu()
        for kept, value in ((self.bits, found), (self.shown, rows[:, :SHOWN].cpu())):
            kept[name] = torch.cat([kept[name], value]) if name in kept else value

    def cut(self, tokens: int) -> Trace:
        return Trace({k: v[:tokens] for k, v in self.bits.items()}, {k: v[:tokens] for k, v in self.shown.items()})

    def save(self, file: Path) -> None:
        from safetensors.torch import save_file

        both = {f"bits/{k}": v for k, v in self.bits.items()} | {f"shown/{k}": v for k, v in self.shown.items()}
        save_file({name: value.contiguous() for name, value in both.items()}, file)

    @classmethod
    def load(cls, file: Path) -> Trace:
        from safetensors.torch import load_file

        both = load_file(file)
        return cls(*({k[len(s) :]: v for k, v in both.items() if k.startswith(s)} for s in ("bits/", "shown/")))


def first_difference(ours: Trace, theirs: Trace, tolerance: float = 0.0) -> tuple[str, Tensor] | None:
    """The first part that differs, in the order of `ours`, and at which tokens: [T] bool. tolerance above 0: of the
    numbers shown, in place of the bits."""
    for name, bits in ours.bits.items():
        if tolerance:
            differs = ~((ours.shown[name] - theirs.shown[name]).abs() <= tolerance).all(-1)
        else:
            differs = bits != theirs.bits[name]
        if bool(differs.any()):
            return name, differs
    return None


@dataclass(frozen=True)
class Found:
    """Of the last token of `length`: alone: the trainer's log-probability in a batch of its own; ours, theirs: its and
    vLLM's as a prompt at temperature 1. part: the first that differs of a model of `layers` layers, at `tokens` of the
    tokens before, from `first` on, by at most `apart` in the numbers shown; None: none does."""

    length: int
    layers: int
    alone: float
    ours: float
    theirs: float
    part: str | None = None
    tokens: int = 0
    first: int = 0
    apart: float = 0.0


def verdict(found: Found, trained: float) -> str:
    """trained: the trainer's log-probability in the batch that was compared."""
    if found.part is not None:
        by = f", by up to {found.apart:.1e} in their first {SHOWN} numbers" if found.apart else ""
        return (
            f"as a prompt the first part that differs is {found.part} (layers are numbered 0 to {found.layers - 1}): "
            f"at {found.tokens} of {found.length - 1} tokens, the first of them token {found.first}{by}"
        )
    if found.ours != found.theirs:
        return (
            f"as a prompt all {found.layers} layers agree, and the head does not: trainer {found.ours:.9g}, vLLM "
            f"{found.theirs:.9g} at temperature 1"
        )
    if found.alone != trained:
        return (
            f"as a prompt all {found.layers} layers and the head agree, and alone the trainer's rank 0 gives the token "
            f"{found.alone:.9g}: it is what the micro-batch, or the rank that computed it, makes of it"
        )
    return (
        f"as a prompt all {found.layers} layers and the head agree: the difference is in how it was sampled (decoding, "
        "other requests in the batch, the temperature, or an engine that does not hold these weights)"
    )


def find(
    trainer: MegatronTrainer, tokens: Sequence[int], directory: Path, *, tolerance: float = 0.0,
    offloaded: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Found:  # fmt: skip
    """Of the last of `tokens`. directory / "model": an export of the trainer's weights, which is deleted; the rest of
    what is found stays there. offloaded: a context in which the trainer's memory is off its GPU, entered where vLLM
    would have no room. LayerUnknown."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        alone, ours, trace = _by_trainer(trainer, tokens)
        trace.save(directory / "trainer.safetensors")
        crowded = trainer.runtime.device.type == "cuda" and not _has_room(trainer)
        with offloaded() if crowded else nullcontext():
            theirs = _by_engine(trainer, tokens, directory)
    finally:
        shutil.rmtree(directory / "model", ignore_errors=True)
    before = len(tokens) - 1
    of_engine = Trace.load(directory / "vllm.safetensors").cut(before)
    trace = trace.cut(before)
    found = Found(len(tokens), len(trainer.gpt.decoder.layers), alone, ours, theirs)
    different = first_difference(trace, of_engine, tolerance)
    if different is not None:
        part, at = different
        apart = (trace.shown[part] - of_engine.shown[part]).abs().max()
        values = {"part": part, "tokens": int(at.sum()), "first": int(at.int().argmax()), "apart": float(apart)}
        found = Found(**(asdict(found) | values))
    (directory / "found.json").write_text(json.dumps(asdict(found), indent=1) + "\n")
    return found


def _by_trainer(trainer: MegatronTrainer, tokens: Sequence[int]) -> tuple[float, float, Trace]:
    """(log-probability of the last token, the same at temperature 1, what the parts gave)."""
    mask = torch.ones(len(tokens)).index_fill(0, torch.tensor([0]), 0.0)
    batch = TrainBatch(
        tokens=torch.tensor(tokens), lengths=torch.tensor([len(tokens)]), loss_mask=mask, loss_weights=mask,
        rewards=torch.zeros(1), group_ids=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    trace, usual = Trace(), trainer.temperature

    def last() -> float:
        [row] = cast(list[Tensor], trainer.compute_logprobs([batch]))
        return float(row[-1])

    alone = last()
    trainer.temperature = 1.0
    try:
        with watching(trainer_parts(trainer.gpt), trace.note):
            return alone, last(), trace
    finally:
        trainer.temperature = usual


def _has_room(trainer: MegatronTrainer) -> bool:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(trainer.runtime.device)
    return free > ROOM * sum(p.numel() * p.element_size() for p in trainer.gpt.parameters()) + BESIDE


def _by_engine(trainer: MegatronTrainer, tokens: Sequence[int], directory: Path) -> float:
    """The log-probability of the last token as a prompt; what the parts gave is in vllm.safetensors."""
    device = trainer.runtime.device
    options: dict[str, Any] = {"dtype": str(trainer.dtype).removeprefix("torch.")}
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        options["gpu_memory_utilization"] = 0.9 * free / total
        own["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # which is compiled at its first use
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        own["CUDA_VISIBLE_DEVICES"] = seen.split(",")[device.index or 0] if seen else str(device.index or 0)
    request = {"tokens": list(tokens), "options": options}
    (directory / "request.json").write_text(json.dumps(request) + "\n")
    log = directory / "vllm.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-m", "rltool.weights.verify.layers", str(directory)], env={**os.environ, **own},
            stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        ) as process,
    ):  # fmt: skip
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            raise LayerUnknown(f"vLLM was not done after {SECONDS:g} s (log: {log})") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code != 0:
        raise LayerUnknown(f"vLLM ended with exit code {code} (log: {log}): {' '.join(excerpt(log, LOG_LINES))}")
    return json.loads((directory / "vllm.json").read_text())


def main(directory: Path) -> None:
    """What is asked in request.json, by vLLM in this process: vllm.safetensors, then vllm.json."""
    from vllm import LLM, SamplingParams, TokensPrompt

    request = json.loads((directory / "request.json").read_text())
    tokens: list[int] = request["tokens"]
    engine: Any = LLM(
        str(directory / "model"), enforce_eager=True, enable_prefix_caching=False, skip_tokenizer_init=True, seed=0,
        max_model_len=len(tokens) + 1, max_num_seqs=1, **request["options"],
    )  # fmt: skip
    trace = Trace()
    prompt = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    with watching(engine.apply_model(engine_parts)[0], trace.note):
        [output] = engine.generate(TokensPrompt(prompt_token_ids=tokens), prompt, use_tqdm=False)
    trace.save(directory / "vllm.safetensors")
    (directory / "vllm.json").write_text(json.dumps(output.prompt_logprobs[-1][tokens[-1]].logprob))


def end_with_parent() -> None:
    """A rank that is killed leaves no vLLM behind: the kernel closes its end of this stdin."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, daemon=True).start()
    main(Path(sys.argv[1]))
