"""`python -m rltool.tinker.main`: the process of `rltool serve-trainer`: trainer ranks, engines, the API. Its own
settings are JSON in argv; the run's and the keys are in files."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from rltool.config.serve_trainer import ServeTrainerConfig
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.disaggregation import samples_alone
from rltool.engines.types import EngineInfo
from rltool.errors import EngineError, RltoolError, UsageError
from rltool.processes.files import starting
from rltool.processes.keys import read_key
from rltool.processes.marks import marking
from rltool.processes.run_directory import RunDirectory
from rltool.processes.run_lock import RunLock
from rltool.processes.state import read_state, state_of_this_process
from rltool.processes.stop_run import end_left_behind
from rltool.terminal import write_line
from rltool.tinker.full_weights import full_samplers
from rltool.tinker.launch import ROLE, Parts, adapter_problem, probed
from rltool.tinker.limits import Limits
from rltool.tinker.samples import Samples
from rltool.tinker.sampling import Absent, adapter_samplers
from rltool.tinker.server import TinkerServer, read_keys, serve
from rltool.tinker.service import Service
from rltool.training.checks.preflight import EnginesAway, ProbedFleet
from rltool.training.cluster.resources import plan_resources
from rltool.training.prepare import trainer_device
from rltool.training.served import AdapterSpec, Datum, ServedTrainer, Values
from rltool.training.served_session import ServedSession, served_trainer
from rltool.training.stopping import StopRequested, StopSignal
from rltool.weights.connections import Trainer
from rltool.weights.verify.tolerances import check_tolerance

CHECK_TOKENS = 64
"""Of the text that trainer and engines score before the first call."""
CHECKED = "the base model"
SERVED = "served"
"""Directory of the run."""
AWAY_SECONDS = 1.0
"""Between two looks for engines that do not answer."""


def _log(line: str) -> None:
    with suppress(OSError):  # the log's disk is full
        write_line(line)


def run_trainer(config: TrainConfig, serving: ServeTrainerConfig, parts: Parts) -> None:
    """Until SIGTERM; raises what ended the trainer."""
    run = RunDirectory(parts.run)
    state = read_state(run, ROLE) or state_of_this_process(ROLE, argv=sys.argv)
    with StopSignal(_log).installed() as stop, RunLock(run) as lock:
        stop.consequence = "the trainer ends; what was acknowledged is on the disk"
        lock.take()
        device = trainer_device(config)
        goes_on = (parts.run / SERVED / "calls.jsonl").exists()
        engines = _engines(config, serving, stop, goes_on=goes_on) if config.engines.external else None
        others = [] if engines is None else [*engines.endpoints.engines, *engines.absent]
        resources = plan_resources(config, run, device, generates=False, engines=others)
        logs = state.log.parent if state.log is not None else None
        with marking(run, state):
            end_left_behind(run, report=_log)
            with served_trainer(config, logs, gpus=resources.gpus, while_waiting=stop.raise_if_requested) as session:
                asyncio.run(_serve(session, config, serving, parts, engines))


def _engines(
    config: TrainConfig, serving: ServeTrainerConfig, stop: StopSignal, *, goes_on: bool
) -> ProbedFleet:  # fmt: skip
    """Those that may have died with this server, and are started again too, are waited for. goes_on: it served before,
    so one of them is enough, and the others join later."""
    ends, said = time.monotonic() + serving.ready_timeout, False
    while True:
        try:
            return probed(config, needed=1 if goes_on else None)
        except EnginesAway as error:
            if time.monotonic() > ends:
                raise
            if not said:
                _log(f"waiting until {'one of the' if goes_on else 'all'} engines serve: {error}")
            said = True
        stop.raise_if_requested()
        time.sleep(AWAY_SECONDS)


async def _serve(
    session: ServedSession, config: TrainConfig, serving: ServeTrainerConfig, parts: Parts,
    fleet: ProbedFleet | None,
) -> None:  # fmt: skip
    trainer, vocab_size, run = session.trainer, session.vocab_size, RunDirectory(parts.run)
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None, "asyncio.run made it"
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    deadlines = config.deadlines
    limits = Limits(
        in_flight=serving.max_in_flight, samples=serving.max_samples, queued_bytes=serving.max_queued_bytes,
        models=serving.max_models, checkpoints=serving.max_checkpoints, body_bytes=serving.max_body_bytes,
        rank=serving.lora_rank, session_timeout=serving.session_timeout,
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(EngineClient(run=run.run_id))
        base = None
        if fleet is not None and serving.lora_rank:
            base = await BaseCheck.of(trainer, config, client, fleet.infos.values(), vocab_size)
            await base.check(fleet)
        with starting("the server", parts.run / SERVED):
            service = await asyncio.to_thread(
                Service, parts.run / SERVED, trainer, parts.served_name, limits=limits,
                snapshot_every=serving.snapshot_every, shared=serving.checkpoints,
            )  # fmt: skip
        samples = None
        if fleet is not None and base is not None:
            there = {endpoint: fleet.infos[endpoint.url] for endpoint in fleet.endpoints.engines}
            absent = Absent(tuple(fleet.absent), partial(_joining_problem, serving.lora_rank, fleet, base))
            samplers = adapter_samplers(
                there, absent, client, deadline=deadlines.generate, load_deadline=deadlines.sync, log=_log
            )
        elif fleet is not None:
            directory = config.weights.disk_dir / run.run_id if config.weights.disk_dir else run.path / "weights"
            sender = Trainer(session.ranks.handles(), session.ranks.device, directory, vocab_size)
            samplers = full_samplers(
                fleet, client, config, sender=sender, trainer=trainer, service=service, run=run, log=_log
            )
        else:
            samplers = None
        if samplers is not None:
            samples = Samples(
                await stack.enter_async_context(samplers), vocab_size=vocab_size, most=limits.samples,
                queued=service.queued, ended=service.history.sampled,
            )  # fmt: skip
            stack.push_async_callback(samples.close)
        watched_by = run.name, read_key(run.ensure_key(), f"run {run.name}")
        server = TinkerServer(service, read_keys(parts.keys), samples=samples, watched_by=watched_by)
        _log(f"serving on {serving.host}:{serving.port}")
        await serve(server, service, serving.host, serving.port)


def checked_tokens(micro_batch_tokens: int, engines: Iterable[EngineInfo]) -> int:
    """How many log-probabilities are compared at the start. Scores of n take n + 1 tokens and room for another."""
    room = [info.max_model_len - 2 for info in engines if info.max_model_len is not None]
    return min([CHECK_TOKENS, micro_batch_tokens - 1, *room])


@dataclass(frozen=True)
class BaseCheck:
    """Whether an engine gives the trainer's log-probabilities of some tokens: else it serves another model."""

    config: TrainConfig
    client: EngineClient
    tokens: tuple[int, ...]
    expected: Values

    @classmethod
    async def of(
        cls, trainer: ServedTrainer, config: TrainConfig, client: EngineClient, infos: Iterable[EngineInfo],
        vocab_size: int,
    ) -> BaseCheck:  # fmt: skip
        size = checked_tokens(config.trainer.micro_batch_tokens, infos)
        tokens = np.random.default_rng(0).integers(0, vocab_size, size + 1)

        def ours() -> Values:
            trainer.create(CHECKED, AdapterSpec(1), 0)
            datum = Datum(tokens[:-1], tokens[1:], {"weights": np.ones(size, np.float32)})
            [found] = trainer.forward(CHECKED, [datum], "cross_entropy", {}, backward=False).logprobs
            trainer.drop(CHECKED)
            return found

        expected = await asyncio.to_thread(ours)
        return cls(config, client, tuple(tokens.tolist()), expected)

    async def problem(self, endpoint: EngineEndpoint, info: EngineInfo) -> str | None:
        """None: there is none. EngineError."""
        config, size = self.config, len(self.expected)
        scores = await self.client.score(endpoint, self.tokens, timeout=config.deadlines.sync)
        difference = float(np.abs(np.array(scores) - self.expected).mean())
        limit = check_tolerance(config.weights.verify_tolerance, config.model.dtype, info.dtype, info.device)
        _log(f"{endpoint.url}: log-probabilities of {size} tokens differ by {difference:.2e}, allowed {limit:g}")
        if difference <= limit:
            return None
        return (
            f"its log-probabilities differ by {difference:.3g} from the trainer's, {limit:g} is allowed: it serves "
            f"other weights than {config.model.path}; start it from these"
        )

    async def check(self, fleet: ProbedFleet) -> None:
        """UsageError with what is wrong at any."""
        problems: list[str] = []
        for endpoint in fleet.endpoints.engines:
            try:
                problem = await self.problem(endpoint, fleet.infos[endpoint.url])
            except EngineError as error:
                problem = str(error)
            if problem is not None:
                problems.append(f"{endpoint.url}: {problem}")
        if problems:
            raise UsageError("these engines cannot serve this trainer:\n" + "\n".join(problems))


async def _joining_problem(
    rank: int, fleet: ProbedFleet, base: BaseCheck, endpoint: EngineEndpoint, info: EngineInfo
) -> str | None:  # fmt: skip
    """Why an engine cannot join those of `fleet`; None: it can. EngineError."""
    if not samples_alone(endpoint.probed(info)):
        return "prefill and decode engines of SGLang do not sample alone"
    for name in ("max_model_len", "lora_slots"):  # as requests are checked, and adapters placed, by now
        there = [value for each in fleet.infos.values() if (value := getattr(each, name)) is not None]
        own = getattr(info, name)
        if own is not None and there and own < min(there):
            return f"its {name} is {own}, less than that of the other engines, {min(there)}"
    return adapter_problem(info, rank) or await base.problem(endpoint, info)


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
        _log(f"error: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
