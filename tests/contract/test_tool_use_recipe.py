"""The recipe `tool_use` without training: task, model and configuration, against engines that know the task."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from recipes.tool_use import agent, run
from recipes.tool_use.task import ASSISTANT, STOP, TOOL, USER, call_of, make_data, make_model
from rltool.agents.gateway_process import GatewayPlace
from rltool.cli import load_command
from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.processes.run_directory import RUNS_VARIABLE
from rltool.quickstart.stages import Stages
from rltool.rollout.measure.evaluation import Evaluated
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer
from rltool.terminal import Console
from rltool.training.checks.validate import check_inputs
from rltool.training.manager.rollout_engines import Engines
from rltool.training.manager.service import Rollout, RolloutService
from tests.contract.fakes.vllm import FakeVllm

HERE = Path(__file__).resolve().parents[2] / "recipes" / "tool_use"


class Caller(FakeVllm):
    """Calls the calculator with what it was asked, and answers with its result; to every other one it adds a 1."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.vocab_size, self.tokenizer = tokenizer.vocab_size, tokenizer
        self._slips = itertools.cycle(("", "1"))

    def _plan(self, index: int, ids: list[int], sampling: dict[str, Any], limit: int) -> list[int]:
        text = self.tokenizer.decode_everything(ids)
        _, is_second, result = text.partition(TOOL)
        if not is_second:
            said = call_of(text.removeprefix(USER).partition(STOP)[0])
        else:
            said = result.partition(STOP)[0] + next(self._slips)
        return self.tokenizer.encode_target(said)[:limit]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tool-use")
    make_data(root / "data", seed=0, num_train=40, num_heldout=8)
    make_model(root / "model", seed=0)
    return root


def config_of(files: Path, how: str) -> TrainConfig:
    sets = [
        f'model.path="{files}/model"', f'data.train=["{files}/data/train.jsonl"]',
        f'eval.sets.heldout="{files}/data/heldout.jsonl"', "rollout.prompts_per_step=4", "rollout.samples_per_prompt=4",
        "rollout.dump=true",
    ]  # fmt: skip
    return load_config(TrainConfig, [HERE / "grpo.toml", HERE / f"{how}.toml"], sets, {}).config


@pytest.mark.parametrize("how", ["environment", "agent"])
def test_its_configuration_passes_the_checks_of_a_run(files, how):
    config = config_of(files, how)
    check_inputs(config)


def test_the_careless_user_is_right_about_a_quarter_of_the_time_and_uses_one_form(files):
    rows = [json.loads(line) for line in (files / "data" / "warm_start.jsonl").read_text().splitlines()]
    assert len(rows) == 80 and all(row["prompt"].endswith(ASSISTANT) for row in rows)
    held_out = {json.loads(line)["prompt"] for line in (files / "data" / "heldout.jsonl").read_text().splitlines()}
    assert not held_out & {
        json.loads(line)["prompt"] for line in (files / "data" / "train.jsonl").read_text().splitlines()
    }
    tokenizer = load_tokenizer(files / "model")
    for row in rows:
        assert tokenizer.decode_everything(tokenizer.encode_prompt(row["prompt"])) == row["prompt"]


@pytest.mark.parametrize("how", ["environment", "agent"])
def test_the_first_steps(files, how, tmp_path):
    """Both ways a sample is the same tokens: those of the call and the answer are trained."""
    tokenizer = load_tokenizer(files / "model")

    async def go(engine: Caller) -> tuple[Rollout, Evaluated]:
        endpoint = EngineEndpoint(url=engine.url, dialect="vllm", plugin=True)
        async with EngineClient() as client:
            engines = Engines((endpoint,), {endpoint.url: await client.probe(endpoint)})
        place = GatewayPlace(tmp_path / "sessions", tmp_path / "key", tmp_path / "gateway.log")
        service = RolloutService(config_of(files, how), engines, log=lambda line: None, gateway=place)
        try:
            await service.start()
            return await service.next_batch(0), await service.evaluate()
        finally:
            await service.close()

    with Caller(tokenizer) as engine:
        rollout, evaluated = asyncio.run(go(engine))
    assert len(rollout.samples) == 16 and {sample.turns for sample in rollout.samples} == {2}
    assert {sample.reward for sample in rollout.samples} == {0.0, 1.0}
    for sample in rollout.samples:
        said = tokenizer.decode_everything([*sample.prompt_ids, *sample.response_ids])
        assert said.startswith(f"{USER}{sample.prompt_text}{STOP}{ASSISTANT}{call_of(sample.prompt_text)}{STOP}{TOOL}")
        assert sample.reward == float(said.endswith(f"{STOP}{TOOL}{sample.label}{STOP}{ASSISTANT}{sample.label}{STOP}"))
        trained = [token for token, mask in zip(sample.response_ids, sample.response_mask, strict=True) if mask]
        answer = said.rpartition(ASSISTANT)[2]
        assert tokenizer.decode_everything(trained) == f"{call_of(sample.prompt_text)}{STOP}{answer}"
    assert rollout.metrics["rollout/turns_mean"] == 2.0 and 0 < evaluated.metrics["eval/heldout/accuracy"] < 1


class TypedStages(Stages):
    """Verbs are checked as the command line checks them, and not run; GRPO leaves one evaluation."""

    def begin(self, role: str, *arguments: str, root: Path | None = None) -> Any:
        verb, *words = arguments
        load_command(verb).make_context(verb, words)

    def finish(self, process: Any, *, watch: Any = None, note: str = "") -> None: ...

    def train(self, role: str, steps: int, *arguments: str, metrics: Path, shown_every: int = 10, root: Any = None):
        self.begin(role, *arguments)
        metrics.write_text(json.dumps({"step": steps - 1, "reward/mean": 0.5, "eval/heldout/accuracy": 0.25}) + "\n")


@pytest.mark.parametrize("how", ["environment", "agent", "framework"])
def test_its_commands_parse_and_it_ends_with_a_curve_and_a_report(how, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "Stages", TypedStages)
    monkeypatch.setenv(RUNS_VARIABLE, str(tmp_path))
    console = Console(file=io.StringIO(), width=200)
    ended = run.run_recipe(console, name=how, how=how, seed=0, steps=40, warm_up_steps=300)
    assert run.success(ended) == [(40, 0.25)]
    assert "supervised warm start, 300 steps" in ended.report_file.read_text()


def test_the_agent_tells_the_model_what_was_wrong():
    class Call:
        def __init__(self, arguments: str) -> None:
            self.function = self
            self.arguments = arguments

    assert agent.result_of(Call('{"expression": "2*3"}')) == "6"
    assert agent.result_of(Call('{"expression": "2*"}')).startswith("error: ")
    assert agent.result_of(Call("{}")).startswith("error: ")
