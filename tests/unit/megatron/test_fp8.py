"""Weights in FP8: their numbers, and the plan of what engines are sent."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from rltool.checkpoints import convert
from rltool.checkpoints.convert import to_fp8, write_fp8_copy
from rltool.cli import main
from rltool.config.loader import load_config
from rltool.config.serve import POLICY
from rltool.config.train import TrainConfig
from rltool.engines.dialects.checksums import ParameterLayout
from rltool.engines.launch.plan import Host, Settings, engine_slots, plan_engines, seat_slots
from rltool.engines.transfer import fp8
from rltool.engines.transfer.wire import tensor_bytes
from rltool.errors import RltoolError, UsageError
from rltool.megatron.export_plan import full_plan
from rltool.megatron.fp8 import fp8_plan, linears_of, quantization_config
from rltool.models.quantized import dequantized_fp8, is_fp8
from rltool.models.registry import family_for
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.terminal import Console
from rltool.training.checks.validate import check_fp8_transports
from rltool.training.cluster import managed
from rltool.training.cluster.managed import expected_plan, order_of_run
from rltool.training.cluster.placement import plan_placement
from rltool.training.cluster.places import Place
from rltool.training.manager.compare_weights import checksums_of_directory
from rltool.training.observe.report import print_plan
from rltool.training.prepare import Prepared, prepare
from rltool.weights.verify.implied_checksums import implied_checksums
from tests.e2e.megatron_models import DELTA, KINDS, architecture_of, hf_config

WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
REFUSED = ("gpt_oss", "qwen3_vl", "qwen3_vl_moe", *DELTA)


def family_of(kind, **sizes):
    return family_for({**hf_config(kind, False, **sizes).to_dict(), "architectures": [architecture_of(kind)]})


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (130, 60), (1, 300)])
def test_a_block_uses_the_whole_range_and_every_number_is_the_nearest_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[1])
    values, scale = fp8.quantized(matrix)
    assert values.dtype is torch.float8_e4m3fn and scale.dtype is torch.float32
    assert values.shape == shape and scale.shape == fp8.scale_shape(shape)
    found = dequantized_fp8(values, scale)
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block = (slice(row * 128, row * 128 + 128), slice(column * 128, column * 128 + 128))
            assert values[block].float().abs().max() == 448
            # Three bits behind the leading one; below 2^-6 steps of 2^-9.
            error = (found[block] - matrix[block]).abs()
            allowed = torch.maximum(matrix[block].abs() * 2**-4, scale[row, column] * 2**-10)
            assert (error <= allowed * (1 + 1e-6)).all()


def test_zeros_stay_zeros_and_powers_of_two_are_exact():
    matrix = torch.zeros(128, 256)
    matrix[:, 128:] = torch.tensor([448.0, 224.0, -1.75, 2.0**-9]).repeat(32)
    values, scale = fp8.quantized(matrix.bfloat16())
    assert scale.tolist() == [[1.0, 1.0]]
    assert torch.equal(dequantized_fp8(values, scale), matrix)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in REFUSED])
def test_of_every_family_the_linear_layers_are_quantised_and_the_rest_is_named(kind):
    family = family_of(kind, **WIDE, moe_intermediate_size=128, shared_expert_intermediate_size=128)
    plan, whole = fp8_plan(family), full_plan(family, torch.bfloat16)
    config = quantization_config(family)
    assert is_fp8({"quantization_config": config}) and not is_fp8({"quantization_config": {"quant_method": "fp8"}})
    plain = {meta.name: meta for meta in whole.tensors}
    sent = {meta.name: meta for meta in plan.tensors}
    quantised = {name for name, meta in sent.items() if meta.dtype == "float8_e4m3fn"}
    assert quantised == {name for p in family.parameters if p.name in linears_of(family) for name, _ in p.hf}
    assert set(sent) == set(plain) | {name + fp8.SCALE for name in quantised}
    for name, meta in plain.items():
        assert sent[name].shape == meta.shape
        kept = name.removesuffix(".weight") in config["modules_to_not_convert"]
        assert kept == (len(meta.shape) == 2 and name not in quantised)
        if name not in quantised:
            assert sent[name].dtype == meta.dtype
    assert len(plan.buckets(1 << 30)) == 1
    assert {"model.embed_tokens", "lm_head"} <= set(config["modules_to_not_convert"])
    layers = [name for name in quantised if ".layers.0." in name]
    assert len(layers) >= 4
    small = sum(tensor_bytes(sent[name]) + tensor_bytes(sent[name + fp8.SCALE]) for name in layers)
    assert small < 0.502 * sum(tensor_bytes(plain[name]) for name in layers)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("qwen3", WIDE | {"intermediate_size": 200}, "200 rows are no multiple of 128"),
        ("qwen3", WIDE | {"num_key_value_heads": 1}, "k_proj.*64 rows"),
        ("gpt_oss", WIDE, "one tensor of all experts"),
        ("qwen3_5", WIDE, "gated delta nets"),
        ("qwen3_vl", WIDE | {"head_dim": 32}, "beside a vision tower"),
    ],
)
def test_a_family_that_engines_cannot_hold_so_is_refused_by_name(kind, sizes, message):
    with pytest.raises(UsageError, match=message):
        fp8_plan(family_of(kind, **sizes))


@pytest.fixture
def directory(tmp_path):
    """Of Qwen3's smallest that has whole blocks, in FP8, and its weights in bfloat16."""
    family = family_of("qwen3", **WIDE)
    generator = torch.Generator().manual_seed(0)
    state = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in family.hf_tensors()}
    made = fp8_plan(family).made(lambda parameter: parameter.merge([state[name] for name, _ in parameter.hf]))
    save_file({meta.name: tensor.contiguous() for meta, tensor in made}, tmp_path / "model.safetensors")
    config = {**hf_config("qwen3", False, **WIDE).to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    config["quantization_config"] = quantization_config(family)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path, family, state


def test_a_directory_in_fp8_tells_of_an_engine_in_fp8_what_is_not_quantised(directory):
    """What the engine has in FP8 is neither equal to what is read as bfloat16, nor different."""
    path, family, state = directory
    layout = ParameterLayout("bfloat16")
    found = checksums_of_directory(path, fp8_plan(family), layout)
    whole = implied_checksums(full_plan(family, torch.bfloat16), state.items(), layout)
    assert found == {name: whole[name] for name in found}
    assert {name for name in whole if "norm" in name} | {"lm_head.weight", "model.embed_tokens.weight"} == set(found)
    read = checksums_of_directory(path, full_plan(family, torch.bfloat16), layout)
    assert read.keys() == whole.keys() and read["model.norm.weight"] == whole["model.norm.weight"]


def test_engines_do_not_quantise_what_is_in_fp8_already(directory, capsys):
    (directory[0] / "tokenizer.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main(["serve-engines", str(directory[0]), "--quantization", "fp8", "--device", "cpu"])
    said = " ".join("".join(capsys.readouterr()).split())
    assert ended.value.code == 2 and "is in FP8 already" in said and "convert-ckpt" in said


MANAGED = ["model.path=/m", 'engines.mode="managed"', 'engines.quantization="fp8"']


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["engines.groups=[{}]", "lora.rank=4", 'weights.lora_sync="adapter"'], "never be sent"),
        (['engines.groups=[{dtype="float16"}]'], "computes in bfloat16"),
        (['engines.groups=[{weight_backend="nccl"}]'], 'weight_backend = "rltool"'),
        (['engines.groups=[{flags=["--load_format","dummy"]}]'], "sets --load_format"),
        (['engines.groups=[{flags=["--hf-overrides={}"]}]'], "sets --hf-overrides"),
        (['engines.groups=[{engine="sglang",flags=["--json-model-override-args={}"]}]'], "sets --json-model-overr"),
    ],
)
def test_what_contradicts_fp8_is_refused(sets, message):
    with pytest.raises(UsageError, match=message):
        load_config(TrainConfig, [], [*MANAGED, *sets])


@pytest.fixture
def plain(directory, tmp_path):
    """The same model in bfloat16."""
    path, family, state = directory
    save_file(state, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    return path, family


def test_a_scale_is_the_correctly_rounded_quotient():
    """With the reciprocal of 448, which CUDA takes for a number of Python's, some would be other; tests/gpu has the
    comparison."""
    largest = torch.linspace(0.1, 7.0, 999)
    blocks = torch.zeros(999 * fp8.BLOCK, 1)
    blocks[:: fp8.BLOCK, 0] = largest
    _, scales = fp8.quantized(blocks)
    exact = (largest.double() / 448).float()
    assert torch.equal(scales[:, 0], exact) and not torch.equal(exact, largest * torch.tensor(1 / 448))


def test_engines_that_quantise_nothing_are_started_on_a_copy_that_is_written_once(plain, tmp_path, monkeypatch):
    path, family = plain
    run = RunDirectory(tmp_path / "runs" / "one")
    groups = 'engines.groups=[{name="a",gpus=[0]},{name="b",engine="sglang",gpus=[1]}]'
    sets = [f"model.path={path}", 'engines.quantization="fp8"', groups]
    config = load_config(TrainConfig, [], sets, rules=()).config
    order = order_of_run(config, run)
    assert order.reads_quantized(POLICY)
    copy = order.models[POLICY].quantized_copy
    assert copy is not None and copy.parent == run.quantized_dir and not run.path.exists()
    run_by_it = load_config(TrainConfig, [], [*sets, 'engines.mode="managed"'], rules=()).config
    plan = plan_placement(run_by_it, gpu=True)
    expected = expected_plan(run_by_it, plan, run, [Host("h", gpus=(0, 1, 2))]).launches
    assert {launch.model for launch in expected} == {path}, "what is checked before the copy is there"
    slots = engine_slots(order.groups)
    seats = seat_slots(slots, [Host("h", gpus=(0, 1))])
    settings = Settings(order.models, run.key_file, run.state_dir)
    vllm, sglang = plan_engines(slots, seats, settings, lambda node, address: 1).launches
    assert (vllm.model, vllm.quantization) == (path, quantization_config(family))
    assert (sglang.model, sglang.quantization) == (copy, None)
    said = []
    for _ in range(2):
        write_fp8_copy(path, copy, own=None, report=said.append)
    assert len(said) == 1 and str(copy) in said[0]
    to_fp8(path, tmp_path / "other")
    assert {file.name: file.read_bytes() for file in copy.iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "other").iterdir()
    }
    copies = [copy, order_of_run(config, run).models[POLICY].quantized_copy]
    os.utime(path / "model.safetensors", (0, 0))
    copies.append(order_of_run(config, run).models[POLICY].quantized_copy)
    monkeypatch.setattr("rltool.__version__", "0.0.1")
    copies.append(order_of_run(config, run).models[POLICY].quantized_copy)
    monkeypatch.setattr("rltool.checkpoints.hf_export.quantization_config", lambda family: {"of": "another family"})
    copies.append(order_of_run(config, run).models[POLICY].quantized_copy)
    assert copies[0] == copies[1] and len({*copies}) == 4, "other files, another rltool, other matrices"
    write_fp8_copy(path, copies[2], own=None, report=said.append)
    assert "earlier" not in " ".join(said[:-1]) and said[-1].endswith(f"no engine reads: {copy.name}")
    assert copy.exists()


@pytest.mark.parametrize(
    ("mode", "engine", "lines"), [("managed", "sglang", 1), ("colocate", "sglang", 1), ("managed", "vllm", 0)]
)
def test_a_dry_run_names_the_copy_that_engines_of_the_run_read(plain, mode, engine, lines):
    sets = [f"model.path={plain[0]}", 'engines.quantization="fp8"', f'engines.mode="{mode}"']
    sets += [f'engines.groups=[{{engine="{engine}",count=2}}]', "trainer.world_size=2"]
    loaded = load_config(TrainConfig, [], sets, rules=())
    run, made = RunDirectory(Path("/runs/one")), plan_placement(loaded.config, gpu=True)
    expected = expected_plan(loaded.config, made, run, [Host("h", gpus=(0, 1, 2, 3))])
    out = io.StringIO()
    print_plan(Prepared(loaded, run, made, "cuda", None, None, expected=expected), Console(file=out, width=1000))
    line = f"  with a copy of {plain[0]} in FP8, written to /runs/one/quantized"
    assert out.getvalue().splitlines().count(line) == lines


@pytest.mark.parametrize(
    ("weights", "refused"),
    [
        ('transport="disk"', 'weights.transport = "disk"'),
        ('transport="disk",engines=[{match="127.*",transport="gloo"}]', None),  # the address is not known yet
        ('engines=[{group="b",transport="disk"}]', 'weights.engines (group = "b"): transport = "disk"'),
        ('engines=[{group="b",transport="disk"},{match="127.*",transport="gloo"}]', 'weights.engines'),
        ('engines=[{group="a",transport="disk"}]', None),  # vLLM's
        ('transport="auto"', None),
    ],
)
def test_a_colocated_sglang_that_would_load_fp8_from_a_directory_is_refused_before_it_starts(plain, weights, refused):
    """Managed and external ones, which do not sleep, load it."""
    groups = 'engines.groups=[{name="a"},{name="b",engine="sglang"}]'
    sets = [f"model.path={plain[0]}", 'engines.quantization="fp8"', groups, f"weights={{{weights}}}"]
    check_fp8_transports(load_config(TrainConfig, [], [*sets, 'engines.mode="managed"']).config)
    config = load_config(TrainConfig, [], [*sets, 'engines.mode="colocate"']).config
    said = f"^{re.escape(refused)}.*group 'b' loads no FP8" if refused else None
    with pytest.raises(UsageError, match=said) if refused else nullcontext():
        check_fp8_transports(config)
    if weights == 'transport="disk"':
        (plain[0] / "p.jsonl").write_text("")
        loaded = load_config(TrainConfig, [], [*sets, 'engines.mode="colocate"', f'data.train=["{plain[0]}/p.jsonl"]'])
        with pytest.raises(UsageError, match="after it has slept"):
            prepare(loaded, RunDirectory(Path("/runs/one")), resume=False)


def test_a_managed_sglang_starts_on_the_copy_once_its_host_has_written_it(plain, tmp_path, monkeypatch):
    path, _ = plain
    config = load_config(
        TrainConfig, [], [f"model.path={path}", *MANAGED[1:], 'engines.groups=[{engine="sglang"}]'], rules=()
    ).config
    started, asked = [], []

    def start(launches):
        assert all((launch.model / "config.json").is_file() for launch in launches)
        started.extend(launches)

    def write(*given):
        asked.append(given)
        write_fp8_copy(given[0], given[1], own=given[2], report=lambda line: None)

    methods = {
        "hold": lambda needs: {key: range(20_000, 20_000 + count) for key, count in needs.free.items()},
        "write_fp8_copy": write, "start": start, "ready": lambda: None,
    }  # fmt: skip
    host = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
    actor = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *given: host))
    monkeypatch.setattr(managed, "EngineHost", actor)
    monkeypatch.setattr(managed, "PlacementGroupSchedulingStrategy", lambda *_, **__: None)
    monkeypatch.setattr(managed, "get_all", lambda refs, *_, **__: refs)
    run, plan = open_run("one", create=True, root=tmp_path / "runs"), plan_placement(config, gpu=True)
    places = [Place(0, "node", "127.0.0.1", (0,)), Place(1, "node", "127.0.0.1", (1,))]
    console = SimpleNamespace(log_line=lambda line: None)
    engines = managed.ManagedEngines(config, run, plan, None, places, tmp_path, console)
    engines.start(lambda seconds: None)
    [copy] = run.quantized_dir.glob("[!.]*")
    assert [launch.model for launch in started] == [copy] and asked == [(path, copy, None)]
    assert is_fp8(json.loads((copy / "config.json").read_text()))


def test_of_two_that_want_a_copy_one_writes_it_and_the_other_waits(plain, tmp_path, monkeypatch):
    path, _ = plain
    copy, inside = tmp_path / "quantized" / "copy", []
    (copy.parent / ".other.partial").mkdir(parents=True)

    def slowly(source, target, **_):
        inside.append(target)
        time.sleep(0.3)
        assert inside == [target], "alone"
        target.mkdir()

    monkeypatch.setattr(convert, "to_fp8", slowly)
    with ThreadPoolExecutor(2) as threads:
        wants = [threads.submit(write_fp8_copy, path, copy, own=None, report=lambda line: None) for _ in range(2)]
        assert [want.result() for want in wants] == [None, None]
    assert inside == [copy] and sorted(file.name for file in copy.parent.iterdir()) == [".lock", "copy"]

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(convert, "to_fp8", full)
    with pytest.raises(RltoolError, match="was not written in FP8 .* to .*: No space left on device"):
        write_fp8_copy(path, copy.with_name("next"), own=None, report=lambda line: None)


def test_an_sglang_that_takes_none_is_refused_and_a_dry_run_tells_of_the_copy(plain, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    words = ["serve-engines", str(plain[0]), "--engine", "sglang", "--quantization", "fp8", "--dry-run"]
    words += ["--engine-python", sys.executable]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--device", "cpu"])
    said = " ".join("".join(capsys.readouterr()).split())
    assert ended.value.code == 2 and "SGLang was to serve FP8" in said and "packs FP8 for AMX" in said
    monkeypatch.setattr("rltool.commands.serve_engines.check_processes", lambda launches: None)
    latent = tmp_path / "latent"
    shutil.copytree(plain[0], latent)
    sizes = WIDE | {"num_key_value_heads": 4, "kv_lora_rank": 128, "moe_intermediate_size": 128}
    config = hf_config("deepseek_v3", False, **sizes).to_dict() | {"architectures": [architecture_of("deepseek_v3")]}
    (latent / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as ended:
        main([words[0], str(latent), *words[2:]])
    said = " ".join("".join(capsys.readouterr()).split())
    assert ended.value.code == 2 and "SGLang was to serve FP8" in said and "latent attention in FP8: use vLLM" in said
    with pytest.raises(SystemExit) as ended:
        main(words)
    said = "".join(capsys.readouterr()).replace("\n", "")
    assert ended.value.code == 0 and f"with a copy of {plain[0]} in FP8" in " ".join(said.split()), said
    assert not (tmp_path / "runs").exists()


def test_serve_engines_writes_the_copy_before_it_starts_an_sglang(plain, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    started = []

    def start(order, group, **_):
        started.append(order)
        raise UsageError("far enough")

    verb = "rltool.commands.serve_engines"
    monkeypatch.setattr(f"{verb}.check_order", lambda order: None)
    monkeypatch.setattr(f"{verb}.launch_engines", start)
    monkeypatch.setattr(f"{verb}.run_command", lambda role, run, bring_up, **_: bring_up(None))
    for engine in ("sglang", "vllm"):
        words = ["serve-engines", str(plain[0]), "--engine", engine, "--quantization", "fp8", "--run", engine]
        with pytest.raises(SystemExit):
            main([*words, "--gpus", "0"])
    said = " ".join("".join(capsys.readouterr()).split())
    copy, none = (order.models[POLICY].quantized_copy for order in started)
    assert none is None and not (tmp_path / "runs/vllm/quantized").exists()
    assert [copy] == list((tmp_path / "runs/sglang/quantized").glob("[!.]*")) and "far enough" in said, said
    assert is_fp8(json.loads((copy / "config.json").read_text())) and (copy / "tokenizer.json").exists()
