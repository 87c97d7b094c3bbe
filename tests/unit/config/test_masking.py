"""Secrets of a configuration: which values are, and that none of them comes into what is written or shown."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from rltool.cli import main
from rltool.config.loader import ConfigError, load_config
from rltool.config.train import TrainConfig
from rltool.environments.loading import load_environment
from rltool.environments.tools import make_tools
from rltool.errors import UsageError
from rltool.masking import MASK, masked
from rltool.processes.run_directory import open_run
from rltool.report.page import write_report
from rltool.rollout.rewards.pool import RewardPool
from rltool.terminal import Console
from rltool.training.cluster.placement import plan_placement
from rltool.training.observe.loggers import open_loggers
from rltool.training.observe.report import print_plan
from rltool.training.prepare import Prepared

SECRET = "hunter2"


@pytest.mark.parametrize(
    "value",
    [
        {"env": {"ANYTHING": SECRET, "N": 5}}, {"headers": {"X-Own": SECRET}}, {"api_key": SECRET}, {"apiKey": SECRET},
        {"OPENAI_API_KEY": SECRET}, {"db-password": SECRET}, {"hf_token": SECRET}, {"token": SECRET},
        {"client_secret": SECRET},
        {"credentials": {"user": "u", "what": SECRET}}, {"Authorization": f"Bearer {SECRET}"},
        {"a": [{"b": {"auth_token": SECRET}}]}, ["server", "--api-key", SECRET, "--port", "1"],
        ["server", f"--token={SECRET}"], ["env", f"API_KEY={SECRET}", "server"], {"url": f"https://me:{SECRET}@host/x"},
        [f"postgres://{SECRET}@host"], {"password": 5}, {"secret": [SECRET]},
        {"env": [f"A={SECRET}"]}, {"headers": f"X-Own: {SECRET}"}, {"GH_TOKEN": SECRET}, {"openai_key": SECRET},
        {"url": f"postgres://me:a@{SECRET}@host/x"}, {"url": f"https://host/x?a=1&api_key={SECRET}"},
    ],
)  # fmt: skip
def test_what_is_a_secret_is_masked(value):
    shown = json.dumps(masked(value))
    assert SECRET not in shown and MASK in shown and "5" not in shown
    assert masked(masked(value)) == masked(value)


@pytest.mark.parametrize(
    "value",
    [
        {"api_key_file": "/k", "key": "reward", "prompt_key": "p", "max_tokens": 5, "yes_token": "Yes"},
        {"eos_token": "x"},
        {"env": {"EMPTY": ""}, "api_key": None, "password": ""}, ["--key-file", "/k", "--max-tokens", "5"],
        {"url": "http://[fe80::1]:8000/a@b", "mail": "me@host", "image": "repo@sha256:1"},
        {"environment": "package.module:Class", "authors": ["a"], "tokenizer": "t", "secretary": "s"},
    ],
)  # fmt: skip
def test_what_is_none_stays_readable(value):
    assert masked(value) == value


def test_of_the_defaults_nothing_is_masked():
    config = TrainConfig(model={"path": "/m"})
    assert config.shown() == config.model_dump(mode="json")


@pytest.fixture
def settings(tmp_path):
    """A configuration with a secret in each table of the user's own."""
    tool = f'{{make = "rltool.environments.mcp_server:McpServer", command = ["x"], env = {{TOKEN = "{SECRET}"}}}}'
    config = tmp_path / "run.toml"
    config.write_text(
        f"""
        [model]
        path = "/m"
        [reward]
        options = {{url = "https://me:{SECRET}@host", api_key = "{SECRET}"}}
        group = "my.module:f"
        group_options = {{password = "{SECRET}"}}
        [rollout]
        environment = "rltool.environments.tool_use:ToolUse"
        environment_arguments = {{tools = [{tool}]}}
        template_arguments = {{secret = "{SECRET}"}}
        [data]
        chat_template_arguments = {{token = "{SECRET}"}}
        [eval.overrides.held]
        reward = "regex"
        reward_options = {{access_token = "{SECRET}"}}
        [eval.sets]
        held = "https://me:{SECRET}@host/held.jsonl"
        [[engines.groups]]
        flags = ["--hf-token", "{SECRET}"]
        [monitor]
        tensorboard = false
        """
    )
    return load_config(TrainConfig, [config])


def test_no_writer_of_settings_lets_a_secret_through(settings, tmp_path, monkeypatch):
    assert SECRET in settings.config.model_dump_json(), "what runs has it"
    run, out, seen = open_run("a", create=True, root=tmp_path / "runs"), io.StringIO(), []
    prepared = Prepared(settings, run, plan_placement(settings.config, gpu=False), "cpu", None, None)
    print_plan(prepared, Console(file=out, width=1000))
    assert "reward.options" in out.getvalue() and "hunter" not in out.getvalue()

    wandb = ModuleType("wandb")
    wandb.init = lambda **given: seen.append(given["config"]) or SimpleNamespace(define_metric=lambda *_, **__: None)
    module = ModuleType("own_logger")
    logger = SimpleNamespace(log=print, close=print)
    module.make = lambda run: seen.append(run.settings) or logger
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "own_logger", module)
    more = {"wandb_project": "p", "logger": "own_logger:make"}
    monitored = settings.config.model_copy(update={"monitor": settings.config.monitor.model_copy(update=more)})
    open_loggers(monitored, run, first_step=0)
    assert len(seen) == 2 and all(one["reward.options.api_key"] == MASK for one in seen)
    assert SECRET not in repr(seen)


def test_a_report_masks_what_an_earlier_release_wrote(settings, tmp_path):
    run = open_run("a", create=True, root=tmp_path / "runs")
    run.metrics_file.write_text('{"step": 0, "train/loss": 1.0}\n')
    run.config_file.write_text(json.dumps({"config": settings.config.model_dump(mode="json"), "origins": {}}))
    page = write_report([run.path], None, title="", note="").read_text()
    assert "reward.options" in page and SECRET not in page


def test_errors_about_settings_do_not_quote_secrets(tmp_path, capsys):
    texts = []
    for sets in (
        [f"rollout.environment_arguments=[{{api_key='{SECRET}'}}]"],
        [f"reward.options=['--token','{SECRET}']"],
        [f'reward.options={{api_key="{SECRET}"'],  # lacks its brace
        [f"reward.options=--hf-token {SECRET}"],
    ):
        with pytest.raises(ConfigError) as error:
            load_config(TrainConfig, [], ["model.path=/m", *sets])
        texts.append(str(error.value))
    tool = {"make": "rltool.environments.mcp_server:McpServer", "env": {"A": SECRET}, "unknown": 1}
    with pytest.raises(UsageError) as error:
        make_tools(tool)
    texts.append(str(error.value))
    rollout = {"environment": "rltool.environments.tool_use:ToolUse", "environment_arguments": {"tools": [tool]}}
    with pytest.raises(UsageError) as error:
        load_environment(TrainConfig(model={"path": "/m"}, rollout=rollout).rollout)
    texts.append(str(error.value))
    assert all(texts) and SECRET not in " ".join(texts)


def test_a_dry_run_of_engines_masks_their_flags(tiny_tied_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RLTOOL_RUNS", str(tmp_path / "runs"))
    with pytest.raises(SystemExit):
        main(["serve-engines", str(tiny_tied_dir), "--device", "cpu", "--dry-run", "--", "--hf-token", SECRET])
    output = capsys.readouterr().out
    assert f"--hf-token '{MASK}'" in output and SECRET not in output


def test_options_of_rewards_are_on_no_command_line():
    """Which every user of the host can read."""

    def worker_lines():
        lines = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
        return [line for line in lines if "rewards.worker" in line]

    async def command_lines():
        pool = RewardPool("rltool.rollout.rewards.shipped:regex", workers=1, timeout=30.0, options={"pattern": SECRET})
        try:
            async with asyncio.timeout(20):
                while not (lines := worker_lines()):  # Linux lets a parent go on before the child has its command line
                    await asyncio.sleep(0.001)
            return lines
        finally:
            await pool.close()

    assert SECRET not in " ".join(asyncio.run(command_lines()))


def test_whole_configurations_are_dumped_only_where_a_process_is_given_them():
    import rltool

    package = Path(rltool.__file__).parent
    texts = {file.relative_to(package).as_posix(): file.read_text(encoding="utf-8") for file in package.rglob("*.py")}
    found = {name for name, text in texts.items() if "model_dump" in text}
    assert found == {
        "config/base.py",  # shown(), which masks
        "gateway/launch.py", "agents/gateway_process.py",  # settings of a gateway, which has no table for secrets
        "agents/verifiers_env.py", "agents/harbor_env.py",  # rows
        "rollout/measure/eval_set.py",  # what an evaluation set lays over a run
        "engines/run_client.py", "engines/endpoints.py", "gateway/fleet.py",  # addresses, with paths of key files
        "megatron/served.py", "training/served.py",  # rank, alpha and targets of an adapter
        "tinker/launch.py",  # to a file of mode 600
        "engines/plugin/arrays.py", "processes/state.py", "commands/doctor.py", "commands/status.py",  # no settings
    }  # fmt: skip
