"""A trainer that rounds what engines in FP8 round, against a transformers model that this file rounds by itself."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file

from rltool.checkpoints.torch_dist import load_checkpoint, save_checkpoint
from rltool.config.algorithm import CriticConfig
from rltool.megatron.critic import Critic
from rltool.megatron.model import global_names
from tests.e2e.job import write_job
from tests.e2e.megatron_models import hf_logprobs, hf_model, make_trainer, policy_batch, save_for_runs, save_hf

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 40]
SIZES = {
    "hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 2,
}  # fmt: skip
CUT = SIZES | {"num_key_value_heads": 4, "intermediate_size": 512}
EXPERTS = SIZES | {"moe_intermediate_size": 128, "num_experts": 8, "norm_topk_prob": True}


def settings(fake=True, dtype="bfloat16", **trainer):
    trainer = {"fake_quantization": fake, **trainer}
    return {"dtype": dtype, "algorithm": {"loss": "sft"}, "optimizer": {"clip_grad": 0.0}, "trainer": trainer}


def rounded_weight(weight):
    """[..., rows, columns]: E4M3 by blocks of 128 x 128, whose scale is a 448th of their largest number."""
    rows, columns = weight.shape[-2] // 128, weight.shape[-1] // 128
    blocks = weight.float().unflatten(-1, (columns, 128)).unflatten(-3, (rows, 128)).transpose(-3, -2)
    scale = blocks.abs().amax((-2, -1), keepdim=True).clamp_min(1e-10) / 448
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.transpose(-3, -2).flatten(-2).flatten(-3, -2).to(weight.dtype)


def reference(kind, sizes, batch, *, rounds, dtype=torch.float32):
    """Log-probabilities, and gradients by name."""
    model = hf_model(kind, False, **sizes).to(dtype)
    if "moe" in kind:
        model.set_experts_implementation("eager")
    linears = [p for name, p in model.named_parameters() if "proj" in name and p.dim() > 1]
    if rounds:
        with torch.no_grad():
            for parameter in linears:
                parameter.copy_(rounded_weight(parameter))
    texts = batch.tokens.split(batch.lengths.tolist())
    logprobs = torch.cat([hf_logprobs(model, text, 1.0) for text in texts])
    (-(logprobs * batch.loss_weights * batch.loss_mask).sum() / batch.num_loss_tokens).backward()
    return logprobs.detach(), {name: p.grad.float() for name, p in model.named_parameters()}


# Cases: run in the ranks.


def case_compute(place, path, batch, options):
    """Log-probabilities, and gradients by Megatron's names."""
    with closing(make_trainer(place, path, **options)) as trainer:
        logprobs = trainer.compute_logprobs([batch])
        trainer.forward_backward([batch], global_loss_tokens=batch.num_loss_tokens)
        named = global_names(trainer.gpt)
        gradients = {name: p.main_grad.clone() for name, p in named.items() if hasattr(p, "main_grad")}
        return None if logprobs is None else logprobs[0], gradients


def trained(trainer, batch, count=1):
    at = trainer.coordinates
    own = batch.select(list(range(batch.num_samples))[at.dp_rank :: at.layout.dp])
    return [trainer.train_step([own], global_loss_tokens=batch.num_loss_tokens) for _ in range(count)]


def exported(trainer):
    return {meta.name: tensor.clone() for meta, tensor in trainer.export_weights(everywhere=True)}


def case_masters(place, path, batch, name, options):
    """At the beginning and after each of six steps: a parameter, and what the optimizer has of it."""
    with closing(make_trainer(place, path, **options)) as trainer:
        parameter, found = global_names(trainer.gpt)[name], []
        for _ in range(7):
            found.append((parameter.detach().clone(), parameter.main_param.detach().clone()))
            trained(trainer, batch)
        return found


def case_steps(place, path, batch, options):
    """Weights at the beginning, log-probabilities, and weights after two steps."""
    with closing(make_trainer(place, path, **options)) as trainer:
        first, logprobs = exported(trainer), trainer.compute_logprobs([batch])
        trained(trainer, batch, 2)
        return first, None if logprobs is None else logprobs[0], exported(trainer)


def case_save(place, path, batch, directory, options):
    """Saves after two steps, the optimizer's numbers with it; two more."""
    with closing(make_trainer(place, path, **options)) as trainer:
        trained(trainer, batch, 2)
        save_checkpoint(trainer, directory, {"step": 2})
        saved = trainer.parameter_hash()
        return saved, trained(trainer, batch, 2), trainer.parameter_hash(), exported(trainer)


def case_resume(place, path, batch, directory, options):
    with closing(make_trainer(place, path, load=False, **options)) as trainer:
        load_checkpoint(trainer, directory)
        loaded = exported(trainer)
        return trainer.parameter_hash(), trained(trainer, batch, 2), trainer.parameter_hash(), loaded


def case_reference(place, path, batch, directory, options):
    """Log-probabilities of policy and reference: at the beginning, after a step, of the step as the reference, and from
    its checkpoint."""

    def both(trainer):
        return [trainer.compute_logprobs([batch], weights=name)[0] for name in ("policy", "reference")]

    with closing(make_trainer(place, path, **options)) as trainer:
        found = [both(trainer)]
        trained(trainer, batch)
        found.append(both(trainer))
        trainer.update_reference()
        found.append(both(trainer))
        trained(trainer, batch)
        found.append(both(trainer))
        save_checkpoint(trainer, directory, {"step": 2})
        trainer.load_hf_weights(path)
        load_checkpoint(trainer, directory)
        return [*found, both(trainer)]


def distance(found, expected):
    return float((found - expected).abs().mean())


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


COMPUTED = {
    "dense": ("qwen3", SIZES, {}),
    "fused in the checkpoint": ("phi3", SIZES | {"num_key_value_heads": 4}, {}),
    "rows in another order": ("glm4", SIZES | {"head_dim": 128}, {}),
    "experts one after the other": ("qwen3_moe", EXPERTS, {"expert_products": "sequential"}),
    "experts at once": ("qwen3_moe", EXPERTS, {"expert_products": "grouped"}),
    "a shared expert": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 128}, {}),
}
MATRICES = {
    "self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
}  # fmt: skip


@pytest.mark.parametrize("case", COMPUTED)
def test_it_computes_as_a_model_whose_weights_are_rounded(ranks, tmp_path, case):
    kind, sizes, trainer = COMPUTED[case]
    path, batch = save_hf(tmp_path / "hf", kind, False, sizes=sizes), policy_batch(LENGTHS)
    expected, by_weight = reference(kind, sizes, batch, rounds=True)
    plain, plain_by_weight = reference(kind, sizes, batch, rounds=False)
    [(found, gradients)] = ranks.run(case_compute, 1, path, batch, settings(dtype="float32", **trainer))
    assert distance(found, expected) < 1e-4 < 0.05 < distance(plain, expected)
    compared = 0
    for ours, theirs in MATRICES.items():
        by_ours, name = gradients.get(f"decoder.layers.1.{ours}.weight"), f"model.layers.1.{theirs}.weight"
        if by_ours is not None and name in by_weight:
            assert relative(by_ours, by_weight[name]) < 1e-4 < 0.05 < relative(by_ours, plain_by_weight[name])
            compared += 1
    assert compared


@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", SIZES), ("qwen3_moe", EXPERTS)])
def test_so_it_does_in_bfloat16(ranks, tmp_path, kind, sizes):
    path, batch = save_hf(tmp_path / "hf", kind, False, sizes=sizes), policy_batch(LENGTHS)
    expected, _ = reference(kind, sizes, batch, rounds=True, dtype=torch.bfloat16)
    [(found, _)] = ranks.run(case_compute, 1, path, batch, settings())
    [(plain, _)] = ranks.run(case_compute, 1, path, batch, settings(fake=False))
    near, far = distance(found, expected), distance(plain, expected)
    assert near < 0.06 < 0.15 < far and near < far / 5


PROJECTION = "decoder.layers.0.self_attention.linear_proj.weight"


@pytest.mark.parametrize("distributed", [False, True])
def test_small_steps_add_up_in_the_optimizer_until_a_rounded_weight_moves(ranks, tmp_path, distributed):
    path, batch = save_hf(tmp_path / "hf", "qwen3", False, sizes=SIZES), policy_batch(LENGTHS)
    options = settings(distributed_optimizer=distributed) | {"optimizer": {"lr": 2e-4}}
    [steps] = ranks.run(case_masters, 1, path, batch, PROJECTION, options)
    state = hf_model("qwen3", False, **SIZES).bfloat16().state_dict()
    start = state["model.layers.0.self_attn.o_proj.weight"].float()
    assert torch.equal(steps[0][1].view_as(start), start), "as it was loaded, not as it is rounded"
    for weight, master in steps:
        assert weight.dtype is torch.bfloat16 and master.dtype is torch.float32
        assert torch.equal(weight, rounded_weight(master.view_as(weight).bfloat16()))
    moved = [float((weight != steps[0][0]).float().mean()) for weight, _ in steps]
    assert 0 < moved[1] < 0.1 and 2 * moved[1] < moved[-1], "a few at a time, and not the same ones"
    far = (steps[-1][1] - steps[0][1]).abs().mean()
    assert far > 2 * (steps[1][1] - steps[0][1]).abs().mean()
    jump, step = (float((now.float() - before.float()).abs().max()) for now, before in zip(*steps[-2:], strict=True))
    assert jump > 20 * step


LAYOUTS = {
    "TP2": (2, "qwen3", CUT, {"tp": 2}),
    "TP2, the sequence cut": (2, "qwen3", CUT, {"tp": 2, "trainer": {"sequence_parallel": True}}),
    "TP2 with experts": (2, "qwen3_moe", CUT | EXPERTS | {"num_key_value_heads": 4, "moe_intermediate_size": 256},
                         {"tp": 2, "trainer": {"sequence_parallel": True}}),
    "PP2": (2, "qwen3", SIZES, {"pp": 2}),
    "EP2": (2, "qwen3_moe", EXPERTS, {"ep": 2, "trainer": {"expert_products": "grouped"}}),
    "distributed optimizer": (2, "qwen3", SIZES, {"trainer": {"distributed_optimizer": True}}),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_round_what_one_rank_rounds(ranks, tmp_path, layout):
    size, kind, sizes, options = LAYOUTS[layout]
    path, batch = save_hf(tmp_path / "hf", kind, False, sizes=sizes), policy_batch(LENGTHS)
    options = {**options, **settings(dtype="float32", **options.get("trainer", {}))}
    [(first, expected, after)] = ranks.run(case_steps, 1, path, batch, settings(dtype="float32"))
    found = ranks.run(case_steps, size, path, batch, options)
    logprobs = next(each for _, each, _ in found if each is not None)
    assert distance(logprobs, expected) < 1e-4
    for weights, _, later in found:
        for name, tensor in weights.items():
            assert torch.equal(tensor, first[name]), name
            if "proj" in name:
                # Idempotent but for bfloat16, which this model is not in.
                torch.testing.assert_close(later[name], rounded_weight(later[name]), rtol=1e-5, atol=1e-8)
                assert not torch.equal(later[name], tensor) and relative(later[name], after[name]) < 1e-2


@pytest.mark.parametrize(
    ("size", "kind", "sizes", "options"),
    [
        (1, "qwen3", SIZES, settings()),
        (2, "qwen3", SIZES, settings(distributed_optimizer=True)),
        (2, "qwen3_moe", EXPERTS, settings() | {"ep": 2}),
    ],
)
def test_a_resumed_run_goes_on_bit_by_bit(ranks, tmp_path, size, kind, sizes, options):
    path, batch = save_hf(tmp_path / "hf", kind, False, sizes=sizes), policy_batch(LENGTHS)
    saved = ranks.run(case_save, size, path, batch, tmp_path / "step", options)
    resumed = ranks.run(case_resume, size, path, batch, tmp_path / "step", options)
    assert [each[:3] for each in resumed] == [each[:3] for each in saved]
    weights = resumed[0][3]
    assert all(torch.equal(w, rounded_weight(w)) for name, w in weights.items() if "proj" in name)


def test_a_checkpoint_of_a_run_without_it_is_rounded_when_it_is_loaded(ranks, tmp_path):
    path, batch = save_hf(tmp_path / "hf", "qwen3", False, sizes=SIZES), policy_batch(LENGTHS)
    ranks.run(case_save, 1, path, batch, tmp_path / "step", settings(fake=False))
    [(_, _, _, plain)] = ranks.run(case_resume, 1, path, batch, tmp_path / "step", settings(fake=False))
    [(_, _, _, found)] = ranks.run(case_resume, 1, path, batch, tmp_path / "step", settings())
    for name, tensor in plain.items():
        assert torch.equal(found[name], rounded_weight(tensor) if "proj" in name else tensor), name


def test_the_reference_is_the_rounded_policy_of_its_time(ranks, tmp_path):
    path, batch = save_hf(tmp_path / "hf", "qwen3", False, sizes=SIZES), policy_batch(LENGTHS)
    following = {"algorithm": {"kl": {"kind": "loss", "coef": 0.3, "reference_update_steps": 1}}}
    options = settings() | following | {"optimizer": {"lr": 1e-2}}
    [found] = ranks.run(case_reference, 1, path, batch, tmp_path / "step", options)
    beginning, step, followed, later, loaded = found
    assert torch.equal(*beginning) and torch.equal(*followed)
    assert torch.equal(step[1], beginning[0]) and not torch.equal(*step)
    assert torch.equal(later[1], followed[0]) and not torch.equal(*later)
    assert all(map(torch.equal, loaded, later))


def case_critic(place, path, batch):
    """Whether a critic beside a policy that rounds computes with its weights as they are."""
    with closing(make_trainer(place, path, **settings(), steps=10)) as trainer:
        critic = Critic(trainer, CriticConfig(), total_optimizer_steps=10)
        critic.load_hf_weights(path)
        ours, theirs = (global_names(model.gpt)[PROJECTION] for model in (trainer, critic))
        return ours.detach().clone(), theirs.detach().clone()


def test_a_critic_is_not_rounded(ranks, tmp_path):
    path, batch = save_hf(tmp_path / "hf", "qwen3", False, sizes=SIZES), policy_batch(LENGTHS)
    [(ours, theirs)] = ranks.run(case_critic, 1, path, batch)
    assert not torch.equal(ours, theirs) and torch.equal(ours, rounded_weight(theirs))


def test_a_supervised_run_rounds_for_engines_that_come_later(tmp_path):
    """Their files and its own: of the one exported for Hugging Face each matrix is rounded."""
    job = write_job(tmp_path / "job", save_for_runs(tmp_path, False, SIZES), None)
    sets = ['algorithm.loss="sft"', "steps=2", "optimizer_steps_per_rollout=1", "eval.sets={}"]
    sets += ['model.dtype="bfloat16"', "trainer.fake_quantization=true", "checkpoint.save_hf_at_end=true"]
    job("train", "one", sets=sets)
    [written] = (job.runs / "one" / "hf").glob("step_*")
    tensors = load_file(written / "model.safetensors")
    matrices = [name for name in tensors if "proj" in name]
    assert len(matrices) == 2 * 7 and len(job.steps("one")) == 2
    assert all(torch.equal(tensors[name], rounded_weight(tensors[name])) for name in matrices)
