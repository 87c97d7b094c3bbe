"""Two real SGLang engines: one fills KV caches, the other takes them over NIXL and samples. Streams through a router,
also of one alone."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from rltool.config.router import RouterConfig
from rltool.config.serve import EngineGroup
from rltool.engines.endpoints import Endpoints, EngineEndpoint
from rltool.engines.launch.plan import Model
from rltool.engines.launch.start import Order, launch_engines
from rltool.processes.run_directory import RunDirectory, open_run
from rltool.processes.supervise import ProcessGroup
from rltool.router.launch import start_router
from tests.e2e.engines import sglang_python
from tests.e2e.job import Job, write_job
from tests.e2e.test_prefill_decode import streams_as_it_answers, streams_to_agents
from tests.e2e.weights import new_request

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900), pytest.mark.long]

AGREEMENT = 1e-4
SECONDS = 800.0
TOKENS = 120
NIXL = ("--disaggregation-transfer-backend", "nixl")
SETS = (
    "steps=4", "eval.sets={}", "rollout.max_staleness=1", 'algorithm.is_weights="token"', 'weights.pause_mode="abort"',
)  # fmt: skip


def groups() -> list[dict[str, object]]:
    common = {"engine": "sglang", "max_model_len": 256, "engine_python": str(sglang_python()), "flags": list(NIXL)}
    return [{"name": role, "role": role, **common} for role in ("prefill", "decode")]


def ordered(groups: list[dict[str, object]], model: Path) -> Order:
    return Order(
        tuple(EngineGroup.model_validate({**group, "device": "cpu"}) for group in groups), {"policy": Model(model)}
    )


def trained(job: Job, run: str, *sets: str) -> str:
    """What it said. The schedulers of both engines poll without a rest, so on few cores all takes long."""
    process = job.start("train", run, sets=[*SETS, *sets])
    try:
        assert process.wait(SECONDS) == 0, job.output(run)[-4000:]
    finally:
        process.kill()
    return job.output(run)


def agreed(job: Job, run: str) -> None:
    """A decode engine computes nothing for a prompt: where its samples agree with the trainer, it had the cache, and
    the cache was of the trainer's weights."""
    steps = job.steps(run)
    assert len(steps) == 4
    compared = [step["train/logprob_abs_diff_mean"] for step in steps if "train/logprob_abs_diff_mean" in step]
    assert compared and max(compared) < AGREEMENT
    assert all(step["weights/failed_engines"] == 0 for step in steps[:-1])  # nothing samples after the last
    assert steps[-1]["rollout/engines_serving"] == 2


def test_engines_that_a_run_starts_are_sampled_through_their_router(tmp_path: Path, tiny_tied_dir: Path):
    job = write_job(tmp_path / "job", tiny_tied_dir, None)
    listed = ",".join(
        "{" + ",".join(f"{key}={json.dumps(value)}" for key, value in group.items()) + "}" for group in groups()
    )
    said = trained(job, "managed", 'engines.mode="managed"', f"engines.groups=[{listed}]")
    assert "through http://127.0.0.1" in said
    agreed(job, "managed")


def test_engines_that_are_named_by_address_tell_their_roles_and_are_both_asked(tmp_path: Path, tiny_tied_dir: Path):
    run = open_run("engines", create=True, root=tmp_path / "runs")
    with ProcessGroup(run) as group:
        engines = launch_engines(ordered(groups(), tiny_tied_dir), group)["policy"]
        job = write_job(tmp_path / "job", tiny_tied_dir, ",".join(engine.url for engine in engines))
        said = trained(job, "direct", f'engines.api_key_file="{engines[0].key_file}"')
        assert "through http" not in said
        agreed(job, "direct")


def test_a_pair_streams_what_it_answers_in_one_piece_also_to_agents(tmp_path: Path, tiny_tied_dir: Path, monkeypatch):
    run = open_run("engines", create=True, root=tmp_path / "runs")
    with ProcessGroup(run) as group:
        pair = launch_engines(ordered(groups(), tiny_tied_dir), group)["policy"]
        greedy = new_request(max_tokens=TOKENS, temperature=0.0, seed=None)
        streams_as_it_answers(pair, greedy, tiny_tied_dir, AGREEMENT)
        agents = partial(streams_to_agents, pair, TOKENS, tiny_tied_dir, tmp_path, monkeypatch, AGREEMENT)
        agents()
        agents(router=routed(run, group))


def test_an_engine_alone_streams_to_agents_through_its_router(tmp_path: Path, tiny_tied_dir: Path, monkeypatch):
    run = open_run("engines", create=True, root=tmp_path / "runs")
    alone = groups()[0] | {"role": "regular", "flags": [], "max_model_len": 512}
    with ProcessGroup(run) as group:
        engines = launch_engines(ordered([alone], tiny_tied_dir), group)["policy"]
        through = routed(run, group)
        streams_to_agents(engines, 4 * TOKENS, tiny_tied_dir, tmp_path, monkeypatch, AGREEMENT, router=through)


def routed(run: RunDirectory, group: ProcessGroup) -> EngineEndpoint:
    """A router in front of the run's engines."""
    model = Endpoints.load(run.endpoints_file).models["policy"]
    start_router(RouterConfig(key_file=model.engines[0].key_file), model, group, endpoints_file=run.endpoints_file)
    found = Endpoints.load(run.endpoints_file).models["policy"].data_endpoint()
    assert found is not None
    return found
