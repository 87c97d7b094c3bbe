"""Engines for evaluation alone (eval.engines), in the rollout service against fake engines, and before a run starts."""

from __future__ import annotations

import asyncio
import io

import pytest

from rltool.config.loader import load_config
from rltool.config.train import TrainConfig
from rltool.errors import UsageError
from rltool.processes.run_directory import RunDirectory
from rltool.rollout.collector import CollectionInterrupted
from rltool.rollout.serving.guard import TooFewEngines
from rltool.terminal import Console
from rltool.training.checks.preflight import resolve_evaluation
from rltool.training.manager import service as rollout_service
from rltool.training.observe.report import print_plan
from rltool.training.prepare import prepare
from tests.contract.test_rollout_service import (  # noqa: F401  # fixtures
    ABORT,
    LONG,
    RUN,
    Speller,
    data_file,
    generated,
    model_dir,
    serve,
    settings,
    spellers,
    stack,
    tokenizer,
    train,
    until,
)

EVALUATION = {"sampling": {"max_response_tokens": 7}}

SETS = {"heldout": "heldout.jsonl"}


@pytest.fixture
def held(stack, tokenizer):  # noqa: F811
    return stack.enter_context(Speller(tokenizer))


def asked(engine):
    """Lengths of the requests that an engine had: 7 of evaluations, 8 of rollouts, others of the value check."""
    return {body["sampling_params"]["max_tokens"] for body in generated(engine)} & {7, 8}


def test_they_get_the_weights_when_an_evaluation_begins_and_hold_them(serve, settings, spellers, held):  # noqa: F811
    async def run():
        async with serve(settings(eval=EVALUATION), spellers, evaluation=[held]) as service:
            await train(service, 1)
            assert held.version != f"{RUN}:0:0", "no sync of the others concerns it"
            report = await service.hold_evaluation_engines(0)
            assert report.updated == (held.url,) and held.version == f"{RUN}:0:0"
            [row] = (await service.status())["evaluation_engines"]
            assert (row["url"], row["state"], row["weight_version"]) == (held.url, "ready", held.version)
            assert [e.url for e in service.all_engines()] == [*(engine.url for engine in spellers), held.url]
            held.seconds = 0.5
            evaluation = asyncio.create_task(service.evaluate())
            await until(lambda: held.batch.running > 0, "it generates")
            await train(service, 3, first=1)
            assert held.version == f"{RUN}:0:0" and spellers[0].version == f"{RUN}:0:2"
            found = (await evaluation).metrics
            assert (found["eval/version_min"], found["eval/version_max"]) == (0, 0)
            assert found["eval/words/samples"] == 18
            held.seconds = 0.0
            await service.hold_evaluation_engines(2)
            assert (await service.evaluate()).metrics["eval/version_min"] == 2
            assert service.fleet.serving() == tuple(engine.url for engine in spellers)

    asyncio.run(run())
    assert asked(held) == {7} and asked(spellers[0]) == asked(spellers[1]) == {8}
    assert held.transport is None and not held.paused, "it was left as it was found"


def test_a_stop_ends_the_evaluation_there_too(serve, settings, spellers, held):  # noqa: F811
    async def run():
        async with serve(settings(eval=EVALUATION), spellers, evaluation=[held]) as service:
            await service.sync_weights(0)
            await service.hold_evaluation_engines(0)
            held.seconds = 600.0
            evaluation = asyncio.create_task(service.evaluate())
            await until(lambda: held.batch.running > 0, "it generates")
            await service.interrupt()
            with pytest.raises(CollectionInterrupted):
                await asyncio.wait_for(evaluation, LONG)
            await until(lambda: not held.batch.running, "nothing is generated any more")

    asyncio.run(run())
    assert ABORT in held.paths()


def test_where_the_last_of_them_dies_the_evaluation_ends_and_without_one_nobody_minds(
    serve, settings, spellers, held, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(rollout_service, "GUARD_SECONDS", 0.01)

    async def run():
        config = settings(eval=EVALUATION, deadlines={"engines": 0.5})
        async with serve(config, spellers, evaluation=[held]) as service:
            await service.sync_weights(0)
            await service.hold_evaluation_engines(0)
            held.seconds = LONG
            members = service._held._members
            evaluation = asyncio.create_task(service.evaluate())
            await until(lambda: held.batch.running > 0, "it generates")
            members.fleet.process_exited(held.url, "killed by the kernel")
            with pytest.raises(TooFewEngines, match=rf"{held.url}: dead \(killed by the kernel\)"):
                await asyncio.wait_for(evaluation, LONG)

    asyncio.run(run())


def test_between_evaluations_nobody_minds_that_they_are_dead(serve, settings, spellers, held, monkeypatch):  # noqa: F811
    monkeypatch.setattr(rollout_service, "GUARD_SECONDS", 0.001)

    async def run():
        async with serve(settings(eval=EVALUATION), spellers, evaluation=[held]) as service:
            looks: list[str] = []
            service._policy.guard.check = lambda: looks.append("rollouts")
            service._held.check = lambda: looks.append("evaluation")
            await service.sync_weights(0)
            service._held._members.fleet.process_exited(held.url, "killed")
            assert (await service.next_batch(0)).batch.num_samples == 16
            await until(lambda: len(looks) > 2, "it was looked several times")
            assert set(looks) == {"rollouts"}

    asyncio.run(run())


def test_an_engine_is_for_rollouts_or_for_evaluation(tmp_path):
    config = TrainConfig.model_validate({"model": {"path": "m"}, "eval": {"engines": ["h:1", "h:2"], "sets": SETS}})
    assert [e.url for e in resolve_evaluation(config, []).engines] == ["http://h:1", "http://h:2"]
    with pytest.raises(UsageError, match="http://h:2: in engines.external and in eval.engines"):
        resolve_evaluation(config, ["http://h:2", "http://h:3"])


def test_a_key_of_theirs_is_theirs_alone(tmp_path):
    key = tmp_path / "key"
    key.write_text("secret")
    evaluation = {"engines": ["h:1"], "api_key_file": key, "sets": SETS}
    config = TrainConfig.model_validate({"model": {"path": "m"}, "eval": evaluation, "engines": {"external": ["h:2"]}})
    assert [e.key_file for e in resolve_evaluation(config, []).engines] == [key]


def test_they_are_found_checked_and_told_of_before_a_run_starts(model_dir, data_file, spellers, held, tmp_path):  # noqa: F811
    def prepared(*sets: str):
        values = [
            f"model.path={model_dir}", f'data.train=["{data_file}"]', f'engines.external=["{spellers[0].url}"]',
            f'eval.engines=["{held.url}"]', f'eval.sets={{words="{data_file}"}}', "trainer.device=cpu",
            "sampling.max_prompt_tokens=8", "sampling.max_response_tokens=8", "weights.transport=disk",
            "deadlines.preflight=5", "rollout.prompts_per_step=4",
        ]  # fmt: skip
        return prepare(load_config(TrainConfig, [], [*values, *sets]), RunDirectory(tmp_path / "run"), resume=False)

    found = prepared()
    assert found.fleet is not None and list(found.fleet.infos) == [spellers[0].url]
    assert found.evaluation is not None and list(found.evaluation.infos) == [held.url]
    screen = io.StringIO()
    print_plan(found, Console(file=screen, width=200))
    assert "engines for evaluation alone: 1 x vllm" in screen.getvalue()
    with pytest.raises(UsageError, match="in engines.external and in eval.engines"):
        prepared(f'engines.external=["{held.url}"]')
    held.vocab_size = 63
    with pytest.raises(UsageError, match=rf"{held.url}: has a vocabulary of 63"):
        prepared()
    held.die()
    with pytest.raises(UsageError, match=rf"eval.engines: {held.url}"):
        prepared()
