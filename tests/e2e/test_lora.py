"""Adapters against the peft package: log-probabilities, gradients and merged weights in each layout; what is trained,
saved and resumed."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rltool.checkpoints.convert import torch_dist_to_hf
from rltool.checkpoints.convert_adapters import adapters_to_peft, merge_to_hf
from rltool.checkpoints.peft_format import PeftAdapter, write_peft
from rltool.checkpoints.torch_dist import load_adapters, load_checkpoint, save_checkpoint
from rltool.config.sections import LoraConfig
from rltool.errors import UsageError
from rltool.models.adapters import adapters_of
from rltool.models.registry import family_for, read_hf_config
from tests.e2e.megatron_models import (
    EXPERTS,
    definition_of,
    hf_logprobs,
    hf_model,
    in_float64,
    make_trainer,
    policy_batch,
    save_hf,
)
from tests.e2e.pictures import batch_with_pictures, hf_picture_logprobs, save_model
from tests.e2e.test_model_families import on_disk
from tests.e2e.test_pictures import SAMPLES

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 40]
LORA = {"rank": 4, "alpha": 6.0}
SFT = {"algorithm": {"loss": "sft"}, "optimizer": {"clip_grad": 0.0}}
RESUMED = {"optimizer": {"warmup_steps": 1, "decay_style": "cosine", "lr": 3e-3}, "algorithm": {"loss": "sft"}}


def layouts(kind: str) -> list[tuple[int, dict]]:
    """(ranks, layout), each with another part of the activations computed again."""
    full, selective = {"recompute": "full"}, {"recompute": "selective"}
    parallel = {"sequence_parallel": True} | full
    found = [
        (1, {}), (2, {"tp": 2, "trainer": parallel}), (2, {"pp": 2, "trainer": full}),
        (2, {"cp": 2, "trainer": selective}),
    ]  # fmt: skip
    found = [(world, layout) for world, layout in found if {*layout} - {"trainer"} <= {*definition_of(kind).layouts}]
    if kind in EXPERTS:
        return [*found, (2, {"ep": 2}), (1, {"trainer": {"expert_products": "grouped"}})]
    return [*found, (2, {"tp": 2})]


def own_share(trainer, batch):
    at = trainer.coordinates
    own = list(range(batch.num_samples))[at.dp_rank :: at.layout.dp]
    return [batch.select(own[:1]), batch.select(own[1:])]


def case(place, path, adapter, batch, layout):
    """Log-probabilities, loss, merged weights, and this rank's shards of the adapters' gradients."""
    with closing(make_trainer(place, path, lora=LORA, **layout, **SFT)) as trainer:
        untrained = trainer.compute_logprobs([batch])
        load_adapters(trainer, adapter)
        logprobs = trainer.compute_logprobs([batch.select([0, 1, 2]), batch.select([3, 4, 5, 6, 7])])
        exported = {meta.name: t.clone() for meta, t in trainer.export_weights(everywhere=True)}
        _, metrics = trainer.forward_backward(own_share(trainer, batch), global_loss_tokens=batch.num_loss_tokens)
        gradients = {parameter.name: held.main_grad.clone() for parameter, held in trainer.adapters.held()}
        metrics |= trainer.optimizer_step()
        return untrained, logprobs, exported, metrics, gradients


def case_memory(place, path, batch):
    """What a bf16 model with adapters holds, in bytes a parameter of each kind."""
    with closing(make_trainer(place, path, lora=LORA, dtype="bfloat16", **SFT)) as trainer:
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        trained = [p for p in trainer.gpt.parameters() if p.requires_grad]
        frozen = [p for p in trainer.gpt.parameters() if not p.requires_grad]
        buffers = [*trainer.ddp.buffers, *trainer.ddp.expert_parallel_buffers]
        inner = [each.optimizer for each in trainer.optimizer.chained_optimizers]
        state = [v for each in inner for s in each.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return {
            "dtypes": ({p.dtype for p in trained}, {p.dtype for p in frozen}),
            "frozen gradients": sum(p.grad is not None or hasattr(p, "main_grad") for p in frozen),
            "trained": sum(p.numel() for p in trained),
            "gradients": sum(buffer.grad_data.numel() for buffer in buffers),
            "updated": sum(p.numel() for each in inner for group in each.param_groups for p in group["params"]),
            "moments": sum(v.numel() for v in state if v.numel() > 1),
        }


def case_reference(place, path, batch, begin):
    """Log-probabilities before any step, those after one, and the reference's. begin: an adapter."""
    kl = {"algorithm": {"loss": "policy", "kl": {"kind": "loss", "coef": 0.1}}}
    with closing(make_trainer(place, path, lora=LORA | ({"init": begin} if begin else {}), **kl)) as trainer:
        if begin is not None:
            load_adapters(trainer, begin)
        first = trainer.compute_logprobs([batch])[0]
        trainer.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        moved = trainer.compute_logprobs([batch])[0]
        reference = trainer.compute_logprobs([batch], weights="reference")[0]
        assert torch.equal(trainer.compute_logprobs([batch])[0], moved), "the policy is put back"
        return first, moved, reference


def case_save(place, path, batch, directory, layout):
    """Two steps, saved; two more."""
    with closing(make_trainer(place, path, lora=LORA, **RESUMED, **layout)) as trainer:
        for _ in range(2):
            trainer.train_step(own_share(trainer, batch), global_loss_tokens=batch.num_loss_tokens)
        save_checkpoint(trainer, directory, {"step": 2})
        exported = {meta.name: t if t is None else t.clone() for meta, t in trainer.export_weights()}
        steps = [
            trainer.train_step(own_share(trainer, batch), global_loss_tokens=batch.num_loss_tokens) for _ in range(2)
        ]
        return exported, steps, trainer.parameter_hash()


def case_resume(place, path, batch, directory, layout, lora):
    with closing(make_trainer(place, path, lora=lora, **RESUMED, **layout)) as trainer:
        try:
            extra = load_checkpoint(trainer, directory)
        except UsageError as error:
            return str(error)
        assert extra == {"step": 2}
        exported = {meta.name: t if t is None else t.clone() for meta, t in trainer.export_weights()}
        steps = [
            trainer.train_step(own_share(trainer, batch), global_loss_tokens=batch.num_loss_tokens) for _ in range(2)
        ]
        return exported, steps, trainer.parameter_hash()


def random_adapter(directory: Path, path: Path) -> Path:
    """An adapter of peft's for all products of the model, B not 0."""
    family, lora = family_for(read_hf_config(path)), LoraConfig(**LORA)
    generator = torch.Generator().manual_seed(5)
    write_peft(
        directory, family, lora, str(path), lambda p: 0.1 * torch.randn(p.merged_shape, generator=generator)
    )
    return directory


def peft_model(kind: str, tied: bool, adapter: Path):
    from peft import PeftModel

    return PeftModel.from_pretrained(hf_model(kind, tied), adapter, is_trainable=True).eval()


def peft_gradients(model, rank: int) -> dict[str, torch.Tensor]:
    """By the names of an adapter's file: experts, which peft fuses, are taken apart again."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        name, grad = name.replace(".default", ""), parameter.grad
        if ".mlp.experts." not in name:
            found[name] = grad
            continue
        block, _, rest = name.partition(".experts.")
        up, is_a = rest.startswith("base_layer"), "lora_A" in rest
        rank_here = rank * (2 if up else 1)
        experts = (grad.size(0) if is_a else grad.size(1)) // rank_here
        per_expert = grad.view(experts, rank_here, -1) if is_a else grad.view(-1, rank_here, experts).permute(2, 0, 1)
        for expert, part in enumerate(per_expert):
            pieces = {"down_proj": part}
            if up and is_a:
                pieces = dict(zip(("gate_proj", "up_proj"), part.chunk(2), strict=True))
            elif up:  # the blocks of a diagonal
                half = len(part) // 2
                pieces = {"gate_proj": part[:half, :rank], "up_proj": part[half:, rank:]}
            for projection, piece in pieces.items():
                found[f"{block}.experts.{expert}.{projection}.lora_{'A' if is_a else 'B'}.weight"] = piece
    return found


MORE = ("phi3", "gemma2", "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5")
"""Products that HF fuses, other orders of rows, norms behind the product, dense layers beside experts."""


@pytest.fixture(
    scope="module",
    # glm4: biases, and positions on a part of a head, in one pass
    params=["qwen3", "glm4", "qwen3_moe", "glm4_moe_lite"] + [pytest.param(x, marks=pytest.mark.long) for x in MORE],
)
def family(request, tmp_path_factory):
    """(kind, model's directory, adapter's, batch, and by peft in float64 log-probabilities without and with it, loss,
    gradients)."""
    kind = request.param
    tied = kind in ("qwen3", "gemma2")
    path = save_hf(tmp_path_factory.mktemp(kind), kind, tied)
    adapter = random_adapter(tmp_path_factory.mktemp(f"{kind}-adapter") / "adapter", path)
    return expected_of_peft(kind, tied, path, adapter, policy_batch(LENGTHS), [[]] * len(LENGTHS))


def expected_of_peft(kind, tied, path, adapter, batch, pictures):
    """As `family`. pictures: of each sample."""
    samples = list(zip(batch.tokens.split(batch.lengths.tolist()), pictures, strict=True))

    def of_sample(tokens, files):
        return hf_picture_logprobs(model, path, tokens, files) if files else hf_logprobs(model, tokens, 1.0)

    def computed():
        return torch.cat([of_sample(*sample) for sample in samples])

    model = peft_model(kind, tied, adapter)
    with in_float64(kind, model):
        with model.disable_adapter(), torch.no_grad():
            plain = computed()
        logprobs = computed()
        at = batch.loss_mask > 0
        loss = -(batch.loss_weights[at] * logprobs[at]).sum() / at.sum()
        loss.backward()
    assert logprobs.dtype is torch.float64
    return kind, path, adapter, batch, plain, logprobs.detach(), float(loss.detach()), peft_gradients(model, 4)


def test_logprobs_gradients_and_merged_weights_are_those_of_peft_in_every_layout(ranks, family):
    compare_with_peft(ranks, family, layouts(family[0]))


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    """As `family`, on samples with pictures."""
    path = save_model(tmp_path_factory.mktemp("pictures"))
    adapter = random_adapter(tmp_path_factory.mktemp("pictures-adapter") / "adapter", path)
    batch = batch_with_pictures(path, SAMPLES)
    return expected_of_peft("qwen3_vl", False, path, adapter, batch, [files for _, files in SAMPLES])


SEEING = {"tp": (2, {"tp": 2}), "pp": (2, {"pp": 2, "trainer": {"recompute": "full"}})}
SEEING_MORE = {
    "one": (1, {}), "dp": (2, {}),
    "sequence": (2, {"tp": 2, "trainer": {"sequence_parallel": True, "recompute": "full"}}),
}  # fmt: skip


@pytest.mark.parametrize("layout", [*SEEING, *(pytest.param(name, marks=pytest.mark.long) for name in SEEING_MORE)])
def test_they_are_on_samples_with_pictures(ranks, seeing, layout):
    compare_with_peft(ranks, seeing, [(SEEING | SEEING_MORE)[layout]])


def compare_with_peft(ranks, family, every):
    _, path, adapter, batch, plain, logprobs, loss, expected = family
    adapted = adapters_of(family_for(read_hf_config(path)), LORA["rank"], "all-linear")
    parameters = {p.name: p for each in adapted for p in each.parameters}
    assert {p.hf[0][0] for p in parameters.values()} == expected.keys()
    norm = float(torch.nn.utils.get_total_norm(list(expected.values())))
    first = None
    for world, layout in every:
        results = ranks.run(case, world, path, adapter, batch, layout)
        for untrained, found, exported, metrics, _ in results:
            if found is not None:
                for ours, theirs in ((untrained, plain), (found, logprobs)):
                    torch.testing.assert_close(torch.cat(ours).double(), theirs, rtol=0, atol=1e-5, msg=f"{layout}")
            assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5), layout
            assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5), layout
            first = first or exported
            assert all(torch.allclose(exported[name], first[name], rtol=0, atol=1e-6) for name in first), layout
        for name, parameter in parameters.items():
            shards = [gradients[name] for *_, gradients in results if name in gradients]
            cut = parameter.shard_dim is not None and layout.get("tp", 1) > 1
            for shard in [] if cut else shards[1:]:
                torch.testing.assert_close(shard, shards[0], rtol=0, atol=1e-6)
            [gradient] = parameter.split(parameter.unshard(shards if cut else shards[:1]))
            wanted = expected[parameter.hf[0][0]]
            assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5, f"{layout} {name}"
    merged = merged_by_hand(path, adapter, adapted)
    assert all(torch.allclose(first[name], tensor, rtol=0, atol=1e-6) for name, tensor in merged.items())


def merged_by_hand(path, adapter, adapted) -> dict[str, torch.Tensor]:
    weights = on_disk(path)
    low = load_file(adapter / "adapter_model.safetensors")
    for each in adapted:
        for a, b, (name, _) in zip(each.a, each.b, each.base.hf, strict=True):
            weights[name] = weights[name] + LORA["alpha"] / LORA["rank"] * low[b.hf[0][0]] @ low[a.hf[0][0]]
    return weights


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("qwen3"), "qwen3", tied=True)


def test_the_model_has_no_gradient_no_master_copy_and_no_moments(ranks, dense):
    [held] = ranks.run(case_memory, 1, dense, policy_batch(LENGTHS))
    assert held["dtypes"] == ({torch.float32}, {torch.bfloat16})
    assert held["frozen gradients"] == 0
    trained = held["trained"]
    assert trained == sum(
        math.prod(p.merged_shape)
        for each in adapters_of(family_for(read_hf_config(dense)), LORA["rank"], "all-linear")
        for p in each.parameters
    )
    assert held["updated"] == trained, "the optimizer updates the adapters themselves, not copies of them"
    assert held["moments"] == 2 * trained
    assert trained <= held["gradients"] < trained + 4096, "but for the padding of Megatron's buffers"


def test_the_reference_is_the_model_as_it_began_bit_by_bit(ranks, dense, tmp_path):
    adapter = random_adapter(tmp_path / "adapter", dense)
    found = [ranks.run(case_reference, 1, dense, policy_batch(LENGTHS), begin)[0] for begin in (None, adapter)]
    for first, moved, reference in found:
        assert torch.equal(reference, first)
        assert (moved - first).abs().max() > 1e-3
    assert (found[0][0] - found[1][0]).abs().max() > 1e-3, "the adapter to begin with acts"


def test_a_checkpoint_of_adapters_resumes_exactly_and_in_another_layout(ranks, tmp_path):
    path = save_hf(tmp_path / "model", "qwen3_moe", tied=False)
    batch, directory = policy_batch(LENGTHS), tmp_path / "step_2"
    saved, expected, digest = ranks.run(case_save, 2, path, batch, directory, {"ep": 2})[0]
    names = dist_checkpointing.load_tensors_metadata(str(directory / "torch_dist"))
    assert names
    assert all("adapters." in name for name in names), "adapters and their moments alone"
    layouts = [
        (2, {"ep": 2}), (1, {}), (2, {"tp": 2, "trainer": {"sequence_parallel": True}}), (2, {"pp": 2}),
    ]  # fmt: skip
    for world, layout in layouts:
        found, steps, after = ranks.run(case_resume, world, path, batch, directory, layout, LORA)[0]
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items() if tensor is not None), layout
        for step, wanted in zip(steps, expected, strict=True):
            assert step["train/loss"] == pytest.approx(wanted["train/loss"], rel=1e-5), layout
            assert step["train/grad_norm"] == pytest.approx(wanted["train/grad_norm"], rel=1e-4), layout
            assert step["train/lr"] == wanted["train/lr"]
        assert (after == digest) == (layout == {"ep": 2})
    convert_and_begin_again(ranks, path, directory, saved, batch, tmp_path)


def convert_and_begin_again(ranks, path, directory, saved, batch, tmp_path):
    """The checkpoint as an adapter of peft's and as a whole model; and runs that begin from it."""
    from peft import PeftModel

    adapter, whole, again = tmp_path / "peft", tmp_path / "whole", tmp_path / "again"
    with pytest.raises(UsageError, match="add --merge"):
        torch_dist_to_hf(directory, whole)
    assert adapters_to_peft(directory, adapter).tensors_equal == len(merge_sources(path))
    done = merge_to_hf(directory, whole)
    assert done.logit_difference is not None and done.logit_difference < 1e-4
    merge_to_hf(adapter, again)
    for written in (whole, again):
        on_disk = {name: t for file in written.glob("*.safetensors") for name, t in load_file(file).items()}
        assert on_disk.keys() == saved.keys()
        for name, tensor in saved.items():
            torch.testing.assert_close(on_disk[name], tensor, rtol=0, atol=1e-6, msg=name)
    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).eval()
    sequences = batch.tokens.split(batch.lengths.tolist())
    with torch.no_grad():
        expected = torch.cat([hf_logprobs(model, tokens, 1.0) for tokens in sequences])
        tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), adapter)
        by_peft = torch.cat([hf_logprobs(tuned.eval(), tokens, 1.0) for tokens in sequences])
    torch.testing.assert_close(by_peft, expected, rtol=0, atol=1e-5)
    for source in (adapter, directory):
        _, found, *_ = ranks.run(case, 2, path, source, batch, {"ep": 2})[0]
        torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-5)


def merge_sources(path) -> list:
    adapted = adapters_of(family_for(read_hf_config(path)), LORA["rank"], "all-linear")
    return [parameter for each in adapted for parameter in each.parameters]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_vllm_that_loads_the_adapter_itself_computes_what_peft_does(tmp_path, kind):
    path = tmp_path / "sizes"
    hf_model(kind, False, hidden_size=128, num_attention_heads=4).save_pretrained(path)
    words = [kind, str(random_adapter(tmp_path / "adapter", path)), str(tmp_path / "model")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.e2e.vllm_families", "--adapter", *words], capture_output=True, text=True,
        timeout=540,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["moved"] > 0.1, found
    # With an adapter of this size float32 itself can be further off: peft 2e-5 from float64.
    assert found["without"] < 1e-5 and found["with"] < max(1e-5, found["rounding"]), found


def test_a_checkpoint_of_adapters_is_refused_beside_another_model_or_for_other_adapters(ranks, dense, tmp_path):
    batch, directory = policy_batch(LENGTHS), tmp_path / "step_2"
    ranks.run(case_save, 1, dense, batch, directory, {})
    other = save_hf(tmp_path / "other", "qwen3", tied=True, seed=1)
    for path, lora, message in (
        (other, LORA, "model.safetensors differs"),
        (dense, LORA | {"rank": 8}, "lora.rank = 4, but it is 8 now"),
        (dense, LORA | {"targets": ["qkv"]}, "lora.targets = 'all-linear'"),
        (dense, {}, "there is no [lora] now"),
    ):
        [error] = ranks.run(case_resume, 1, path, batch, directory, {}, lora)
        assert message in error
    adapter, family = random_adapter(tmp_path / "adapter", dense), family_for(read_hf_config(dense))
    with pytest.raises(UsageError, match="in contrast to the adapters"):
        PeftAdapter(adapter, adapters_of(family, 4, ["qkv"]))
