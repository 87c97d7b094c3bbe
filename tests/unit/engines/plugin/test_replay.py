"""Loading that is recorded and replayed, on plain modules with loaders as vLLM's are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rltool.engines.plugin.loading import Loader, WeightUpdateError
from rltool.engines.plugin.replay import NotACopy, record_plan
from rltool.engines.transfer.wire import meta_of, plan_buckets

WIDTH = 6


class Model(torch.nn.Module):
    """q and k fused in one parameter; `o` is this rank's half of the columns; an embedding with padding rows.

    how: "computes" (a loader that stores something else), "looks" (one that reads a value), "adds" (one that changes in
    place), or "" for plain copies.
    """

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.qk = torch.nn.Parameter(torch.zeros(8, WIDTH), requires_grad=False)
        self.o = torch.nn.Parameter(torch.zeros(WIDTH, 4), requires_grad=False)
        self.embedding = torch.nn.Parameter(torch.ones(16, WIDTH), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, named: list[tuple[str, torch.Tensor]]) -> set[str]:
        taken = set()
        for name, tensor in named:
            if name == "q":
                self.qk.data[:4].copy_(tensor)
            elif name == "k":
                self.qk.data.narrow(0, 4, 4).copy_(tensor)
            elif name == "o":
                self.o.data.copy_(tensor.narrow(1, 4, 4))
            elif name == "embedding":
                self.embedding[: tensor.shape[0]].data.copy_(tensor)
                self.embedding[tensor.shape[0] :].data.fill_(0)
            elif name == "norm":
                self._load_norm(tensor)
            else:
                continue
            taken.add(name)
        return taken

    def _load_norm(self, tensor: torch.Tensor) -> None:
        if self.how == "computes":
            tensor = torch.exp(tensor)
        elif self.how == "looks" and tensor.sum().item() > 0:
            tensor = tensor * 2
        elif self.how == "adds":
            self.norm.data.add_(tensor)
            return
        self.norm.data.copy_(tensor)


class DirectReload:
    """In place of vLLM's: tensors go where they belong at once. log: what was called."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def begin_reload(self, model: Any) -> None:
        self.log.append("begin")

    def abandon_reload(self, model: Any) -> None:
        self.log.append("abandon")

    def as_taken(self, model: Any, name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor)]

    def missing_layers(self, model: Any) -> list[str]:
        return []

    def finish_reload(self, model: Any, model_config: Any) -> None:
        self.log.append("finish")

    def waits(self, layer: Any) -> bool:
        return False

    def kernel_parameters(self, layer: torch.nn.Module) -> list[torch.Tensor]:
        return list(layer.parameters(recurse=False))

    def check_copied(self, model: Any) -> None: ...

    def derive(self, model: Any, model_config: Any) -> None:
        self.log.append("derive")


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (4, WIDTH), "k": (4, WIDTH), "o": (WIDTH, 8), "embedding": (13, WIDTH), "norm": (WIDTH,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def buckets_of(tensors: dict[str, torch.Tensor], limit: int = 150) -> list[Any]:
    return plan_buckets([meta_of(name, tensor) for name, tensor in tensors.items()], limit)


def flats(tensors: dict[str, torch.Tensor], limit: int = 150) -> list[tuple[Any, torch.Tensor]]:
    return [
        (bucket, torch.cat([tensors[meta.name].contiguous().view(-1).view(torch.uint8) for meta in bucket]))
        for bucket in buckets_of(tensors, limit)
    ]


def update(loader: Loader, model: Model, tensors: dict[str, torch.Tensor], limit: int = 150) -> None:
    loader.start(model)
    for bucket, flat in flats(tensors, limit):
        loader.load_flat(model, bucket, flat)
    loader.finish(model, None)


def assert_same(model: Model, tensors: dict[str, torch.Tensor]) -> None:
    plain = Model(model.how)
    plain.load_weights(list(tensors.items()))
    for (name, found), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(found, wanted), name


def test_replayed_copies_are_what_the_loader_would_have_stored():
    """Fused parts, a cut along the second dimension, padding, and a change of dtype."""
    model = Model()
    plan = record_plan(buckets_of(weights(0)), lambda name, tensor: model.load_weights([(name, tensor)]))
    assert all(not parameter.any() for name, parameter in model.named_parameters() if name != "embedding"), (
        "recording stores nothing"
    )
    model.load_weights(list(weights(1).items()))
    for bucket, flat in flats(weights(2)):
        plan.apply(bucket, flat)
    assert_same(model, weights(2))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("computes", "norm: its loader computes"),
        ("looks", "norm: its loader does more than copy"),
        ("adds", "norm: its loader calls aten.add_"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_refused_by_name(how, why):
    model = Model(how)
    with pytest.raises(NotACopy, match=why):
        record_plan(buckets_of(weights(0)), lambda name, tensor: model.load_weights([(name, tensor)]))


def test_the_first_update_is_recorded_the_second_compared_the_third_replayed():
    model, reload = Model(), DirectReload()
    loader = Loader(reload, pipeline_stage=False)
    for seed in range(5):
        update(loader, model, weights(seed))
        assert_same(model, weights(seed))
        assert not loader.changed
    assert reload.log == ["begin", "finish"] * 2 + ["derive"] * 3


@pytest.mark.parametrize("how", ["computes", "looks", "adds"])
def test_the_slow_way_stays_where_loading_does_more_than_copy(how):
    model, reload = Model(how), DirectReload()
    loader = Loader(reload, pipeline_stage=False)
    for seed in range(4):
        model.norm.data.zero_()
        update(loader, model, weights(seed))
        assert_same(model, weights(seed))
    assert reload.log == ["begin", "finish"] * 4


def test_values_that_are_processed_after_loading_are_found_by_comparing():
    class Processed(DirectReload):
        def finish_reload(self, model: Any, model_config: Any) -> None:
            super().finish_reload(model, model_config)

        def waits(self, layer: Any) -> bool:
            layer.qk.data.mul_(2)  # between loading and the comparison
            return False

    model, reload = Model(), Processed()
    loader = Loader(reload, pipeline_stage=False)
    for seed in range(4):
        update(loader, model, weights(seed))
    assert reload.log == ["begin", "finish"] * 4


def test_a_trainer_that_cuts_otherwise_begins_again_with_the_slow_way():
    model, reload = Model(), DirectReload()
    loader = Loader(reload, pipeline_stage=False)
    for seed in range(3):
        update(loader, model, weights(seed))
    reload.log.clear()
    for seed in range(3):
        update(loader, model, weights(seed), limit=10)
        assert_same(model, weights(seed))
    assert reload.log == ["begin", "finish"] * 2 + ["derive"]


def test_an_update_that_goes_on_with_other_buckets_fails_and_the_next_one_does_not():
    model, reload = Model(), DirectReload()
    loader = Loader(reload, pipeline_stage=False)
    for seed in range(2):
        update(loader, model, weights(seed))
    loader.start(model)
    loader.load_flat(model, *flats(weights(2))[0])
    with pytest.raises(WeightUpdateError, match="goes on with another"):
        loader.load_flat(model, *flats(weights(2), limit=10)[1])
    assert loader.changed
    loader.abandon(model)
    update(loader, model, weights(3))
    assert_same(model, weights(3))
    assert not loader.changed


def test_a_replayed_update_that_lacks_a_bucket_is_incomplete():
    model = Model()
    loader = Loader(DirectReload(), pipeline_stage=False)
    for seed in range(2):
        update(loader, model, weights(seed))
    loader.start(model)
    (first, flat), *_ = flats(weights(2))
    loader.load_flat(model, first, flat)
    with pytest.raises(WeightUpdateError, match="incomplete: o"):
        loader.finish(model, None)
    loader.abandon(model)
    update(loader, model, weights(3))
    assert_same(model, weights(3))


def test_a_tensor_that_nobody_takes_or_that_comes_twice_is_an_error():
    model = Model()
    loader = Loader(DirectReload(), pipeline_stage=False)
    loader.start(model)
    with pytest.raises(WeightUpdateError, match="no use for strange"):
        loader.load_named(model, [("strange", torch.zeros(2))])
    loader.start(model)
    with pytest.raises(WeightUpdateError, match="q was sent twice"):
        loader.load_named(model, [("q", torch.zeros(4, WIDTH)), ("q", torch.zeros(4, WIDTH))])
    of_a_stage = Loader(DirectReload(), pipeline_stage=True)
    of_a_stage.start(model)
    of_a_stage.load_named(model, [("strange", torch.zeros(2))])
