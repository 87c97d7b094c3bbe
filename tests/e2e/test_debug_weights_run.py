"""`rltool debug weights --run`: the engine of a living run, compared by the run with what its trainer holds."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rltool.cli import main
from rltool.engines.client import EngineClient
from rltool.engines.dialects.table import dialect
from rltool.engines.endpoints import Endpoints, ModelEndpoints
from rltool.weights.transports.disk import version_directory
from tests.e2e.engines import RunningEngine, serving_vllm
from tests.e2e.job import Job, write_job
from tests.e2e.weights import Sender

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(900)]

RUN = "living"
NORM = "model.layers.1.input_layernorm.weight"
SETTINGS = [
    "steps=100000", "eval.sets={}", "sampling.stop_token_ids=[]", "sampling.max_response_tokens=200",
    "trainer.max_tokens_per_micro_batch=2048", "rollout.dump=false", "optimizer_steps_per_rollout=1",
    'weights.transport="disk"',
]  # fmt: skip
READY_SECONDS = 400.0
ATTEMPTS = 20
"""The trainer syncs every few seconds, which mends what this test breaks: then it is broken again."""


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def engine(request, tiny_tied_dir: Path, tmp_path: Path) -> Iterator[RunningEngine]:
    """vLLM with so many tensor-parallel ranks."""
    if request.param == 1:
        yield request.getfixturevalue("vllm_engine_tied")
        return
    with serving_vllm(tiny_tied_dir, tmp_path, tp=request.param) as running:
        yield running


@pytest.fixture
def job(engine: RunningEngine, tiny_tied_dir: Path, tmp_path: Path) -> Iterator[Job]:
    """A run that trains and syncs over the disk until the test ends."""
    endpoints = Endpoints(models={"policy": ModelEndpoints(engines=(engine.endpoint,))})
    endpoints.save(tmp_path / "endpoints.json")
    job = write_job(tmp_path, tiny_tied_dir, f"@{tmp_path}/endpoints.json")
    process = job.start("train", RUN, sets=SETTINGS)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not (job.runs / RUN / "metrics.jsonl").exists() or not job.steps(RUN):
            assert process.poll() is None and time.monotonic() < deadline, job.output(RUN)[-4000:]
            time.sleep(0.2)
        yield job
        assert process.poll() is None, job.output(RUN)[-4000:]
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def debug_weights(job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable:
    """(exit code, version that the trainer held, output)."""
    monkeypatch.setenv("RLTOOL_RUNS", str(job.runs))

    def run() -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["debug", "weights", "--run", RUN])
        said = "".join(capsys.readouterr())
        version = re.search(rf"the trainer of run {RUN} \((\S+)\)", said)
        assert version is not None, said
        return int(ended.value.code or 0), version[1], said

    return run


def test_the_engine_equals_the_trainer_and_one_changed_tensor_is_found(job, engine, debug_weights, tmp_path):
    code, _, said = debug_weights()
    assert code == 0 and "the same weights as" in said and "sampled tokens agree" in said, said
    equal, compared = map(int, re.search(r"(\d+) of (\d+) parameters are bit-equal", said).groups())
    assert equal == compared > 5

    for _ in range(ATTEMPTS):
        version = asyncio.run(with_one_tensor_off(engine, job.runs / RUN / "weights", tmp_path))
        code, held, said = debug_weights()
        if held == version:
            break
    else:
        pytest.fail("the trainer was always faster")
    assert code == 1 and f"the first parameter that differs: {NORM}\n" in said, said
    assert "sampled tokens agree" in said, "1e-6 in a norm is too little to be seen in values"


async def with_one_tensor_off(engine: RunningEngine, directory: Path, scratch: Path) -> str:
    """Send the engine the trainer's last weights again, one of them changed, in the run's own name. Their version."""
    async with EngineClient() as client:
        info = await client.probe(engine.endpoint)
    assert info.lease is not None and info.weight_version is not None
    tensors = {}
    for file in version_directory(directory, info.weight_version).glob("*.safetensors"):
        tensors |= load_file(file)
    tensors[NORM] = tensors[NORM] + 1e-6
    async with EngineClient(run=info.lease.holder.run) as client:
        sender, engine_dialect = Sender(client, engine), dialect("vllm")
        await sender.control(engine_dialect.pause("keep"))  # an engine that computes while it loads dies of it
        try:
            await sender.disk(tensors, info.weight_version, scratch)
        finally:
            await sender.control(engine_dialect.resume())
    return info.weight_version
