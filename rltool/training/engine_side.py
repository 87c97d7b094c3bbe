"""The driver's handle to the rollout manager: rollouts, evaluation, and the pushes of weights with their value check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from rltool.config.train import TrainConfig
from rltool.engines.dialect import Medium
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.types import Bucket
from rltool.engines.weight_version import WeightVersion
from rltool.rollout.manager import RolloutResult
from rltool.training.actors import RolloutActor
from rltool.training.preflight import ProbedFleet
from rltool.training.trainer_group import RayFuture, TrainerGroup, get_all
from rltool.weights.control import Failures
from rltool.weights.sender import Connection
from rltool.weights.sync import WeightSync, WeightSyncFailed
from rltool.weights.verify import check_values, probe_batch, probe_request


class EngineSide:
    """What the loop sees of engines, router and rollout manager."""

    def __init__(
        self, config: TrainConfig, fleet: ProbedFleet, targets: Sequence[EngineEndpoint], trainer: TrainerGroup, medium: Medium, *,
        version: WeightVersion, vocab_size: int, disk_root: Path, log_file: Path | None, console: Console,
    ) -> None:  # fmt: skip
        self.config = config
        self.trainer = trainer
        self.console = console
        self._version = version
        self._vocab_size = vocab_size
        self._max_model_len = min((i.max_model_len for i in fleet.infos.values() if i.max_model_len), default=None)
        # No GPU and no CPU: the manager waits for sockets. It lives outside the placement group.
        self.actor = RolloutActor.options(num_cpus=0).remote(config, tuple(targets), fleet.endpoints.engines, fleet.infos, vocab_size, log_file)
        self.sync = WeightSync(
            ActorControl(self.actor), trainer, medium=medium, limit_bytes=config.weights.bucket_bytes, timeout=config.deadlines.sync_step, disk_root=disk_root
        )
        self._started = False

    @property
    def weight_version(self) -> str:
        return str(self._version)

    def start(self) -> None:
        """Read the data, and free the engines from what a trainer that died may have left there."""
        facts = get_all([self.actor.data_facts.remote()])[0]
        left_out = f" ({facts['prompts_too_long']} longer than sampling.max_prompt_tokens were left out)" if facts["prompts_too_long"] else ""
        self.console.print(f"data: {facts['prompts']} prompts{left_out}", highlight=False)
        failures = get_all([self.actor.clear_leftovers.remote()], 2 * self.config.deadlines.sync_step)[0]
        if failures:
            raise WeightSyncFailed("preflight: " + "; ".join(f"{url}: {reason}" for url, reason in failures.items()))
        self._started = True

    def push_weights(self) -> dict[str, float]:
        """One sync under the next version; values are compared after the first, and whenever the transfer group is new."""
        version = self._version.next()
        report = self.sync.sync(str(version))
        self._version = version
        metrics = {"weights/sync_seconds": report.seconds, "weights/sync_bytes": float(report.bytes), "time/sync_seconds": report.seconds}
        metrics.update({f"weights/{phase}_seconds": seconds for phase, seconds in report.phases.items()})
        if report.rebuilt:
            gap = self._check_values()
            self.console.print(f"{report.line()}; engines agree with the trainer within {gap:.1e}", highlight=False, soft_wrap=True)
        return metrics

    def _check_values(self) -> float:
        # Under supervised training the trainer's logits are not tempered, so the engines' must not be either.
        temperature = self.config.algorithm.logits_temperature(self.config.sampling.temperature)
        request = probe_request(self._vocab_size, temperature, self._max_model_len)
        completions = get_all([self.actor.sample_each.remote(request)], 2 * self.config.deadlines.sync_step)[0]
        batch = probe_batch(request, list(completions.values()))
        logprobs = self.trainer.logprobs(batch)
        return check_values(list(completions), batch, logprobs, self.config.weights.verify_tolerance).abs_mean

    def generate(self, step: int) -> RolloutResult:
        return get_all([self.actor.generate.remote(step)])[0]

    def evaluate(self) -> dict[str, float]:
        return get_all([self.actor.evaluate.remote()])[0]

    def state_dict(self) -> dict[str, Any]:
        return get_all([self.actor.state_dict.remote()])[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        get_all([self.actor.load_state_dict.remote(state)])

    def close(self) -> None:
        """Leave the engines serving: resumed, and out of their transfer groups. What fails here is reported, not raised."""
        if self._started:
            timeout = self.config.deadlines.sync_step
            failures: Failures = get_all([self.actor.release.remote()], timeout)[0]
            failures.update(get_all([self.actor.disconnect.remote()], timeout)[0])
            for url, reason in failures.items():
                self.console.print(f"[yellow]leaving {url}: {reason}[/yellow]", highlight=False)
            self.trainer.leave_transfer()
        get_all([self.actor.close.remote()])


class ActorControl:
    """weights.sync.ControlHandle over the rollout manager's actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def targets(self) -> RayFuture:
        return RayFuture([self._actor.targets.remote()])

    def epoch(self) -> RayFuture:
        return RayFuture([self._actor.epoch.remote()])

    def connect(self, connections: Sequence[Connection], medium: Medium) -> RayFuture:
        return RayFuture([self._actor.connect.remote(connections, medium)])

    def prepare(self) -> RayFuture:
        return RayFuture([self._actor.prepare.remote()])

    def receive(self, version: str, buckets: Sequence[Bucket], medium: Medium, paths: Sequence[Path]) -> RayFuture:
        return RayFuture([self._actor.receive.remote(version, buckets, medium, paths)])

    def finish(self, version: str, failed: Failures) -> RayFuture:
        return RayFuture([self._actor.finish.remote(version, failed)])

    def release(self) -> RayFuture:
        return RayFuture([self._actor.release.remote()])
