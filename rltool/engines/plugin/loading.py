"""One weight update inside a vLLM worker, from its first bucket to its end, by vLLM's reload or by replayed copies.

Which of the two follows from the updates before (rltool.engines.plugin.replay): the first is slow and recorded, the
second slow and compared, the others are replayed. An update that has other buckets than those before begins again with
the first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Protocol, cast

import torch

from rltool.engines.plugin.channels import Boxes
from rltool.engines.plugin.replay import (
    Copy,
    NotACopy,
    ReplayPlan,
    StandIns,
    needs_of,
    record_plan,
    storage,
    stored_otherwise,
)
from rltool.engines.transfer import wire
from rltool.engines.transfer.shards import Needs
from rltool.engines.types import Bucket

logger = logging.getLogger(__name__)

NAMED_IN_ERRORS = 5
"""How many of the missing layers an error lists."""


class WeightUpdateError(RuntimeError):
    """An update that cannot be applied; the text goes to the trainer."""


def missing_error(missing: Sequence[str]) -> WeightUpdateError:
    more = f" and {len(missing) - NAMED_IN_ERRORS} more" if len(missing) > NAMED_IN_ERRORS else ""
    return WeightUpdateError(f"the update is incomplete: {', '.join(missing[:NAMED_IN_ERRORS])}{more}")


class Reload(Protocol):
    """vLLM's layerwise reload: the module rltool.engines.plugin.reload."""

    def begin_reload(self, model: torch.nn.Module) -> None: ...
    def abandon_reload(self, model: torch.nn.Module) -> None: ...
    def as_taken(
        self, model: torch.nn.Module, name: str, tensor: torch.Tensor
    ) -> Iterable[tuple[str, torch.Tensor]]: ...
    def missing_layers(self, model: torch.nn.Module) -> list[str]: ...
    def finish_reload(self, model: torch.nn.Module, model_config: Any) -> None: ...
    def waits(self, layer: torch.nn.Module) -> bool: ...
    def kernel_parameters(self, layer: torch.nn.Module) -> list[torch.Tensor]: ...
    def hold_back(self, model: torch.nn.Module) -> None: ...
    def waiting(self, model: torch.nn.Module) -> list[torch.Tensor]: ...
    def check_copied(self, model: torch.nn.Module) -> None: ...
    def derive(self, model: torch.nn.Module, model_config: Any) -> None: ...


class Loader:
    """Of one worker's model. `changed` is true from the first tensor of an update until it is finished: the weights are
    then a mixture."""

    def __init__(self, reload: Reload, *, pipeline_stage: bool) -> None:
        """pipeline_stage: the model is a part of the layers, which rightly ignores the tensors of the others."""
        self.changed = False
        self._reload = reload
        self._pipeline_stage = pipeline_stage
        self._plan: ReplayPlan | None = None
        self._compared = False
        self._slow_for_ever = False
        self._reset()

    def _reset(self) -> None:
        self._names: set[str] = set()
        self._buckets: list[Bucket] = []
        self._reloading = False
        self._stand_ins: StandIns | None = None
        self._to_compare: list[tuple[torch.nn.Module, Copy, torch.Tensor]] = []

    # -- an update

    def start(self, model: torch.nn.Module) -> None:
        """Whatever an earlier update left behind is abandoned."""
        self.abandon(model)
        if not self._compared:
            self._begin_reload(model)

    def load_flat(self, model: torch.nn.Module, bucket: Bucket, flat: torch.Tensor) -> None:
        """flat: [bytes] uint8, anywhere."""
        plan = self._plan if self._compared and not self._reloading else None
        if plan is not None and not self._buckets and bucket not in plan:  # of a trainer that cuts otherwise
            self._forget()
            plan = None
        self._buckets.append(bucket)
        if plan is not None:
            self._replay(plan, bucket, flat)
            return
        self._note_sources(model, bucket, flat)
        self.load_named(model, wire.split_flat(flat, bucket))
        self._compare_complete(model)

    def load_boxes(self, model: torch.nn.Module, bucket: Bucket, boxes: Boxes) -> None:
        """Of each tensor what this worker stores. Always through vLLM's reload."""
        stand_ins = self._stand_ins = self._stand_ins or StandIns()
        with stand_ins:
            self.load_named(model, [(meta.name, stand_ins.add(meta, boxes[meta.name])) for meta in bucket])
        stand_ins.keep({storage(tensor) for tensor in self._reload.waiting(model)})

    def needs(self, model: torch.nn.Module, buckets: Sequence[Bucket]) -> Needs:
        """What the model's loaders store of these tensors; nothing changes. Raises NotACopy."""

        def load(name: str, tensor: torch.Tensor) -> None:
            cast(Any, model).load_weights(self._reload.as_taken(model, name, tensor))

        self.abandon(model)
        try:
            self._begin_reload(model)
            self._reload.hold_back(model)
            return needs_of(buckets, load)
        finally:
            self.abandon(model)

    def load_named(self, model: torch.nn.Module, named: list[tuple[str, torch.Tensor]]) -> None:
        """One tensor at a time, so that an error and an unused tensor have a name."""
        if not self._reloading:
            self._begin_reload(model)
        for name, tensor in named:
            if name in self._names:
                raise WeightUpdateError(f"{name} was sent twice in one update")
            self._names.add(name)
            self.changed = True
            try:
                taken = cast(Any, model).load_weights(self._reload.as_taken(model, name, tensor))
            except Exception as error:  # a model's loaders assert, or raise whatever they like
                what = str(error) or "its loader refused it, for its shape or dtype"
                raise WeightUpdateError(
                    f"{name} {tensor.dtype} {list(tensor.shape)}: {type(error).__name__}: {what}"
                ) from error
            if not taken and not self._pipeline_stage:
                raise WeightUpdateError(f"the model of this engine has no use for {name} {list(tensor.shape)}")

    def finish(self, model: torch.nn.Module, model_config: Any) -> None:
        """All has come: WeightUpdateError if not."""
        if self._reloading:
            missing = self._reload.missing_layers(model)
        else:
            assert self._plan is not None
            missing = self._plan.missing(set(self._buckets))
        if missing:
            raise missing_error(missing)
        if self._reloading:
            with self._stand_ins or nullcontext():  # layers with padding are loaded now
                self._reload.finish_reload(model, model_config)
            self._learn(model)
        else:
            self._reload.derive(model, model_config)
        self._reset()
        self.changed = False

    def abandon(self, model: torch.nn.Module) -> None:
        """End an update that will not be finished. Idempotent."""
        if self._reloading:
            self._reload.abandon_reload(model)
        self._reset()

    # -- the two ways

    def _begin_reload(self, model: torch.nn.Module) -> None:
        self._reloading = True  # whatever becomes of the next line, there is something to abandon
        self._reload.begin_reload(model)

    def _replay(self, plan: ReplayPlan, bucket: Bucket, flat: torch.Tensor) -> None:
        if bucket not in plan:
            self._forget()
            raise WeightUpdateError(
                f"{bucket[0].name}: this update begins with a bucket of those before, and goes on with another; the "
                "next one is loaded from scratch"
            )
        self.changed = True
        plan.apply(bucket, flat)

    def _forget(self) -> None:
        self._plan, self._compared, self._to_compare = None, False, []

    def _learn(self, model: torch.nn.Module) -> None:
        """After a slow update: record it, or conclude what was compared."""
        if self._slow_for_ever or not self._buckets:
            return
        try:
            if self._plan is None:
                self._reload.check_copied(model)
                self._plan = record_plan(
                    self._buckets, lambda name, tensor: cast(Any, model).load_weights([(name, tensor)])
                )
                return
            self._compare(self._to_compare)
            if not self._plan.missing(set(self._buckets)):
                self._compared = True
                logger.info("weight updates are replayed as copies from now on")
        except NotACopy as error:
            self._stay_slow(error)

    def _stay_slow(self, error: NotACopy) -> None:
        self._forget()
        self._slow_for_ever = True
        logger.warning("weight updates go through vLLM's reload, not as copies: %s", error)

    # -- comparing

    def _note_sources(self, model: torch.nn.Module, bucket: Bucket, flat: torch.Tensor) -> None:
        """The parts of `flat`, where this update is the one that is compared."""
        if self._plan is None:
            return
        if bucket not in self._plan:
            self._forget()
            return
        owners = {
            _storage(parameter): layer
            for layer in model.modules()
            for parameter in self._reload.kernel_parameters(layer)
        }
        for copy in self._plan.copies(bucket):
            layer = owners.get(_storage(copy.destination))
            if layer is None:
                self._stay_slow(NotACopy(f"a tensor of the bucket of {bucket[0].name} goes into no parameter"))
                return
            self._to_compare.append((layer, copy, copy.source(flat)))

    def _compare_complete(self, model: torch.nn.Module) -> None:
        """Layers that are loaded by now; the bytes of the others wait, as vLLM has them wait."""
        waits = {layer: self._reload.waits(layer) for layer, _, _ in self._to_compare}
        done = [item for item in self._to_compare if not waits[item[0]]]
        self._to_compare = [item for item in self._to_compare if waits[item[0]]]
        try:
            self._compare(done)
        except NotACopy as error:
            self._stay_slow(error)

    def _compare(self, items: list[tuple[torch.nn.Module, Copy, torch.Tensor]]) -> None:
        for layer, copy, source in items:
            if stored_otherwise(copy, source.to(copy.destination.device)):
                raise NotACopy(f"{type(layer).__name__} holds other values than were copied into it")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
