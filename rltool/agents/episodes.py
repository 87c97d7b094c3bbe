"""Episodes of agents: a session is opened, the agent is run, and what the session has recorded becomes samples."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rltool.agents.outcome import AgentFailed
from rltool.agents.pool import Agents
from rltool.agents.recorded import DEFAULT, Counted, Rules, count_turns, samples_of
from rltool.agents.sessions import GatewayClient, OpenSession
from rltool.agents.task import AgentTask, row_of
from rltool.errors import EngineError
from rltool.processes.tasks import all_of
from rltool.rollout.generate import GenerateContext
from rltool.rollout.sample import Sample, SampleStatus

ABANDON_SECONDS = 5.0
"""To end the session of an agent that was cancelled. One that cannot be ended times out at the gateway."""


@dataclass(frozen=True)
class AgentLimits:
    """at_once: episodes that run side by side; seconds: for one attempt of one of them; retries: further attempts of an
    episode that failed, each in a session of its own; max_tokens: of a trajectory; rules: what of it is trained."""

    at_once: int
    seconds: float
    retries: int
    max_tokens: int
    rules: Rules = DEFAULT


class AgentEpisodes:
    """A generate function (rollout/generate.py). A sample of its group is replaced by the samples of its episode.

    refusal(version): why tokens of these weights are not trained on, or None.
    """

    def __init__(
        self, agents: Agents, gateway: Callable[[], GatewayClient], limits: AgentLimits,
        refusal: Callable[[str], str | None] = lambda _: None,
    ) -> None:  # fmt: skip
        """gateway: asked for each episode; it may not have started when this is made."""
        self._agents, self._gateway, self._limits, self._refusal = agents, gateway, limits, refusal
        self._slots = asyncio.Semaphore(limits.at_once)
        self.counts: Counter[str] = Counter()
        """Since the start: agent_episodes, agent_retries, agent_failures, agent_branches; agent_turns that are trained
        in agent_rows of agent_tokens, of which agent_repeated_tokens are in another row too; and
        agent_left_out_REASON_tokens."""

    async def __call__(self, group: list[Sample], context: GenerateContext) -> None:
        begun = [sample for sample in group if sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED)]
        ended = await all_of(self._episode(sample, context) for sample in begun)
        found = {id(sample): samples for sample, samples in zip(begun, ended, strict=True)}
        group[:] = [made for sample in group for made in found.get(id(sample), [sample])]

    async def _episode(self, sample: Sample, context: GenerateContext) -> list[Sample]:
        sample.clear()
        failure = ""
        async with self._slots:
            for attempt in range(1 + self._limits.retries):
                self.counts.update(agent_retries=int(attempt > 0), agent_episodes=1)
                try:
                    return await self._attempt(sample, context)
                except (AgentFailed, EngineError) as error:
                    failure = str(error)
        self.counts["agent_failures"] += 1
        sample.fail(f"agent: {failure}")
        return [sample]

    async def _attempt(self, sample: Sample, context: GenerateContext) -> list[Sample]:
        gateway = self._gateway()
        session = await gateway.open({"group": sample.group_id, "index": sample.index, "row": sample.prompt_index})
        try:
            result = await self._agents.run(self._task(session, sample, context))
        except BaseException:
            await self._abandon(gateway, session)
            raise
        record = await gateway.end(session.id)
        counted = count_turns(record, result, self._limits.rules)
        samples = samples_of(record, sample, result=result, max_tokens=self._limits.max_tokens, counted=counted)
        if not samples:
            left_out = ", ".join(f"{tokens} {why}" for why, tokens in sorted(counted.left_out.items()))
            raise AgentFailed(
                f"none of its turns counts: tokens left out are {left_out}" if left_out
                else "it ended without asking the model for anything"
            )
        self._judge(samples)
        self._count(counted)
        return samples

    def _task(self, session: OpenSession, sample: Sample, context: GenerateContext) -> AgentTask:
        return AgentTask(
            base_url=session.openai_base_url,
            anthropic_base_url=session.anthropic_base_url,
            api_key=session.key,
            model=session.model,
            row=row_of(sample, context.prompt),
            deadline=self._limits.seconds,
            seed=sample.seed or 0,
        )

    def _count(self, counted: Counted) -> None:
        self.counts.update(
            agent_branches=len(counted.rows) - 1,
            agent_rows=len(counted.rows),
            agent_turns=sum(map(len, counted.rows.values())),
            agent_tokens=counted.tokens(),
            agent_repeated_tokens=counted.repeated,
        )
        self.counts.update({f"agent_left_out_{why}_tokens": tokens for why, tokens in counted.left_out.items()})

    def _judge(self, samples: list[Sample]) -> None:
        versions = {span.version for sample in samples for span in sample.versions}
        refused = {version: reason for version in sorted(versions) if (reason := self._refusal(version)) is not None}
        for version, reason in refused.items():
            raise AgentFailed(f"tokens of its session were sampled by weights {version!r}, which are {reason}")

    async def _abandon(self, gateway: GatewayClient, session: OpenSession) -> None:
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(ABANDON_SECONDS):
                await gateway.end(session.id)
