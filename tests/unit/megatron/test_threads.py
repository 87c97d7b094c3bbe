"""CPU threads of a trainer rank: few on a GPU, torch's own choice elsewhere, and the user's word above both."""

import os
import subprocess
import sys

import pytest

from rltool.megatron import threads


@pytest.mark.parametrize(("ranks", "cpus", "expected"), [(4, 64, 4), (1, 16, 4), (4, 8, 2), (8, 4, 1), (0, 2, 2)])
def test_ranks_on_gpus_share_the_hosts_cpus_and_take_no_more_than_four(ranks, cpus, expected):
    assert threads.gpu_rank_threads(ranks, cpus) == expected


@pytest.mark.parametrize(
    ("configured", "on_gpu", "environment", "expected"),
    [
        (None, True, {}, 3),
        (None, False, {}, None),
        (7, True, {}, 7),
        (7, False, {}, 7),
        (None, True, {"OMP_NUM_THREADS": "9"}, None),
        (7, True, {"OMP_NUM_THREADS": "9"}, 7),
    ],
)
def test_what_the_user_set_comes_first(monkeypatch, configured, on_gpu, environment, expected):
    monkeypatch.setattr(threads, "usable_cpus", lambda: 6)
    assert threads.wanted_threads(configured, on_gpu=on_gpu, ranks_on_host=2, environment=environment) == expected


def test_the_limit_holds_in_torch_and_for_children():
    code = (
        "import os, torch\n"
        "from rltool.megatron.threads import limit_threads\n"
        "limit_threads(None); before = torch.get_num_threads()\n"
        "limit_threads(3); print(before, torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment | {"OMP_NUM_THREADS": "2"},
    )
    assert done.stdout.split() == ["2", "3", "3"]
