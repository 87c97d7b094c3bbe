"""What a rank gives away of its memory, and gets back: every byte of a real Megatron, on the CPU."""

from __future__ import annotations

import hashlib
from contextlib import closing

import pytest
import torch

from rltool.config.algorithm import CriticConfig
from rltool.megatron.offload import PARTS, tensors_of
from tests.e2e.megatron_models import make_trainer, policy_batch, save_hf

pytestmark = pytest.mark.e2e

LENGTHS = [5, 17, 2, 9, 12, 3, 8, 8]


def digests(model) -> dict[str, str]:
    """sha256 of every tensor that the model holds, by where Megatron has it, and not by how offload finds it."""
    found = {f"parameter {name}": p for name, p in model.gpt.named_parameters()}
    found |= {f"buffer {name}": b for name, b in model.gpt.named_buffers()}
    found |= {f"main_grad {name}": p.main_grad for name, p in model.gpt.named_parameters() if hasattr(p, "main_grad")}
    for number, each in enumerate(getattr(model.optimizer, "chained_optimizers", [model.optimizer])):
        for group, parameters in enumerate(each.optimizer.param_groups):
            for i, parameter in enumerate(parameters["params"]):
                found[f"master {number} {group} {i}"] = parameter
                for name, value in each.optimizer.state[parameter].items():
                    found[f"{name} {number} {group} {i}"] = value
    copies = {name: tensor.detach().to("cpu", copy=True).reshape(-1) for name, tensor in found.items()}
    return {name: hashlib.sha256(copy.view(torch.uint8).numpy()).hexdigest() for name, copy in copies.items()}


def optimizers(model) -> list:
    return [each.optimizer for each in getattr(model.optimizer, "chained_optimizers", [model.optimizer])]


def held(model) -> int:
    """Bytes below the tensors of all parts."""
    storages = [t.untyped_storage() for part in tensors_of(model.ddp, model.optimizer).values() for t in part]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def on_gpu() -> int:
    """Bytes that tensors have there, where there is one."""
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def step(trainer, batch):
    """Metrics and parameters after one optimizer step on this rank's samples."""
    metrics = trainer.train_step(own(trainer, batch), global_loss_tokens=batch.num_loss_tokens)
    return metrics, trainer.parameter_hash()


def own(trainer, batch):
    at = trainer.coordinates
    return [batch.select(list(range(batch.num_samples))[at.dp_rank :: at.layout.dp])]


def case_steps(place, path, settings, batch):
    """Four steps in which nothing leaves."""
    with closing(make_trainer(place, path, **settings)) as trainer:
        return [step(trainer, batch) for _ in range(4)][-1]


def case_round_trip(place, path, settings, batch):
    """Warmed up, away and back before the first step; two steps; everything away and back; then in the order of a
    colocated run's turns; two more steps.

    Returns the bytes that lie below the tensors, here and away, how many tensors were compared, and the last step."""
    with closing(make_trainer(place, path, **settings)) as trainer:
        trainer.warm_up()
        trainer.offload(PARTS)
        made = sum(len(state) for group in optimizers(trainer) for state in group.state.values())
        assert made == 2 * sum(len(part["params"]) for group in optimizers(trainer) for part in group.param_groups)
        trainer.onload(PARTS)
        for _ in range(2):
            step(trainer, batch)
        before, size, allocated = digests(trainer), held(trainer), on_gpu()
        trainer.offload(PARTS)
        empty = held(trainer)
        assert not allocated or allocated - on_gpu() >= size
        trainer.onload(PARTS)
        assert digests(trainer) == before
        trainer.discard_gradients()
        zeroed = digests(trainer)
        assert zeroed != before
        trainer.offload(("gradients", "optimizer"))
        assert 0 < held(trainer) < size
        for _ in trainer.export_weights():
            pass
        trainer.offload(("parameters",))
        trainer.onload(("parameters",))
        scored = trainer.compute_logprobs(own(trainer, batch))
        trainer.offload(("parameters",))
        trainer.onload(PARTS)
        assert digests(trainer) == zeroed
        again = trainer.compute_logprobs(own(trainer, batch))
        assert (scored is None and again is None) or all(map(torch.equal, scored, again))
        step(trainer, batch)
        return size, empty, len(before), step(trainer, batch)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "distributed", [pytest.param(False, marks=pytest.mark.long), True], ids=["whole", "distributed optimizer"]
)
def test_every_tensor_comes_back_bit_by_bit_and_training_goes_on_as_if_it_had_not_left(
    ranks, tmp_path, dtype, distributed
):
    check(ranks, tmp_path, {"dtype": dtype, "trainer": {"distributed_optimizer": distributed}})


@pytest.mark.parametrize("layout", [{"tp": 2}, pytest.param({"pp": 2}, marks=pytest.mark.long)], ids=["TP2", "PP2"])
def test_so_it_is_with_a_model_that_is_cut(ranks, tmp_path, layout):
    check(ranks, tmp_path, layout)


def check(ranks, tmp_path, settings) -> None:
    path, batch = save_hf(tmp_path / "model"), policy_batch(LENGTHS)
    expected = ranks.run(case_steps, 2, path, settings, batch)
    found = ranks.run(case_round_trip, 2, path, settings, batch)
    assert [last for *_, last in found] == expected, "training goes on as if nothing had left"
    assert all(empty == 0 < size and tensors > 50 for size, empty, tensors, _ in found)


def case_critic(place, path, batch):
    from rltool.megatron.critic import Critic

    batch = batch.replace(values=torch.zeros(len(batch.tokens)), value_targets=torch.ones(len(batch.tokens)))
    with closing(make_trainer(place, path, algorithm={"advantage": "gae"})) as trainer:
        critic = Critic(trainer, CriticConfig(lr=1e-3), total_optimizer_steps=10)
        critic.load_hf_weights(path)
        critic.train_step([batch], global_loss_tokens=batch.num_loss_tokens)
        before = digests(critic)
        critic.offload(PARTS)
        empty = held(critic)
        critic.onload(PARTS)
        return empty, before == digests(critic)


def test_so_it_is_with_a_critic(ranks, tmp_path):
    path, batch = save_hf(tmp_path / "model"), policy_batch(LENGTHS)
    assert ranks.run(case_critic, 1, path, batch) == [(0, True)]
