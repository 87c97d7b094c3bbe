"""Environments of Prime Intellect's package `verifiers` (0.4: `verifiers.v1`) as agents.

verifiers plays the episode: the harness of the environment asks the model, which here is the session at the gateway,
and the rewards of the task judge what came of it. So this is an agent like any other, and the package is needed where
agents run, not where the trainer does.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from rltool.agents.outcome import AgentFailed
from rltool.agents.task import AgentTask
from rltool.errors import UsageError


class VerifiersEnv:
    """`run` is the agent, `rows` is its data set.

    settings: the block `env` of verifiers' own configuration: `taskset` with its id, which names an installed package
    or a module on the path, and `agent` (or what an `Env` of the taskset's own calls it) with its harness and runtime.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """UsageError without the package, for settings that verifiers refuses, for an `Env` of several agents or
        attempts, and for retries of verifiers' own."""
        try:
            import verifiers.v1 as vf
        except ImportError as error:
            raise UsageError(f"{error}: environments of verifiers need `pip install rltool[verifiers]`") from None
        try:
            self._config = vf.resolve_env_config(dict(settings))
            environment = vf.load_environment(self._config)
        except Exception as error:
            raise UsageError(f"verifiers refuses its settings: {type(error).__name__}: {error}") from error
        kind = type(environment)
        agents = {name: value for name, value in vars(self._config).items() if isinstance(value, vf.AgentConfig)}
        again = kind is not vf.SingleAgentEnv and kind.__module__.startswith(vf.__name__ + ".envs.")
        if len(agents) != 1 or again:
            raise UsageError(
                f"{kind.__name__} of verifiers plays a task with several agents, or again and again, "
                "which would be one episode with one reward here: only environments of one agent can be trained"
            )
        [(agent, its)] = agents.items()
        for name, retries in (("retries", self._config.retries), (f"{agent}.retries", its.retries)):
            if retries.max_retries or retries.rules:
                raise UsageError(
                    f"{name} of verifiers would play again in the same session, and train the abandoned attempt too: "
                    "leave it out, and set rollout.agent_retries"
                )
        self._taskset = environment.taskset

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tasks as rows of a data set (docs/data.md), without end where the taskset has none. The episode goes by
        the task in `metadata`; `prompt` is for people, and for sampling.max_prompt_tokens."""
        for task in self._taskset:
            data = task.data
            prompt = data.prompt_text or data.name or f"task {data.idx}"
            yield {"prompt": prompt, "metadata": {"task": data.model_dump(mode="json", exclude_defaults=True)}}

    async def run(self, task: AgentTask) -> float:
        """Play the row's task. Returns the weighted sum of its rewards. AgentFailed with verifiers' own error.

        Each episode has an environment of its own, so that HTTP client and tool servers end with its session.
        """
        import verifiers.v1 as vf

        environment = vf.load_environment(self._config)
        # verifiers reads keys from variables, and keeps those with API_KEY in their names from the programs it starts.
        variable = f"RLTOOL_API_KEY_{uuid.uuid4().hex.upper()}"
        os.environ[variable] = task.api_key
        try:
            client = vf.EvalClientConfig(base_url=task.base_url, api_key_var=variable)
            async with environment.serving():
                [slot] = environment.slots(self._task_of(task.row))
                episode = await environment.run_slot(slot, vf.ModelContext(model=task.model, client=client))
        finally:
            del os.environ[variable]
        return reward_of_episode(episode)

    def _task_of(self, row: Mapping[str, Any]) -> Any:
        """The row's task, made as verifiers' own server makes it from what is sent to it."""
        data = row["metadata"].get("task")
        if data is None:
            raise AgentFailed("the row's metadata has no `task`: write the data set with VerifiersEnv.rows")
        kind = type(self._taskset).task_type()
        return kind(kind.data_type().model_validate(data), self._taskset.config.task)


def reward_of_episode(episode: Any) -> float:
    """episode: `verifiers.v1.Episode` of one agent. AgentFailed where it, or its agent, has failed."""
    if not episode.ok:
        errors = [error for part in (*episode.traces, episode) for error in part.errors]
        raise AgentFailed("; ".join(f"{error.type}: {error.message}" for error in errors) or "no reason was given")
    if len(episode.traces) != 1:
        raise AgentFailed(f"its agent was run {len(episode.traces)} times: an episode has one run, and one reward")
    return episode.traces[0].reward
