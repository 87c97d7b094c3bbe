"""Loads models that went through convert-ckpt, there and back, into the real vLLM, family after family in one process,
and then syncs the trainer's weights into the running engine: those it begins with, those after two optimizer steps.

`python -m tests.e2e.vllm_families [family ...]` prints a JSON line for each family, all of them without arguments:

exported    the largest difference of a prompt's log-probabilities to transformers with the weights from before the
            conversion, in fp32; of families in bf16 (IN_BF16) the mean. Qwen3.5's have their vision tower
synced      the same after each sync: over gloo the trainer's before and after its steps, over disk the first ones again
moved       how far apart by that measure the weights of each sync are from those before it
stepped     the mean difference of the trainer's log-probabilities before and after its steps
trained     the mean difference of trainer and engine, before and after them
trainer     the largest difference of the trainer to transformers in fp32
exact       the difference by that measure of each side to transformers in float64, the largest over all three weights;
            of the trainer over its own; of families in bf16 transformers is in bf16 there, and the trainer left out
abandoned   the same as `synced`, after an update that was given up half-way, of the weights that the engine had
copies      how many of vLLM's packed copies of weights there are after the syncs, and were before them
seconds     of all that
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before vLLM is imported. Its engine core inside this process: one import for all families.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
)

import torch
from safetensors.torch import load_file, save_file

from rltool.engines.dialects.vllm_launch import WORKER_EXTENSION
from rltool.engines.transfer import wire
from rltool.engines.types import Bucket
from tests.e2e.megatron_models import (
    DELTA,
    KINDS,
    LATENT,
    VOCAB,
    WITH_TOWER,
    auto_class,
    hf_logprobs,
    hf_model,
    in_float64,
    make_trainer,
    policy_batch,
    save_as_released,
    save_with_tower,
)
from tests.ranks import flat_bytes

HIDDEN = 128
"""With four heads, a head size of 32: vLLM's smallest on the CPU."""
PROMPT = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
BUCKET_BYTES = 1 << 18
"""Less than the experts of a layer: they arrive in several buckets."""
TIMEOUT = 60.0
Tensors = dict[str, torch.Tensor]


TIED = ("qwen2", "gemma2", "gemma3", "smollm3")
IN_BF16 = DELTA
"""vLLM 0.32 on a CPU: "CPU GDN attention requires BF16". Weights are rounded to it first."""
SIZES = LATENT | {kind: dict(linear_key_head_dim=128, linear_value_head_dim=128) for kind in DELTA}
RATE = 5e-3
"""Of the trainer's two steps: log-probabilities are visibly others then."""
HEAD_TWICE = "qwen2"
"""Tied, and its engine starts from files that hold the output head as well, as some tools write them."""


def rotate_in_plain_torch() -> None:
    """vLLM 0.32's kernel for a CPU turns latent attention's queries wrongly, a view of a part of each head, where
    rotary positions are not scaled: log-probabilities are off by 2 to 4, also with weights that no one has touched."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def exact_logprobs(kind: str, model: Any) -> torch.Tensor:
    """The model is in float64 then."""
    with in_float64(kind, model):
        return hf_logprobs(model, PROMPT, 1.0)


def trained(kind: str, model: Path) -> tuple[list[Tensors], list[torch.Tensor]]:
    """The trainer's weights as it sends them, and a prompt's log-probabilities: before and after two steps."""
    prompt, batch = policy_batch([len(PROMPT)]), policy_batch([40, 12, 9, 30])
    prompt.tokens.copy_(PROMPT)
    weights, logprobs = [], []
    options = dict(algorithm={"loss": "sft"}, optimizer={"lr": RATE, "clip_grad": 0.0})
    with closing(make_trainer(SimpleNamespace(world_size=1, rank=0, port=0), model, **options)) as trainer:
        for steps in (0, 2):
            for _ in range(steps):
                trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
            weights.append({meta.name: tensor.clone() for meta, tensor in trainer.export_weights()})
            logprobs += trainer.compute_logprobs([prompt])
    return weights, logprobs


def model_of(kind: str, seed: int):
    """In float32."""
    model = hf_model(kind, kind in TIED, seed, hidden_size=HIDDEN, num_attention_heads=4, **SIZES.get(kind, {}))
    return cast(model, torch.bfloat16, back=True) if kind in IN_BF16 else model


def model_with(kind: str, tensors: Tensors, directory: Path):
    """In float32, with these tensors of a checkpoint."""
    plain = model_of(kind, 0)
    plain.config.save_pretrained(directory)
    if kind in WITH_TOWER:  # of which the language model stands alone here
        tensors = {name.replace(".language_model.", "."): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    attends = plain.config._attn_implementation
    return auto_class(kind).from_pretrained(directory, dtype=torch.float32, attn_implementation=attends).eval()


def cast(model: Any, dtype: torch.dtype, *, back: bool = False) -> Any:
    """Its parameters alone, `back`: rounded: rotary frequencies stay in float32, in transformers as well."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.to(dtype).to(parameter.dtype if back else dtype)
    return model


def save(kind: str, seed: int, directory: Path) -> None:
    model = model_of(kind, seed)
    if kind in WITH_TOWER:  # as all that were released
        save_with_tower(directory, kind, model)
    else:
        save_as_released(cast(model, torch.bfloat16) if kind in IN_BF16 else model, directory)


def convert(kind: str, work: Path) -> Path:
    from rltool.checkpoints.convert import hf_to_torch_dist, torch_dist_to_hf

    save(kind, 0, work / "original")
    hf_to_torch_dist(work / "original", work / "dist", verify=False)
    torch_dist_to_hf(work / "dist", work / "back", verify=False)
    if kind == HEAD_TWICE:
        add_the_head(work / "back")
    return work / "back"


def add_the_head(directory: Path) -> None:
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file, {"format": "pt"})


def weights_of(kind: str, seed: int, directory: Path) -> Tensors:
    """As a checkpoint names and cuts them, which is how the trainer sends them."""
    save(kind, seed, directory)
    found = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in found.items() if not name.startswith("model.visual.")}


@contextmanager
def engine_of(model: Path, **more: Any) -> Iterator[Any]:
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed import cleanup_dist_env_and_memory

    config = json.loads((model / "config.json").read_text())
    options: dict[str, Any] = {"limit_mm_per_prompt": {"image": 0, "video": 0}} if "vision_config" in config else {}
    options |= dict(dtype=config["dtype"], enforce_eager=True, skip_tokenizer_init=True)
    options |= dict(max_model_len=64, max_num_seqs=2)
    options |= dict(max_num_batched_tokens=64) | more  # which is also what vLLM tries out at its start
    if "kv_lora_rank" in config:
        options |= dict(attention_backend="CPU_MLA")  # with AMX, vLLM would take kernels that are for bf16
    transfer = WeightTransferConfig(backend="rltool")
    engine = LLM(str(model), weight_transfer_config=transfer, worker_extension_cls=WORKER_EXTENSION, **options)
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def vllm_logprobs(engine: Any, tokens: torch.Tensor, **more: Any) -> torch.Tensor:
    """[T]: log p(tokens[t] | before), 0 for the first."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [TokensPrompt(prompt_token_ids=tokens.tolist())]
    (output,) = engine.generate(prompts, sampling, use_tqdm=False, **more)
    found = [output.prompt_logprobs[i][int(token)].logprob for i, token in enumerate(tokens) if i]
    return torch.tensor([0.0, *found])


def announced(bucket: Bucket, **more: str) -> dict[str, Any]:
    columns = {
        "names": [meta.name for meta in bucket],
        "dtypes": [meta.dtype for meta in bucket],
        "shapes": [list(meta.shape) for meta in bucket],
    }
    return {"update_info": columns | more}


def packed_copies() -> int:
    """Of weights, made by vLLM and alive in this process: of linear layers and of experts."""
    from vllm._custom_ops import CPUDNNLGEMMHandler
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    gc.unfreeze()  # vLLM hides from the collector what there is after its start
    gc.collect()
    return sum(type(found) in (CPUDNNLGEMMHandler, CPUUnquantizedExperts) for found in gc.get_objects())


def sync_over_gloo(engine: Any, tensors: Tensors, buckets: list[Bucket], work: Path) -> None:
    store = wire.host_store("127.0.0.1", 0, TIMEOUT)
    init = dict(address="127.0.0.1", port=store.port, rank_offset=1, world_size=2, group="g", timeout_seconds=TIMEOUT)
    # The engine's worker lives in this thread, the trainer's side in another.
    with ThreadPoolExecutor(1) as trainer:
        joined = trainer.submit(wire.open_group, "127.0.0.1", store.port, 0, 2, "g", TIMEOUT, store=store)
        engine.init_weight_transfer_engine({"init_info": {"transport": "gloo", **init}})
        group = joined.result()
        try:
            engine.start_weight_update()
            for bucket in buckets:
                flat = flat_bytes(tensors, bucket)
                sent = trainer.submit(wire.broadcast, group, flat)
                engine.update_weights(announced(bucket))
                sent.result()
            engine.finish_weight_update()
            engine.shutdown_weight_transfer_engine()
        finally:
            group.shutdown()


def sync_over_disk(engine: Any, tensors: Tensors, buckets: list[Bucket], work: Path) -> None:
    send_half_over_disk(engine, tensors, buckets, work)
    write_and_load(engine, tensors, buckets[len(buckets) // 2 :], work)
    engine.finish_weight_update()
    engine.shutdown_weight_transfer_engine()


def abandon_half_way(engine: Any, tensors: Tensors, buckets: list[Bucket], work: Path) -> None:
    send_half_over_disk(engine, tensors, buckets, work)
    engine.collective_rpc("rltool_end_unfinished_update")


def send_half_over_disk(engine: Any, tensors: Tensors, buckets: list[Bucket], work: Path) -> None:
    engine.init_weight_transfer_engine({"init_info": {"transport": "disk"}})
    engine.start_weight_update()
    write_and_load(engine, tensors, buckets[: len(buckets) // 2], work)


def write_and_load(engine: Any, tensors: Tensors, buckets: list[Bucket], work: Path) -> None:
    for bucket in buckets:
        path = work / "bucket.safetensors"
        save_file({meta.name: tensors[meta.name] for meta in bucket}, path)
        engine.update_weights(announced(bucket, path=str(path)))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().max().item()


def mean_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one - other).abs().mean().item()


@dataclass
class Case:
    """Of one family: what its engine starts with, the weights of that and the trainer's two to send, and a prompt's
    log-probabilities with each by transformers, in float32 and in float64; with its own by the trainer, and by
    transformers in float32."""

    model: Path
    weights: list[Tensors]
    expected: list[torch.Tensor]
    exact: list[torch.Tensor]
    trainers: list[torch.Tensor]
    alike: list[torch.Tensor]
    theirs: list[torch.Tensor]
    """By transformers in the engine's precision."""


def prepare(kind: str, work: Path) -> Case:
    weights = [weights_of(kind, seed, work / str(seed)) for seed in range(2)]
    own, trainers = trained(kind, work / "1")
    assert own[0].keys() == weights[1].keys()
    assert all(torch.equal(tensor, weights[1][name].float()) for name, tensor in own[0].items())
    # Of families in bf16 the engine rounds what it gets.
    sent = [{name: tensor.to(weights[1][name].dtype) for name, tensor in each.items()} for each in own]

    def models() -> Iterator[Any]:
        yield from (model_of(kind, seed) for seed in range(2))
        yield model_with(kind, sent[1], work / "2")

    with torch.no_grad():
        alike = [hf_logprobs(model_with(kind, each, work / "own"), PROMPT, 1.0) for each in own]
        theirs = expected = [hf_logprobs(model, PROMPT, 1.0) for model in models()]
        if kind in IN_BF16:
            theirs = [hf_logprobs(cast(model, torch.bfloat16), PROMPT, 1.0) for model in models()]
        exact = [exact_logprobs(kind, model) for model in models()]
    return Case(convert(kind, work), [weights[0], *own], expected, exact, trainers, alike, theirs)


def compare(kind: str, case: Case, work: Path) -> dict[str, Any]:
    expected, tokens, trainers = case.expected, PROMPT, case.trainers
    computed: list[torch.Tensor] = []
    apart = mean_difference if kind in IN_BF16 else difference
    if kind in LATENT:
        rotate_in_plain_torch()
    with engine_of(case.model) as engine:

        def seen(number: int) -> float:
            computed.append(vllm_logprobs(engine, tokens))
            return apart(computed[-1], expected[number])

        def after(send: Callable[..., None], number: int) -> float:
            tensors = case.weights[number]
            buckets = wire.plan_buckets([wire.meta_of(*item) for item in tensors.items()], BUCKET_BYTES)
            send(engine, tensors, buckets, work)
            return seen(number)

        found: dict[str, Any] = {"exported": seen(0)}
        before = packed_copies()
        found["synced"] = [after(sync_over_gloo, 1), after(sync_over_gloo, 2), after(sync_over_disk, 0)]
        found |= {"copies": [packed_copies(), before], "abandoned": after(abandon_half_way, 0)}
    sides = {"vllm": computed[:3], "transformers": case.theirs}
    if kind not in IN_BF16:
        sides["trainer"] = trainers
    found["exact"] = {
        side: max(apart(x.double(), y) for x, y in zip(logprobs, case.exact[-len(logprobs) :], strict=True))
        for side, logprobs in sides.items()
    }
    found["stepped"] = mean_difference(*trainers)
    found["trained"] = [mean_difference(x, y) for x, y in zip(computed[1:3], trainers, strict=True)]
    found["trainer"] = max(difference(x, y) for x, y in zip(trainers, case.alike, strict=True))
    return found | {"moved": [apart(expected[i - 1], expected[i]) for i in range(3)]}


def compare_adapter(kind: str, adapter: Path, work: Path) -> dict[str, float]:
    """A vLLM that loads an adapter of peft's itself: the largest difference to peft, without it and with it, how far
    apart these two are, and how far peft with it is from itself in float64."""
    from peft import PeftModel
    from vllm.lora.request import LoRARequest

    model_of(kind, 0).save_pretrained(work)
    with torch.no_grad():
        plain = hf_logprobs(model_of(kind, 0), PROMPT, 1.0)
        model = PeftModel.from_pretrained(model_of(kind, 0), adapter).eval()
        adapted, exact = hf_logprobs(model, PROMPT, 1.0), hf_logprobs(model.double(), PROMPT, 1.0)
    with engine_of(work, enable_lora=True, max_lora_rank=8) as engine:
        request = LoRARequest("adapter", 1, str(adapter))
        return {
            "without": difference(vllm_logprobs(engine, PROMPT), plain),
            "with": difference(vllm_logprobs(engine, PROMPT, lora_request=request), adapted),
            "moved": difference(plain, adapted), "rounding": difference(adapted, exact),
        }


def main(kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as work:
        # All that is without vLLM first: it leaves process groups behind, and changes classes of transformers that it
        # serves families by.
        cases = {kind: prepare(kind, Path(work) / kind) for kind in kinds}
        for kind, case in cases.items():
            started = time.monotonic()
            found = compare(kind, case, Path(work) / kind)
            seconds = round(time.monotonic() - started, 1)
            print(json.dumps({"family": kind, **found, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--adapter"]:
        print(json.dumps(compare_adapter(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))))
    else:
        main(sys.argv[1:] or list(KINDS))
