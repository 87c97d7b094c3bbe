import json
import sys
from pathlib import Path

import pytest

from rltool.config.serve import ServeConfig
from rltool.engines.launch.engine_process import engine_spec
from rltool.engines.launch.interpreter import check_engine_python
from rltool.engines.launch.ready import check_identity, check_version
from rltool.engines.launch.start import (
    check_gpus,
    check_model,
    check_order,
    dry_run,
    engine_flags,
    launch_engines,
    order_of_flags,
    parse_gpus,
)
from rltool.engines.types import EngineInfo
from rltool.errors import RltoolError, UsageError
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.spawn import ProcessFailed
from rltool.processes.supervise import ProcessGroup


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    return directory


@pytest.fixture
def run(tmp_path):
    return RunDirectory(tmp_path / "runs" / "r")


def order(model, **options):
    return order_of_flags(ServeConfig(model=model, **options))


@pytest.fixture
def no_gpus(monkeypatch):
    monkeypatch.setattr("rltool.engines.launch.start.visible_gpus", lambda: [])


def plan(model, run, **options):
    return dry_run(order(model, **options), run)[0].launches


def test_gpus_are_given_to_engines_in_order_tp_at_a_time(model, run, no_gpus):
    launches = plan(model, run, num_engines=2, tp=2, gpus=(3, 1, 0, 2), port=19001)
    assert [launch.gpus for launch in launches] == [(3, 1), (0, 2)]
    assert [launch.port for launch in launches] == [19001, 19002]


def test_without_gpus_the_first_of_the_host_are_taken(model, run, no_gpus):
    assert [launch.gpus for launch in plan(model, run, num_engines=2, tp=2)] == [(0, 1), (2, 3)]
    assert [launch.gpus for launch in plan(model, run, num_engines=2, device="cpu")] == [(), ()]


def test_a_relative_model_is_the_callers_for_engines_run_in_another_directory(model, run, no_gpus, monkeypatch):
    monkeypatch.chdir(model.parent)
    [launch] = plan(Path(model.name), run)
    assert launch.model == model and str(model) in engine_spec(launch).argv
    assert not any(word == model.name for word in engine_spec(launch).argv)


def test_replicas_have_different_seeds_and_boot_ids(model, run):
    launches = plan(model, run, num_engines=3, device="cpu", seed=7)
    assert len({launch.seed for launch in launches}) == 3
    assert len({launch.boot_id for launch in launches}) == 3
    assert launches[0].seed == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_engines": 2, "tp": 2, "gpus": (0, 1, 2)},
            r"2 x 2 takes 4 GPUs, --gpus names 3 \(0,1,2\): name more",
        ),
        ({"num_engines": 1, "gpus": (0, 1)}, "takes 1 GPUs, --gpus names 2"),
        ({"num_engines": 3, "gpus": (0, 5, 5)}, "GPU 5 twice"),
        ({"num_engines": 1, "gpus": (0,), "device": "cpu"}, "--device cpu"),
    ],
)
def test_gpus_that_do_not_come_out_are_refused_with_the_numbers(model, run, no_gpus, options, message):
    with pytest.raises(UsageError, match=message):
        plan(model, run, **options)


def test_absent_and_held_gpus_are_refused_by_name():
    check_gpus((0, 1), present=(0, 1, 2), held={2: "run a, engine-0"})
    with pytest.raises(UsageError, match=r"not on this host: GPU 4, 5; it has: 0,1"):
        check_gpus((0, 4, 5), present=(0, 1), held={})
    with pytest.raises(UsageError, match="GPU 1 by run a, engine-0"):
        check_gpus((0, 1), present=(0, 1), held={1: "run a, engine-0"})


@pytest.mark.parametrize(
    ("text", "gpus"),
    [("0,1,2,3", (0, 1, 2, 3)), ("0-3", (0, 1, 2, 3)), (" 7, 2 ", (7, 2)), ("4-5,0", (4, 5, 0)), ("", ())],
)
def test_gpu_lists_and_ranges_are_read(text, gpus):
    assert parse_gpus(text) == gpus


@pytest.mark.parametrize("text", ["a", "0,-1", "0-", "1.5"])
def test_a_malformed_gpu_list_is_quoted(text):
    with pytest.raises(UsageError, match="--gpus"):
        parse_gpus(text)


def test_weights_come_through_our_backend_on_gpus_as_on_the_cpu(model, run, no_gpus):
    assert plan(model, run, gpus=(0,))[0].weight_backend == "rltool"
    assert plan(model, run, device="cpu")[0].weight_backend == "rltool"
    assert plan(model, run, gpus=(0,), weight_backend="nccl")[0].weight_backend == "nccl"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json cannot be read"),
        ("{", "not JSON"),
        ("{}", "architectures"),
        ('{"architectures": []}', "architectures"),
        ("[]", "architectures"),
    ],
)
def test_a_directory_that_is_no_model_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        check_model(tmp_path)


def test_a_missing_model_directory_is_named(tmp_path):
    with pytest.raises(UsageError, match="no such directory"):
        check_model(tmp_path / "missing")


def test_a_dry_run_writes_nothing_and_warns_of_absent_gpus(model, run, no_gpus):
    found, warnings = dry_run(order(model, num_engines=2), run)
    assert len(found.launches) == 2
    assert "not on this host: GPU 0, 1" in warnings[0]
    assert not run.path.exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_key_itself_is_in_neither_argv_nor_environment(model, run, engine):
    run.state_dir.mkdir(parents=True)
    key = run.ensure_key().read_text()
    launch = plan(model, run, device="cpu", engine=engine, extra_args=("--x", "1"), port=19003)[0]
    spec = engine_spec(launch)
    assert key not in " ".join(spec.argv)
    assert key not in " ".join(spec.environment.values())
    assert spec.argv[-2:] == ("--x", "1")
    assert spec.url == "http://127.0.0.1:19003"


def test_a_relative_interpreter_is_found_from_the_engines_own_directory(tmp_path, model, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").symlink_to(sys.executable)
    found = plan(model, run, device="cpu", engine_python="venv/python")[0].python
    assert found == tmp_path / "venv" / "python"  # not what the link points to: that would leave the environment


def test_engine_flags_without_the_double_dash_are_a_usage_error():
    assert engine_flags(["--a", "b"]) == ("--a", "b")
    with pytest.raises(UsageError, match="'stray'"):
        engine_flags(["stray"])


def info(launch, **changes):
    facts = dict(
        dialect="vllm", engine_version="0", model_id="policy", world_size=1, max_model_len=None, vocab_size=None,
        dtype=None, weight_backend="rltool", weight_version=None, boot_id=launch.boot_id, plugin=True,
    )  # fmt: skip
    return EngineInfo(**(facts | changes))


def test_another_server_on_the_port_is_not_taken_for_ours(model, run):
    launch = plan(model, run, device="cpu")[0]
    check_identity("engine-0", launch, info(launch))
    check_identity("engine-0", launch, info(launch, boot_id=None))
    by_version = {"boot_id": "f" * 32, "weight_version": f"boot-{launch.boot_id}"}  # as SGLang 0.5.17 tells it
    check_identity("engine-0", launch, info(launch, **by_version))
    with pytest.raises(UsageError, match="another server"):
        check_identity("engine-0", launch, info(launch, boot_id="f" * 32))
    with pytest.raises(UsageError, match="'judge'"):
        check_identity("engine-0", launch, info(launch, model_id="judge"))
    with pytest.raises(RltoolError, match="world size 2, planned was 1"):
        check_identity("engine-0", launch, info(launch, world_size=2))


class Started:
    """A process that was started, as far as its failure goes."""

    def failure(self, what: str) -> ProcessFailed:
        return ProcessFailed(f"engine-0 {what}")


def test_an_engine_that_train_would_not_take_for_its_age_is_not_served(model, run):
    launch = plan(model, run, device="cpu")[0]
    for version in ("0.32.0", "0.33.0", "dev"):
        check_version(Started(), info(launch, engine_version=version))
    for version, why in (("0.31.0", "cannot be trained against"), ("0.28.0", "too old")):
        with pytest.raises(ProcessFailed, match=f"engine-0 is vLLM {version}.*{why}"):
            check_version(Started(), info(launch, engine_version=version))


def test_an_interpreter_without_the_engine_is_refused_with_the_pip_command(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        check_engine_python(tmp_path / "python", "vllm")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nshift\nexec {sys.executable} -S -E -P "$@"\n')  # without site-packages
    bare.chmod(0o755)
    with pytest.raises(UsageError, match=r"-m pip install 'rltool\[vllm\]"):
        check_engine_python(bare, "vllm")


def test_an_interpreter_with_another_rltool_is_refused_for_vllm_only(tmp_path):
    answering = tmp_path / "old"
    answering.write_text("""#!/bin/sh\necho '{"engine": true, "rltool": "0.0.1"}'\n""")
    answering.chmod(0o755)
    with pytest.raises(UsageError, match=r"rltool 0\.0\.1"):
        check_engine_python(answering, "vllm")
    check_engine_python(answering, "sglang")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "no weights there"),
        ({"model.safetensors": b""}, "model.safetensors is no safetensors file, or it is cut off"),
        ({"model.safetensors": b"\x02\0\0\0\0\0\0\0{}tail"}, "has 14 bytes, its header needs 10"),
        ({"model.safetensors.index.json": b"{"}, "is no index of safetensors files"),
        ({"model.safetensors.index.json": b'{"weight_map": {"a": "x.safetensors"}}'}, "not there: x.safetensors"),
    ],
)
def test_weights_that_are_missing_or_cut_off_are_refused_before_anything_starts(model, files, message):
    for name, content in files.items():
        (model / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        check_order(order(model, device="cpu"))


def test_other_formats_and_made_up_weights_are_the_engines_business(model, monkeypatch):
    monkeypatch.setattr("rltool.engines.launch.start.check_engine_python", lambda *_: None)
    for flags in (("--load-format", "dummy"), ("--load-format=dummy",)):
        check_order(order(model, device="cpu", extra_args=flags))
    (model / "pytorch_model.bin").touch()
    (model / "tokenizer.json").touch()
    check_order(order(model, device="cpu"))


@pytest.mark.parametrize("nested", [False, True])
def test_heads_that_do_not_divide_over_the_gpus_are_refused(model, nested):
    text = {"num_attention_heads": 7}
    described = {"architectures": ["X"], **({"text_config": text} if nested else text)}
    (model / "config.json").write_text(json.dumps(described))
    with pytest.raises(UsageError, match="--tp 2: the 7 attention heads"):
        check_order(order(model, device="cpu", tp=2))
    check_model(model, tp=7)


def test_a_key_file_of_the_run_that_was_spoilt_is_found_before_an_engine_starts(model, tmp_path, monkeypatch):
    monkeypatch.setattr("rltool.engines.launch.start.check_engine_python", lambda *_: None)
    served = open_run("a", create=True, root=tmp_path / "runs")
    served.key_file.write_text("one\ntwo\n")
    (model / "pytorch_model.bin").touch()
    (model / "tokenizer.json").touch()
    with ProcessGroup(served) as group:
        with pytest.raises(UsageError, match="of run a has 2 lines"):
            launch_engines(order(model, device="cpu"), group)
        assert not group.processes
