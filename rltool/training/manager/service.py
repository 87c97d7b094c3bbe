"""The rollout side of a run in one asyncio object: fleet, HTTP client, router membership, data, rewards, collector,
weight sync.

It is the one owner of all of these. Plain asyncio: the Ray actor around it (rollout_actor.py) adds a process, `debug
rollout-only` runs it as it is. Nothing here blocks the event loop: reading data, decoding and building batches run in
threads, plain reward functions in processes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rltool.agents.gateway_process import GatewayPlace
from rltool.algorithms.batch import Put
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.engine_set import EngineSet
from rltool.engines.fleet.fleet import Fleet, State
from rltool.engines.fleet.state import gpus_of
from rltool.engines.run_client import ComparedEngine, ComparedWeights, EngineStatus
from rltool.engines.weight_version import Lineage
from rltool.errors import RltoolError, UnknownEngine, UsageError
from rltool.processes.restarts import RestartBudget, RestartPolicy
from rltool.processes.tasks import Background, beside
from rltool.rollout.admission import AdmissionPolicy
from rltool.rollout.collector import Collected, CollectionInterrupted, Collector, CollectorConfig
from rltool.rollout.generate import open_http
from rltool.rollout.measure.evaluation import Evaluated
from rltool.rollout.measure.own_metrics import OwnMetrics
from rltool.rollout.own_batch import ChangedBatch, SampleJudge, changed_batch, load_batch_hook
from rltool.rollout.own_rollout import OwnCollector, load_rollout
from rltool.rollout.sample import Sample
from rltool.rollout.serving.concurrency import LOAD_SECONDS, ConcurrencyController, ConcurrencyPolicy, adapt_concurrency
from rltool.rollout.serving.guard import GenerationLost
from rltool.rollout.serving.lease import EngineLeases
from rltool.rollout.serving.model_clients import Models
from rltool.rollout.serving.rates import EngineRates
from rltool.rollout.serving.restarts import EngineRestarts
from rltool.rollout.serving.side_model import SideModels
from rltool.rollout.serving.versions import VersionBook
from rltool.rollout.snapshot import SourceState, books, encoded, kept_samples, restore
from rltool.training.manager.batch import Rollout, to_rollout
from rltool.training.manager.colocation import Colocation, Members
from rltool.training.manager.evaluation_engines import EvaluationEngines
from rltool.training.manager.generation import Generation
from rltool.training.manager.inputs import EvalSets, load_inputs
from rltool.training.manager.policy_engines import EngineHooks, PolicyEngines
from rltool.training.manager.rollout_engines import Engines, Syncing
from rltool.training.manager.work import Planes, PolicyModel, RolloutWork
from rltool.weights.connections import Trainer
from rltool.weights.sync_report import SyncReport

GUARD_SECONDS = 1.0
"""How often it is looked whether enough engines are left."""


class RolloutService:
    """`start` first, `close` last. syncing None: the engines' weights are not ours, and their versions are not
    judged."""

    def __init__(
        self, config: TrainConfig, engines: Engines, *, syncing: Syncing | None = None, fleet: Fleet | None = None,
        log: Callable[[str], None] = print, on_event: Callable[[], None] = lambda: None,
        gateway: GatewayPlace | None = None,
    ) -> None:  # fmt: skip
        """fleet: one without members, for other thresholds or another clock. on_event: called after every change of a
        group. gateway: where that of a run with agents keeps its files."""
        self._config, self._engines, self._syncing = config, engines, syncing
        self._vocab_size = syncing.vocab_size if syncing else None
        self.fleet = fleet or Fleet(labelled=syncing is None or not syncing.lineage.adapters)
        self._log, self._clock, self._on_event = log, self.fleet.clock, on_event
        self._book = VersionBook(syncing.lineage) if syncing else VersionBook(Lineage("0" * 32, 0), published=0)
        self._step = 0
        self._models = Models(patience=config.deadlines.engines)
        self._gateway_place = gateway
        self._side = SideModels(engines.models, self._models)
        self._restarts: EngineRestarts | None = None
        self._colocation: Colocation | None = None
        self._background = Background(lambda failure: self._report(str(failure)))
        self._evaluations: set[asyncio.Task[Any]] = set()
        self._events: list[str] = []
        self._stopping = self._closed = False
        self._all_leases: list[EngineLeases] = []
        self._lost: GenerationLost | None = None

    # -- life

    async def start(self) -> str:
        """Read all data, import what the configuration names, open connections. Returns one line on the data.

        UsageError for what is wrong there.
        """
        config = self._config
        summary = await asyncio.to_thread(self._load)
        lease = self._syncing.lease if self._syncing else None
        self._client = await EngineClient(run=lease.holder.run if lease else None).__aenter__()
        self._http = open_http(config.deadlines)
        self._restarts = self._engine_restarts()
        hooks = EngineHooks(
            restart=self._restarts.restart if self._restarts else None, end=self._end_engine,
            router_refused=lambda error: self.collector.fail(error), is_stopping=lambda: self._stopping,
        )  # fmt: skip
        vocab_size = self._vocab_size or self.tokenizer.vocab_size
        syncing, trainer = self._syncing, None
        if syncing is not None:
            trainer = Trainer(syncing.ranks, syncing.trainer_device, syncing.directory, vocab_size)
        self._policy = PolicyEngines(
            config, self._engines, EngineSet(self.fleet, self._client, self._report), self._book, trainer=trainer,
            lease=lease, hooks=hooks,
        )  # fmt: skip
        self._leases, self._plane, self._monitor = self._policy.leases, self._policy.plane, self._policy.monitor
        self._weights, self._membership = self._policy.weights, self._policy.membership
        self._held = self._evaluation_engines(trainer, hooks)
        policy = PolicyModel(self.tokenizer, vocab_size, require_versions=syncing is not None)
        self._work = RolloutWork(
            config, Planes(self._plane, self._held.plane if self._held else None), self._scorer, policy,
            self._generation.function, models=self._models, http=self._http,
        )  # fmt: skip
        self._evals = EvalSets(config, self._eval_sets, self._scorer, self.tokenizer.decode, self._models)
        self.collector = self._collector()
        self._rates = EngineRates(self._client)
        await self._side.start(
            self._client, requests_per_engine=config.rollout.requests_per_engine, deadline=config.deadlines.generate,
            restarts=self._restarts, log=self._report,
        )  # fmt: skip
        if self._restarts is not None:
            self._restarts.watch(self.fleet, self._monitor)
            self._restarts.start()
            self._colocation = self._colocation_of(trainer, self._restarts)
        self._all_leases.append(self._leases)
        await self._policy.start()
        if self._held is not None:
            self._all_leases.append(self._held.leases)
            await self._held.start()
        await self._generation.start(self.fleet, self._engines.router, self._book if self._syncing else None)
        self._background.repeat(self._guard_engines, "engine guard", seconds=GUARD_SECONDS)
        if config.rollout.adaptive_concurrency:
            adapt = partial(
                adapt_concurrency, self._policy.engines, self._plane,
                ConcurrencyController(ConcurrencyPolicy(start=config.rollout.requests_per_engine), clock=self._clock),
            )  # fmt: skip
            self._background.repeat(adapt, "adaptive concurrency", seconds=LOAD_SECONDS)
        return summary

    def driver_is_there(self) -> None:
        """Said every few seconds by a driver that is another process: see EngineLeases.heard_of_driver."""
        for leases in self._all_leases:
            leases.heard_of_driver()

    def _load(self) -> str:
        inputs = load_inputs(self._config, self._models, trains=self._syncing is not None)
        self.tokenizer = inputs.tokenizer
        self._prompts, self._eval_sets = inputs.prompts, inputs.eval_sets
        self._rewards, self._scorer = inputs.rewards, inputs.scorer
        self._own_metrics = OwnMetrics(self._config.monitor, log=self._report) if self._config.monitor.metrics else None
        self._own_rollout = load_rollout(self._config.rollout)
        self._batch_hook = load_batch_hook(self._config.rollout)
        refusal = self._book.refusal if self._syncing else None
        self._judge = SampleJudge(self._vocab_size, AdmissionPolicy.of(self._config), refusal)
        self._generation = Generation(
            self._config, self._gateway_place, log=self._report,
            refusal=self._book.refusal if self._syncing else lambda _: None,
        )  # fmt: skip
        return inputs.summary

    def _collector(self) -> Collector:
        config, rollout = self._config, self._config.rollout
        own = self._own_rollout
        collector = Collector if own is None else partial(OwnCollector, own, self._judge)
        return collector(
            self._prompts, AdmissionPolicy.of(config), self._work, self._book,
            CollectorConfig(
                samples_per_prompt=rollout.samples_per_prompt, run_seed=config.seed,
                group_deadline=config.deadlines.group, batch_deadline=config.deadlines.step,
                max_filtered=rollout.max_filtered_batches * rollout.prompts_per_step,
                max_failed=max(1, int(rollout.max_failed_fraction * rollout.prompts_per_step)),
                judges_age=self._syncing is not None,
            ),
            on_event=self._on_event, clock=self._clock,
        )  # fmt: skip

    def _engine_restarts(self) -> EngineRestarts | None:
        processes, engines = self._engines.processes, self._config.engines
        if processes is None:
            return None
        policy = RestartPolicy(engines.max_restarts, engines.restart_backoff)
        return EngineRestarts(processes, RestartBudget(policy, clock=self._clock), log=self._report)

    def _evaluation_engines(self, trainer: Trainer | None, hooks: EngineHooks) -> EvaluationEngines | None:
        found, syncing = self._engines.evaluation, self._syncing
        if found is None or syncing is None or trainer is None:
            return None
        fleet = Fleet(self.fleet.policy, clock=self._clock)
        engines = EngineSet(fleet, self._client, log=lambda line: self._report(f"evaluation: {line}"))
        return EvaluationEngines(
            self._config, found, engines, VersionBook(syncing.lineage), trainer=trainer, lease=syncing.lease,
            hooks=replace(hooks, restart=None),
        )  # fmt: skip

    def _colocation_of(self, trainer: Trainer | None, restarts: EngineRestarts) -> Colocation | None:
        config = self._config
        if not config.engines.shares_gpus or trainer is None:
            return None
        kept = config.weights.lora_sync == "adapter"
        policy = Members(self._policy.engines, self._monitor, takes_weights=True, keeps_weights=kept)
        others = [Members(m.engines, m.monitor, False, m.from_disk) for m in self._side.started]
        return Colocation(
            trainer, policy, others, restarts, step_seconds=config.deadlines.sync,
            start_seconds=max(group.ready_timeout for group in config.engines.groups),
        )  # fmt: skip

    async def _end_engine(self, url: str, why: str) -> None:
        assert self._colocation is not None, "syncs begin after colocation is set up"
        await self._colocation.end(url, why)

    async def close(self) -> list[str]:
        """End every task, leave the engines serving: aborted, resumed, out of their transfer groups. Returns what
        failed."""
        failures: dict[str, str] = {}
        if self._closed:
            return []
        self._closed = True
        try:
            if hasattr(self, "_membership"):
                await self._membership.close()
            if hasattr(self, "_client"):
                await self.interrupt()
                await self._background.close()
                if self._restarts is not None:
                    await self._restarts.close()
                if self._held is not None:
                    failures |= await self._held.leave()
                if self._weights is not None:
                    failures |= await self._weights.leave()
        finally:  # a rank that died cannot leave
            if hasattr(self, "_client"):
                await self._policy.close()
                if self._held is not None:
                    await self._held.close()
                await self._side.close()
                await self._http.close()
                await self._client.__aexit__(None, None, None)
            if hasattr(self, "_generation"):
                await self._generation.close()
            if hasattr(self, "_evals"):
                await self._evals.close()
            if hasattr(self, "_rewards"):
                await self._rewards.close()
        return [f"{url}: {reason}" for url, reason in failures.items()]

    async def interrupt(self) -> None:
        """Whatever waits for samples ends now: requests are aborted at the engines, `next_batch` raises
        CollectionInterrupted."""
        self._stopping = True
        for task in self._evaluations:
            task.cancel()
        planes = [self._plane, *([self._held.plane] if self._held is not None else [])]
        async with beside(*(plane.abort() for plane in planes)) as aborting:
            await self.collector.interrupt()
            for url, reason in (item for failures in await asyncio.gather(*aborting) for item in failures.items()):
                self._report(f"aborting requests at {url}: {reason}")

    # -- the driver's calls

    async def next_batch(self, step: int, put: Put | None = None) -> Rollout:
        """The batch of training step `step`, all of it within the staleness bound. A long poll.

        While it waits the ranks are idle, so engines that are STALE are synced meanwhile, at the present version; it
        returns only when no such sync runs. put: takes the values of wide fields; None: they are in the batch.
        """
        self._step = step
        if self._syncing is None:
            self._book.publish(step)  # no syncs: what the engines hold is taken for the present weights
        async with self._weights.stale_engines_meanwhile() if self._weights else nullcontext():
            collected = await self._leases.unless_taken(self.collector.next(step))
        return await self._to_rollout(collected, step, put)

    async def sync_weights(self, step: int) -> SyncReport:
        """Bring the engines to the weights after `step` training steps."""
        assert self._weights is not None
        offload = await self._colocation.to_engines() if self._colocation is not None else 0.0
        report = await self._weights.update(step)
        wake = await self._colocation.wake_others() if self._colocation is not None else 0.0
        self.collector.weights_published()
        return replace(report, offload=report.offload + offload, wake=report.wake + wake)

    async def free_gpus(self) -> float:
        """Colocated engines sleep, and the trainer's ranks have their memory again: the seconds of the latter are
        returned. The next sync turns that round."""
        assert self._colocation is not None, "engines with GPUs of their own keep them"
        return await self._colocation.to_trainer()

    async def hold_evaluation_engines(self, step: int) -> SyncReport:
        """Engines for evaluation alone get the weights after `step` training steps, and hold them through the
        evaluation that follows."""
        assert self._held is not None
        return await self._held.hold(step)

    async def evaluate(self) -> Evaluated:
        """Every evaluation set, with the same seeds each time."""
        leases = self._held.leases if self._held is not None else self._leases
        task = self._background.start(self._work.evaluate(self._evals.sets), "evaluate", awaited=True)
        self._evaluations.add(task)
        try:
            async with asyncio.timeout(self._config.deadlines.step):
                return await leases.unless_taken(task)
        except TimeoutError as error:
            raise RltoolError(
                f"the evaluation did not end within deadlines.step = {self._config.deadlines.step:g} s"
            ) from error
        except asyncio.CancelledError:
            if self._lost is not None:
                raise self._lost from None
            raise CollectionInterrupted("the evaluation was interrupted: the run is stopping") from None
        finally:
            self._evaluations.discard(task)

    async def state_dict(self, done: int) -> SourceState:
        """What a checkpoint after `done` training steps keeps."""
        state, samples = books(self.collector, done, keeps_partial=self._work.keeps_partial_groups())
        return await asyncio.to_thread(encoded, state, samples, run_seed=self._config.seed)

    async def load_state_dict(self, state: dict[str, Any], directory: Path | None) -> None:
        """The inverse; directory: the checkpoint that holds the samples' files."""
        restore(self.collector, state, await asyncio.to_thread(kept_samples, directory))
        self._step = state["done"]

    async def status(self) -> dict[str, Any]:
        """For people: step, weights, engines, groups."""
        published = self._book.published if self._syncing else None
        return {
            "step": self._step,
            "weight_version": str(self._book.lineage.version(published)) if published is not None else None,
            "engines": self._membership.rows(),
            "evaluation_engines": self._held.rows() if self._held else [],
            "groups": self.collector.ledger.counts(),
            "requests_in_flight": self._plane.in_flight,
            "router": self._engines.router.url if self._engines.router else None,
        }

    async def add_engine(self, endpoint: EngineEndpoint) -> EngineStatus:
        """An engine joins the fleet: probed now, synced when the ranks are idle next, then it serves."""
        return await self._membership.add(endpoint)

    async def remove_engine(self, url: str) -> EngineStatus:
        """An engine leaves: it gets nothing new, finishes what it has, and is gone."""
        return await self._membership.remove(url)

    async def compare_weights(self, urls: Sequence[str]) -> ComparedWeights:
        """Do these engines (none: all that take weights) hold what the trainer holds? Waits until it is idle."""
        updates, members = self._weights, {m.url for m in self.fleet.members() if m.takes_weights}
        if updates is None:
            raise UsageError("this run sends no weights, so there are none to compare with")
        unknown = [url for url in urls if url not in members]
        if unknown:
            raise UnknownEngine(f"{unknown[0]} is no engine of this run that takes weights")
        verdicts = await updates.compare(urls or sorted(members))
        if not verdicts:
            raise RltoolError("the run has no engine now that takes weights, so nothing was compared")
        rows = [ComparedEngine(url=url, equal=one.equal, lines=one.lines) for url, one in verdicts.items()]
        return ComparedWeights(weight_version=(await self.status())["weight_version"], engines=rows)

    def present_engines(self) -> tuple[EngineEndpoint, ...]:
        """Those that a run which resumes would begin with."""
        return self._membership.present()

    def all_engines(self) -> tuple[EngineEndpoint, ...]:
        """Of the policy as they are now, of evaluations, and of the other models."""
        evaluating = self._held.present() if self._held is not None else ()
        others = (member.endpoint for model in self._side.started for member in model.fleet.members())
        return (*self.present_engines(), *evaluating, *others)

    def take_events(self) -> list[str]:
        """Lines for the console since the last call: transitions of engines, failures of syncs."""
        taken, self._events = self._events, []
        return taken

    # -- the rest is private

    def _report(self, line: str) -> None:
        self._events.append(line)
        self._log(line)

    async def _guard_engines(self) -> None:
        """Ends the waits of a run that has had too few engines, or no router, for too long."""
        if self._lost is not None:
            return
        try:
            self._policy.guard.check()
            if self._held is not None and self._evaluations:
                self._held.check()
        except GenerationLost as error:
            self._lost = error
            self.collector.fail(error)
            for task in self._evaluations:
                task.cancel()

    def _change(self, step: int) -> Callable[[list[Sample]], ChangedBatch] | None:
        hook, judge = self._batch_hook, self._judge
        return None if hook is None else lambda samples: changed_batch(hook, samples, judge, step)

    async def _to_rollout(self, collected: Collected, step: int, put: Put | None) -> Rollout:
        serving, stats = self.fleet.members(State.READY), self._scorer.take_stats()
        gpus = gpus_of(serving)
        if stats.failed:  # the batch is whole all the same: others have taken their places
            lost = collected.dropped["reward_failed"]
            self._report(f"step {step}: {stats.describe()}; {lost} groups were lost whole and replaced by others")
        rollout, rates = await asyncio.gather(
            to_rollout(
                self._config, collected, stats, step, self.tokenizer, gpus, trains=self._syncing is not None,
                change=self._change(step), put=put,
            ),
            self._rates.since_last(serving),
        )
        if self._own_metrics is not None:
            samples = [sample for group in collected.groups for sample in group.samples]
            rollout.metrics.update(await asyncio.to_thread(self._own_metrics.of, samples))
        counts = self.collector.ledger.counts()
        restarts = self._restarts.counts if self._restarts is not None else {}
        rollout.metrics.update(
            {
                **rates,
                "rollout/epoch": float(self.collector.source.epoch),
                "rollout/prompts_too_long_total": float(self.collector.source.num_too_long),
                "rollout/engines_serving": float(len(self.fleet.serving())),
                "rollout/requests_in_flight": float(self._plane.in_flight),
                "rollout/event_loop_lag_max": self._monitor.lag.worst_since(self._clock() - collected.interval),
                **{f"rollout/groups_{name}": float(counts[name]) for name in ("running", "partial", "ready")},
                "rollout/groups_dropped_total": float(counts["dropped"]),
                **{f"rollout/{name}_total": float(count) for name, count in self._plane.counts.items()},
                **{f"engines/{name}_total": float(count) for name, count in self._monitor.counts.items()},
                **{f"engines/{name}_total": float(count) for name, count in restarts.items()},
                **self._generation.metrics(),
            }
        )
        return rollout
