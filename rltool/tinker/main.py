"""`python -m rltool.tinker.main`: the process of `rltool serve-trainer`: trainer ranks, engines, the API. Its own
settings are JSON in argv; the run's and the keys are in files."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack

import numpy as np

from rltool.config.serve_trainer import ServeTrainerConfig
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import EngineInfo
from rltool.errors import EngineError, RltoolError, UsageError
from rltool.processes.keys import read_key
from rltool.processes.marks import marking
from rltool.processes.run_directory import RunDirectory
from rltool.processes.run_lock import RunLock
from rltool.processes.state import read_state, state_of_this_process
from rltool.processes.stop_run import end_left_behind
from rltool.terminal import write_line
from rltool.tinker.full_weights import full_samplers
from rltool.tinker.launch import ROLE, Parts, probed
from rltool.tinker.samples import Samples
from rltool.tinker.sampling import adapter_samplers
from rltool.tinker.server import TinkerServer, read_keys, serve
from rltool.tinker.service import Limits, Service
from rltool.training.checks.preflight import EnginesAway, ProbedFleet
from rltool.training.cluster.resources import plan_resources
from rltool.training.prepare import trainer_device
from rltool.training.served import AdapterSpec, Datum, ServedTrainer
from rltool.training.served_session import ServedSession, served_trainer
from rltool.training.stopping import StopRequested, StopSignal
from rltool.weights.connections import Trainer
from rltool.weights.verify.tolerances import check_tolerance

CHECK_TOKENS = 64
"""Of the text that trainer and engines score before the first call."""
CHECKED = "the base model"
AWAY_SECONDS = 1.0
"""Between two looks for engines that do not answer."""


def run_trainer(config: TrainConfig, serving: ServeTrainerConfig, parts: Parts) -> None:
    """Until SIGTERM; raises what ended the trainer."""
    run = RunDirectory(parts.run)
    state = read_state(run, ROLE) or state_of_this_process(ROLE, argv=sys.argv)
    with StopSignal(write_line).installed() as stop, RunLock(run) as lock:
        stop.consequence = "the trainer ends; what was acknowledged is on the disk"
        lock.take()
        device = trainer_device(config)
        engines = _engines(config, serving, stop) if config.engines.external else None
        others = [] if engines is None else list(engines.endpoints.engines)
        resources = plan_resources(config, run, device, generates=False, engines=others)
        logs = state.log.parent if state.log is not None else None
        with marking(run, state):
            end_left_behind(run, report=write_line)
            with served_trainer(config, logs, gpus=resources.gpus, while_waiting=stop.raise_if_requested) as session:
                found = {} if engines is None else {e: engines.infos[e.url] for e in engines.endpoints.engines}
                asyncio.run(_serve(session, config, serving, parts, found))


def _engines(config: TrainConfig, serving: ServeTrainerConfig, stop: StopSignal) -> ProbedFleet:
    """Those that may have died with this server, and are started again too, are waited for."""
    ends, said = time.monotonic() + serving.ready_timeout, False
    while True:
        try:
            return probed(config)
        except EnginesAway as error:
            if time.monotonic() > ends:
                raise
            if not said:
                write_line(f"waiting until all engines serve: {error}")
            said = True
        stop.raise_if_requested()
        time.sleep(AWAY_SECONDS)


async def _serve(
    session: ServedSession, config: TrainConfig, serving: ServeTrainerConfig, parts: Parts,
    engines: Mapping[EngineEndpoint, EngineInfo],
) -> None:  # fmt: skip
    trainer, vocab_size, run = session.trainer, session.vocab_size, RunDirectory(parts.run)
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "asyncio.run made it"
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    deadlines = config.deadlines
    limits = Limits(
        in_flight=serving.max_in_flight, samples=serving.max_samples, models=serving.max_models,
        checkpoints=serving.max_checkpoints, body_bytes=serving.max_body_bytes, rank=serving.lora_rank,
        session_timeout=serving.session_timeout,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(EngineClient(run=run.run_id))
        if engines and serving.lora_rank:
            await _check_base(trainer, config, client, engines, vocab_size)
        service = await asyncio.to_thread(
            Service, parts.run / "served", trainer, parts.served_name, limits=limits,
            snapshot_every=serving.snapshot_every, shared=serving.checkpoints,
        )  # fmt: skip
        samples = None
        if engines and serving.lora_rank:
            samplers = adapter_samplers(
                engines, client, deadline=deadlines.generate, load_deadline=deadlines.sync, log=write_line
            )
        elif engines:
            directory = config.weights.disk_dir / run.run_id if config.weights.disk_dir else run.path / "weights"
            sender = Trainer(session.ranks.handles(), session.ranks.device, directory, vocab_size)
            samplers = full_samplers(
                engines, client, config, sender=sender, trainer=trainer, service=service, run=run, log=write_line
            )
        else:
            samplers = None
        if samplers is not None:
            samples = Samples(
                await stack.enter_async_context(samplers), vocab_size=vocab_size, most=limits.samples,
                ended=service.history.sampled,
            )  # fmt: skip
            stack.push_async_callback(samples.close)
        watched_by = run.name, read_key(run.ensure_key(), f"run {run.name}")
        server = TinkerServer(service, read_keys(parts.keys), samples=samples, watched_by=watched_by)
        write_line(f"serving on {serving.host}:{serving.port}")
        await serve(server, service, serving.host, serving.port)


def checked_tokens(micro_batch_tokens: int, engines: Iterable[EngineInfo]) -> int:
    """How many log-probabilities are compared at the start. Scores of n take n + 1 tokens and room for another."""
    room = [info.max_model_len - 2 for info in engines if info.max_model_len is not None]
    return min([CHECK_TOKENS, micro_batch_tokens - 1, *room])


async def _check_base(
    trainer: ServedTrainer, config: TrainConfig, client: EngineClient, engines: Mapping[EngineEndpoint, EngineInfo],
    vocab_size: int,
) -> None:  # fmt: skip
    """UsageError where an engine gives other log-probabilities than the trainer: it serves another model."""
    size = checked_tokens(config.trainer.micro_batch_tokens, engines.values())
    tokens = np.random.default_rng(0).integers(0, vocab_size, size + 1)

    def ours() -> np.ndarray:
        trainer.create(CHECKED, AdapterSpec(1), 0)
        datum = Datum(tokens[:-1], tokens[1:], {"weights": np.ones(size, np.float32)})
        [found] = trainer.forward(CHECKED, [datum], "cross_entropy", {}, backward=False).logprobs
        trainer.drop(CHECKED)
        return found

    expected, ids = await asyncio.to_thread(ours), tuple(tokens.tolist())
    problems: list[str] = []
    for endpoint, info in engines.items():
        try:
            scores = await client.score(endpoint, ids, timeout=config.deadlines.sync)
        except EngineError as error:
            problems.append(f"{endpoint.url}: {error}")
            continue
        difference = float(np.abs(np.array(scores) - expected).mean())
        limit = check_tolerance(config.weights.verify_tolerance, config.model.dtype, info.dtype, info.device)
        write_line(f"{endpoint.url}: log-probabilities of {size} tokens differ by {difference:.2e}, allowed {limit:g}")
        if not difference <= limit:
            problems.append(
                f"{endpoint.url}: its log-probabilities differ by {difference:.3g} from the trainer's, {limit:g} is "
                f"allowed: it serves other weights than {config.model.path}; start it from these"
            )
    if problems:
        raise UsageError("these engines cannot serve this trainer:\n" + "\n".join(problems))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--serving", "--parts"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    parts = Parts.model_validate_json(given.parts)
    config = TrainConfig.model_validate_json(parts.config.read_text(), context={"rules": ()})
    serving = ServeTrainerConfig.model_validate_json(given.serving)
    try:
        run_trainer(config, serving, parts)
    except (StopRequested, asyncio.CancelledError):
        pass
    except RltoolError as error:
        write_line(f"error: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
