"""Memory that leaves its device and comes back: what tensors and their views see of it. The CPU is the device here."""

from __future__ import annotations

import pytest
import torch

from rltool.megatron.offload import PARTS, DeviceFull, Offloader

CPU = torch.device("cpu")


class Held:
    """A flat buffer with two views, its gradients, and moments; in fp32 the optimizer updates the parameters."""

    def __init__(self) -> None:
        self.buffer = torch.randn(10)
        self.first, self.second = self.buffer[:4].view(2, 2), self.buffer[4:]
        self.gradients = torch.zeros(10)
        self.moment = torch.randn(7, dtype=torch.float64)

    def tensors(self):
        return {
            "parameters": [self.first, self.second, self.buffer],
            "gradients": [self.gradients],
            "optimizer": [self.first, self.second, self.moment],
        }

    def all(self):
        return [self.buffer, self.first, self.second, self.gradients, self.moment]


def sizes(held: Held) -> list[int]:
    return [tensor.untyped_storage().nbytes() for tensor in (held.buffer, held.gradients, held.moment)]


def test_every_view_finds_its_bytes_again_and_nothing_is_held_meanwhile():
    held = Held()
    before = [tensor.clone() for tensor in held.all()]
    offloader = Offloader(held.tensors, CPU)
    offloader.offload()
    assert sizes(held) == [0, 0, 0] and offloader.away == PARTS
    offloader.onload()
    assert offloader.away == () and all(map(torch.equal, held.all(), before))
    held.second.add_(1)
    assert torch.equal(held.buffer[4:], held.second), "the views are views still"


def test_parts_move_apart_and_what_two_parts_share_belongs_to_the_first():
    held = Held()
    offloader = Offloader(held.tensors, CPU)
    offloader.offload(("gradients", "optimizer"))
    assert sizes(held) == [40, 0, 0]
    offloader.offload(("optimizer", "parameters"))
    assert sizes(held) == [0, 0, 0]
    offloader.onload(("parameters",))
    assert sizes(held) == [40, 0, 0] and offloader.away == ("gradients", "optimizer")


def test_a_part_that_is_away_stays_as_it_was_whatever_is_asked_twice():
    held = Held()
    moment = held.moment.clone()
    offloader = Offloader(held.tensors, CPU)
    offloader.offload()
    offloader.offload()
    offloader.onload()
    offloader.onload()
    assert torch.equal(held.moment, moment)


def test_gradients_of_zeros_are_not_copied_and_others_are():
    held = Held()
    offloader = Offloader(held.tensors, CPU)
    offloader.offload(("gradients",))
    assert not offloader._room.get("gradients")
    offloader.onload()
    assert torch.equal(held.gradients, torch.zeros(10))
    held.gradients[3] = -0.0  # bytes, not values, are what comes back
    offloader.offload(("gradients",))
    offloader.onload()
    assert torch.signbit(held.gradients).tolist() == [n == 3 for n in range(10)]


def test_what_an_optimizer_makes_later_moves_with_it_and_room_on_the_host_is_kept():
    held = Held()
    offloader = Offloader(held.tensors, CPU)
    offloader.offload()
    room = offloader._room["parameters"]["0"]
    offloader.onload()
    held.moment = torch.randn(9)
    before = held.moment.clone()
    offloader.offload()
    assert sizes(held) == [0, 0, 0] and offloader._room["parameters"]["0"] is room
    offloader.onload()
    assert torch.equal(held.moment, before)


def test_memory_that_numpy_has_borrowed_is_overwritten_meanwhile():
    held = Held()
    held.buffer.numpy()
    before = held.buffer.clone()
    offloader = Offloader(held.tensors, CPU)
    offloader.offload(("parameters",))
    assert held.buffer.isnan().all() and held.second.isnan().all()
    offloader.offload(("optimizer",))  # which names the parameters too
    offloader.onload()
    assert torch.equal(held.buffer, before)


def test_a_device_that_has_become_too_small_is_an_error_that_says_what_to_do(monkeypatch):
    held = Held()
    before = held.buffer.clone()
    offloader = Offloader(held.tensors, CPU)
    offloader.offload()
    real = torch.UntypedStorage.resize_

    def full(storage, size):
        if size == held.moment.nbytes:
            raise torch.OutOfMemoryError("8 bytes are free")
        return real(storage, size)

    monkeypatch.setattr("rltool.megatron.offload.UntypedStorage.resize_", full)
    with pytest.raises(DeviceFull, match="8 bytes are free.*--gpu-memory-utilization"):
        offloader.onload(("optimizer",))
    assert offloader.away == PARTS, "it may be tried again"
    monkeypatch.undo()
    offloader.onload()
    assert torch.equal(held.buffer, before)
