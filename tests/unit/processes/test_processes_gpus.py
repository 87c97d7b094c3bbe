from pathlib import Path

from rltool.processes import gpus
from rltool.processes.gpus import Gpu, _from_proc, gpus_in_use, hide_gpus, parse_nvidia_smi
from rltool.processes.run_directory import open_run
from rltool.processes.state import state_of_this_process, write_state

GPUS = [Gpu(0, "A"), Gpu(1, "B"), Gpu(2, "C")]


def test_nvidia_smi_lines_become_gpus():
    assert parse_nvidia_smi("0, NVIDIA H200, 143771, GPU-8f6e-01\n1, NVIDIA H200, [N/A], GPU-8f6e-02\n") == [
        Gpu(0, "NVIDIA H200", 143771, "8f6e-01"),
        Gpu(1, "NVIDIA H200", None, "8f6e-02"),
    ]
    assert parse_nvidia_smi("0, NVIDIA H200, 143771, GPU-1, 9.0\n1, Tesla T4, 15360, GPU-2, [N/A]\n") == [
        Gpu(0, "NVIDIA H200", 143771, "1", (9, 0)),
        Gpu(1, "Tesla T4", 15360, "2"),
    ]


def test_a_driver_that_knows_no_compute_capability_names_the_rest(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text(
        '#!/bin/sh\ncase "$1" in *compute_cap*) echo Field is not valid; exit 2;; esac\necho 0, A100, 81920, GPU-1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert gpus._from_nvidia_smi() == [Gpu(0, "A100", 81920, "1")]


def test_uuids_come_in_the_order_that_is_asked_for_and_all_or_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as Ray has it in actors without a GPU
    monkeypatch.setattr(gpus, "_from_nvidia_smi", lambda: [Gpu(0, "A", uuid="a"), Gpu(1, "B", uuid="b"), Gpu(2, "C")])
    assert gpus.gpu_uuids((1, 0)) == ("b", "a")
    assert gpus.gpu_uuids((1, 2)) == gpus.gpu_uuids((1, 7)) == gpus.gpu_uuids(()) == ()


def test_cuda_visible_devices_hides_the_others():
    assert hide_gpus(GPUS, None) == GPUS
    assert hide_gpus(GPUS, "2,0") == [GPUS[0], GPUS[2]]
    assert hide_gpus(GPUS, "") == []
    assert hide_gpus(GPUS, "GPU-8f6e") == GPUS


def test_the_proc_file_system_counts_gpus_where_nvidia_smi_is_missing(tmp_path: Path):
    for name in ("0000:2a:00.0", "0000:18:00.0"):
        (tmp_path / name).mkdir()
    assert [gpu.index for gpu in _from_proc(tmp_path)] == [0, 1]
    (tmp_path / "0000:18:00.0" / "information").write_text("Model: \t NVIDIA H200\nGPU UUID: \t GPU-8f6e-01\n")
    assert [gpu.uuid for gpu in _from_proc(tmp_path)] == ["8f6e-01", ""]
    assert _from_proc(tmp_path / "missing") == []


def test_a_gpu_is_in_use_only_while_its_process_lives(tmp_path):
    run = open_run("a", create=True, root=tmp_path)
    state = state_of_this_process("engine-0", argv=("x",)).model_copy(update={"gpus": (1, 2)})
    write_state(run, state)
    assert gpus_in_use(tmp_path) == {1: "run a, engine-0", 2: "run a, engine-0"}
    write_state(run, state.model_copy(update={"start_time": state.start_time - 60}))
    assert gpus_in_use(tmp_path) == {}
