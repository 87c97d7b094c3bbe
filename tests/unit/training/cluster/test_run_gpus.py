"""Which GPUs of this host a run takes, with a fake nvidia-smi in place of a driver."""

from __future__ import annotations

import pytest

from rltool.engines.endpoints import EngineEndpoint
from rltool.errors import UsageError
from rltool.processes.run_directory import open_run
from rltool.processes.state import state_of_this_process, write_state
from rltool.training.cluster.gpus import choose_gpus, gpus_of_this_host, held_by
from rltool.training.cluster.places import Place, in_order

HELD = {0: "run a, engine-0", 1: "engine http://127.0.0.1:8101"}


def test_the_first_free_ones_are_taken():
    assert choose_gpus(wanted=(), needed=2, present=range(8), held=HELD) == (2, 3)


def test_named_ones_are_taken_in_the_order_in_which_they_are_named():
    assert choose_gpus(wanted=(7, 2), needed=2, present=range(8), held=HELD) == (7, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needed": 7}, r"takes 7 GPUs of this host, and 6 of its 8 are free \(held: GPU 0 by run a, engine-0; GPU 1"),
        ({"wanted": (1, 2), "needed": 2}, r"held already: GPU 1 by engine http://127.0.0.1:8101"),
        ({"wanted": (3, 9), "needed": 2}, "not on this host: GPU 9; it has: 0,1,2,3,4,5,6,7"),
        ({"wanted": (3, 3), "needed": 2}, "GPU 3 twice"),
        ({"wanted": (3,), "needed": 2}, r"names 1 GPUs \(3\); the run takes 2"),
    ],
)
def test_what_collides_is_refused_with_the_holder(options, message):
    with pytest.raises(UsageError, match=message):
        choose_gpus(**{"wanted": (), "present": range(8), "held": HELD, **options})


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Eight GPUs, as the real program lists them."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    rows = "".join(f"echo '{index}, NVIDIA H200, 143771, GPU-{index}'\n" for index in range(8))
    program.write_text(f"#!/bin/sh\n{rows}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def other_run(tmp_path):
    """A run that lives, on GPUs 0 and 1."""
    root = tmp_path / "runs"
    other = open_run("other", create=True, root=root)
    write_state(other, state_of_this_process("engine-0", argv=["x"]).model_copy(update={"gpus": (0, 1)}))
    return root


ENGINE = EngineEndpoint(url="http://127.0.0.1:8101", gpus=(2,))
ELSEWHERE = EngineEndpoint(url="http://192.0.2.7:8101", gpus=(3,))


def test_gpus_of_live_runs_and_of_this_hosts_engines_are_left_alone(nvidia_smi, other_run):
    assert gpus_of_this_host((), 2, [ENGINE, ELSEWHERE], other_run) == (3, 4), "3 is another host's"
    with pytest.raises(UsageError, match="GPU 1 by run other, engine-0; GPU 2 by engine http://127.0.0.1:8101"):
        gpus_of_this_host((1, 2), 2, [ENGINE], other_run)
    assert gpus_of_this_host((1, 2), 2, [ENGINE], other_run, shared=True) == (1, 2)
    assert gpus_of_this_host((), 2, [ENGINE], other_run, shared=True) == (3, 4), "shared are only those that are named"


def test_what_the_user_hides_is_not_taken(nvidia_smi, other_run, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,5,6")
    assert gpus_of_this_host((), 2, [], other_run) == (5, 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f6e")
    assert gpus_of_this_host((), 1, [], other_run) == (), "chosen by the user, in a way that says no index"


def test_without_a_driver_that_lists_gpus_nothing_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("rltool.processes.gpus._PROC", tmp_path / "absent")
    assert gpus_of_this_host((), 2, [], tmp_path) == ()


def test_engines_of_other_hosts_hold_nothing_here():
    assert held_by([ENGINE, ELSEWHERE]) == {2: "engine http://127.0.0.1:8101"}


def test_ranks_are_ordered_by_host_and_gpu():
    places = [
        Place(0, "b", "10.0.0.10", (1,)), Place(1, "a", "10.0.0.9", (3,)), Place(2, "b", "10.0.0.10", (0,)),
        Place(3, "a", "10.0.0.9", (2,)),
    ]  # fmt: skip
    assert [place.bundle for place in in_order(places)] == [3, 1, 2, 0]


def test_without_gpus_ranks_keep_the_order_of_their_bundles():
    assert [p.bundle for p in in_order([Place(n, "a", "127.0.0.1") for n in range(12)])] == list(range(12))
