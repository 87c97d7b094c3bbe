"""The wire contract of weight transfer: bytes, and a gloo group of two threads on loopback."""

import re
import socket
import threading

import pytest
import torch

from rltool.engines.transfer import wire
from rltool.engines.types import TensorMeta
from rltool.weights.transports.rendezvous import local_address_towards
from tests import ranks


def tensors():
    torch.manual_seed(0)
    return {
        "odd": torch.arange(3, dtype=torch.uint8),  # what follows is not aligned
        "matrix": torch.randn(4, 5),
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(3, 2).t(),
    }


def bucket_of(named):
    return tuple(wire.meta_of(name, tensor) for name, tensor in named.items())


def flat_bytes(named):
    return ranks.flat_bytes(named, bucket_of(named))


def test_tensors_survive_the_wire_bit_by_bit():
    named = tensors()
    bucket = bucket_of(named)
    flat = flat_bytes(named)
    assert flat.dtype == torch.uint8 and flat.numel() == wire.bucket_bytes(bucket) == 3 + 80 + 14 + 8 + 0 + 24
    received = wire.split_flat(flat, bucket)
    assert [name for name, _ in received] == list(named)
    for name, tensor in received:
        assert tensor.dtype == named[name].dtype and torch.equal(tensor, named[name])


def test_aligned_tensors_are_views_of_what_was_received():
    named = {"a": torch.randn(8), "b": torch.randn(8)}
    flat = flat_bytes(named)
    start = flat.data_ptr()
    assert [t.data_ptr() - start for _, t in wire.split_flat(flat, bucket_of(named))] == [0, 32]


def test_another_number_of_bytes_is_refused():
    bucket = (TensorMeta("a", "float32", (2,)),)
    with pytest.raises(ValueError, match="7 bytes were received for a bucket of 8"):
        wire.split_flat(torch.empty(7, dtype=torch.uint8), bucket)


@pytest.mark.parametrize("name", ["float", "Tensor", "load", "complex64", ""])
def test_only_known_dtypes_travel(name):
    with pytest.raises(ValueError, match="unknown dtype"):
        wire.dtype_of(name)


def test_a_bucket_is_broadcast_through_a_group_on_loopback():
    named = tensors()
    bucket = bucket_of(named)
    store = wire.host_store("127.0.0.1", 0, 10)
    received = torch.empty(wire.bucket_bytes(bucket), dtype=torch.uint8)

    def receive():
        group = wire.open_group("127.0.0.1", store.port, 1, 2, "g", 10)
        wire.broadcast(group, received)
        group.shutdown()

    worker = threading.Thread(target=receive, daemon=True)
    worker.start()
    group = wire.open_group("127.0.0.1", store.port, 0, 2, "g", 10, store=store)
    wire.broadcast(group, flat_bytes(named))
    worker.join(20)
    group.shutdown()
    assert not worker.is_alive()
    assert all(torch.equal(tensor, named[name]) for name, tensor in wire.split_flat(received, bucket))


def test_the_store_listens_on_its_own_address_alone():
    store = wire.host_store("127.0.0.1", 0, 10)
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.2", store.port))  # another loopback address of this host


def test_a_peer_that_does_not_come_is_given_up():
    store = wire.host_store("127.0.0.1", 0, 0.3)
    with pytest.raises(RuntimeError):
        wire.open_group("127.0.0.1", store.port, 0, 2, "g", 0.3, store=store)


@pytest.mark.parametrize("url", ["http://127.0.0.1:8101", "http://127.0.0.1", "http://127.0.0.1:8101/v1"])
def test_a_host_reaches_loopback_from_loopback(url):
    assert local_address_towards(url) == wire.local_address("127.0.0.1", 1) == "127.0.0.1"


def test_a_trainer_that_is_not_reached_is_named_with_both_ends():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and does not listen
        port = held.getsockname()[1]
        said = rf"host {re.escape(socket.gethostname())} does not reach the trainer at 127\.0\.0\.1, port {port} "
        with pytest.raises(ConnectionError, match=said):
            wire.open_group("127.0.0.1", port, 1, 2, "g", 10)
