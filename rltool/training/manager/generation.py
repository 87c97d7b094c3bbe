"""How a run's samples come about: the built-in generation, a function, episodes with an environment, or agents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rltool.agents.episodes import AgentEpisodes, AgentLimits
from rltool.agents.gateway_process import GatewayPlace, GatewayProcess
from rltool.agents.pool import Agents, load_agents
from rltool.agents.recorded import Rules
from rltool.agents.remote import RemoteAgents
from rltool.agents.sessions import GatewayClient
from rltool.config.gateway import GatewayConfig
from rltool.config.import_path import load_callable
from rltool.config.own_functions import named as named_function
from rltool.config.rollout import RolloutConfig
from rltool.config.train import TrainConfig
from rltool.engines.client import EngineClient, RetryPolicy
from rltool.engines.endpoints import EngineEndpoint
from rltool.engines.fleet.fleet import Fleet
from rltool.engines.types import EngineInfo
from rltool.environments.loading import load_episodes
from rltool.errors import RltoolError, UsageError
from rltool.gateway.fleet import FleetView
from rltool.gateway.parts import Parts
from rltool.processes.keys import make_key, read_key
from rltool.rollout.generate import GenerateFunction, load_generate
from rltool.rollout.serving.versions import VersionBook
from rltool.training.checks.modalities import shown_pictures

PATIENCE = RetryPolicy(attempts=1000, longest_delay=2.0)
"""For a gateway that is being started again; GATEWAY_SECONDS end it."""
GATEWAY_SECONDS = 60.0
"""For a session to be opened or ended, a restart of the gateway in between included."""

BODY_WITH_PICTURES = 32 * 1024 * 1024
"""Bytes of a request: agents send all of a conversation's pictures with each turn."""


COUNTS = (
    *("agent_episodes", "agent_retries", "agent_failures", "agent_branches", "agent_rows", "agent_turns"),
    *("agent_tokens", "agent_repeated_tokens"),
    *(f"agent_left_out_{why}_tokens" for why in ("unreceived", "discarded", "asked", "selection")),
)


def _rules(config: RolloutConfig) -> Rules:
    named = config.trajectory_selection
    if named in ("all", "longest", "last", "rewarded"):
        return Rules(named, config.train_discarded)
    function = load_callable(named, setting="rollout.trajectory_selection", takes=("record",))
    return Rules(named_function(function, f"rollout.trajectory_selection = {named!r}"), config.train_discarded)


class Generation:
    """What a run generates with, and what must run for it. function: None for the built-in generation."""

    def __init__(
        self, config: TrainConfig, place: GatewayPlace | None, *, refusal: Callable[[str], str | None],
        log: Callable[[str], None],
    ) -> None:  # fmt: skip
        """place: for the gateway, where agents are run. Imports what is configured: UsageError for what is wrong."""
        self._config, self._place, self._log = config, place, log
        self._client: EngineClient | None = None
        self._process: GatewayProcess | None = None
        self._gateway: GatewayClient | None = None
        self._agents: Agents | None = None
        self._episodes: AgentEpisodes | None = None
        self.function: GenerateFunction | None = (
            load_episodes(config, shown_pictures(config)) or load_generate(config.rollout)
        )
        if config.rollout.agent is not None:
            self.function = self._episodes = self._agent_episodes(config.rollout.agent, refusal)

    def _agent_episodes(self, agent: str | tuple[str, ...], refusal: Callable[[str], str | None]) -> AgentEpisodes:
        config = self._config
        if agent == "remote":
            self._agents = RemoteAgents(self._opened)
        else:
            self._agents = load_agents(agent, workers=config.rollout.agent_workers)
        limits = AgentLimits(
            at_once=config.rollout.agents_at_once,
            seconds=config.deadlines.agent,
            retries=config.rollout.agent_retries,
            max_tokens=config.sampling.max_prompt_tokens + config.sampling.max_response_tokens,
            rules=_rules(config.rollout),
        )
        return AgentEpisodes(self._agents, self._opened, limits, refusal)

    def _opened(self) -> GatewayClient:
        if self._gateway is None:
            raise RltoolError("agents were asked for before the gateway was started")
        return self._gateway

    async def start(
        self, fleet: Fleet, router: EngineEndpoint | None, book: VersionBook | None
    ) -> None:
        """Connect with the gateway, or start one in front of these engines, which follows them. book: None where the
        run sends no weights."""
        if self._episodes is None:
            return
        rollout = self._config.rollout
        self._client = await EngineClient(retry=PATIENCE).__aenter__()
        if rollout.gateway is not None:
            assert rollout.gateway_key_file is not None  # validate.py
            url, key_file = rollout.gateway.rstrip("/"), rollout.gateway_key_file
        else:
            assert self._place is not None
            if router is not None and book is not None and book.lineage.adapters:
                raise UsageError(
                    'rollout.agent behind a router does not go with weights.lora_sync = "adapter": its gateway would '
                    'name no adapter; take the router away, or leave weights.lora_sync at "merged"'
                )
            self._place.sessions.mkdir(parents=True, exist_ok=True)
            key_file = make_key(self._place.key_file)
            infos = [member.info for member in fleet.members()]
            parts = self._parts(infos, router, book, self._place.sessions, key_file)

            def view() -> FleetView:
                return FleetView.of(fleet, book.published if book is not None else None)

            self._process = GatewayProcess(
                self._gateway_config(parts), parts, self._place.log, self._client, log=self._log,
                view=view if parts.follows else None,
            )  # fmt: skip
            url = self._process.url
            await self._process.start()
            self._log(f"gateway: {url}, log {self._place.log}")
        self._gateway = GatewayClient(self._client, url, read_key(key_file, url), seconds=GATEWAY_SECONDS)

    def _parts(
        self, infos: Sequence[EngineInfo], router: EngineEndpoint | None, book: VersionBook | None, sessions: Path,
        key_file: Path,
    ) -> Parts:  # fmt: skip
        sampling = self._config.sampling
        lengths = [info.max_model_len for info in infos if info.max_model_len is not None]
        return Parts(
            served_name=next((info.model_id for info in infos), "policy"),
            # The gateway refuses a turn when a conversation becomes longer than the trainer could take.
            max_model_len=min([*lengths, sampling.max_prompt_tokens + sampling.max_response_tokens]),
            tokenizer=self._config.model.path.absolute(),
            endpoints=(router,) if router is not None else (),
            through_router=router is not None,
            follows=router is None,
            lineage=book.lineage.to_json() if book is not None and router is None else None,
            sessions=sessions.absolute(),
            key_file=key_file.absolute(),
            stop_token_ids=sampling.stop_token_ids,
            trust_remote_code=self._config.model.trust_remote_code,
            pictures=shown_pictures(self._config),
        )

    def _gateway_config(self, parts: Parts) -> GatewayConfig:
        sampling, rollout = self._config.sampling, self._config.rollout
        usual = GatewayConfig.model_fields["max_body_bytes"].default
        return GatewayConfig(
            tool_parser=rollout.tool_parser,
            template_arguments=rollout.template_arguments,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_response_tokens=rollout.max_turn_tokens or sampling.max_response_tokens,
            on_sampling=rollout.on_sampling,
            train_cancelled=rollout.train_cancelled,
            max_turns=rollout.max_turns,
            turn_timeout=self._config.deadlines.generate,
            idle_timeout=2 * self._config.deadlines.agent,
            max_body_bytes=usual if isinstance(parts.pictures, str) else BODY_WITH_PICTURES,
        )

    def metrics(self) -> dict[str, float]:
        """Counts since the start, for runs with agents."""
        if self._episodes is None:
            return {}
        counts = dict.fromkeys(COUNTS, 0) | self._episodes.counts
        counts["gateway_restarts"] = self._process.counts["gateway_restarts"] if self._process is not None else 0
        rows, tokens = counts["agent_rows"], counts["agent_tokens"]
        shares = {
            "rollout/agent_turns_per_row": counts["agent_turns"] / rows if rows else 0.0,
            "rollout/agent_repeated_share": counts["agent_repeated_tokens"] / tokens if tokens else 0.0,
        }
        return {f"rollout/{name}_total": float(count) for name, count in counts.items()} | shares

    async def close(self) -> None:
        if self._agents is not None:
            await self._agents.close()
        if self._process is not None:
            await self._process.close()
        if self._client is not None:
            await self._client.__aexit__(None, None, None)
