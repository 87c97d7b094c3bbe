"""Tasks of Harbor (0.26: terminal-bench, SWE-bench and others in its format) as agents.

Harbor runs the trial: its environment, its agent, its verifier. The agent asks the model, which here is the session at
the gateway, and what the verifier wrote is the reward. The package is needed where agents run, not where the trainer
does.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rltool.agents.outcome import AgentFailed
from rltool.agents.task import AgentTask
from rltool.errors import UsageError

LOCAL = "rltool.agents.harbor_local:LocalEnvironment"


class HarborEnv:
    """`run` is the agent, `rows` is its data set.

    dataset: one of the `datasets` of Harbor's job configuration: {"path": directory of tasks}, or {"name": ...} of its
    registry. settings: Harbor's trial configuration without its task: `agent` (name or import_path, kwargs),
    `environment` (type or import_path; Harbor's Docker if left out), `verifier`, timeouts, ... reward: which of the
    verifier's rewards, where there are several. trials_dir: keeps what Harbor writes of each trial.
    """

    def __init__(
        self, dataset: Mapping[str, Any], settings: Mapping[str, Any], *, reward: str = "reward", trials_dir: str = ""
    ) -> None:
        """UsageError without the package, for settings that Harbor refuses, for a model of the agent's own, and for an
        environment that cannot run here."""
        try:
            from harbor.agents.factory import AgentFactory
            from harbor.environments.factory import EnvironmentFactory
            from harbor.models.job.config import DatasetConfig
            from harbor.models.trial.config import TrialConfig
        except ImportError as error:
            raise UsageError(f"{error}: tasks of Harbor need Python 3.12 and `pip install rltool[harbor]`") from None
        unknown = sorted({*settings} - {*TrialConfig.model_fields})
        if unknown:
            raise UsageError(f"Harbor's trial configuration has no {', '.join(unknown)}")
        try:
            self._dataset = DatasetConfig.model_validate(dict(dataset))
            config = TrialConfig.model_validate({**settings, "task": {"path": "."}})
            kind = AgentFactory.get_agent_class_from_config(config.agent)
        except Exception as error:
            raise UsageError(f"Harbor refuses its settings: {type(error).__name__}: {error}") from error
        own = [name for name in ("base_url", "model_api_key_name") if getattr(config.agent, name)]
        if own:
            raise UsageError(f"agent.{own[0]}: the model is the policy at the gateway, leave it out")
        try:
            place = config.environment
            EnvironmentFactory.run_preflight(place.type, place.import_path, place.kwargs)
        except (Exception, SystemExit) as error:
            raise UsageError(
                f'environment: {error} Name another of Harbor\'s, or {{"import_path": "{LOCAL}"}}, which runs tasks on '
                "this machine and is no sandbox"
            ) from error
        self._settings, self._reward, self._trials_dir = dict(settings), reward, trials_dir
        self._connects = kind.MODEL_CONNECTION is not None and kind.capabilities.base_url

    def rows(self) -> Iterator[dict[str, Any]]:
        """The tasks as rows of a data set (docs/data.md). The episode goes by the task in `metadata`; `prompt` is for
        people, and for sampling.max_prompt_tokens."""
        from harbor.models.task.task import Task
        from harbor.tasks.client import TaskClient

        for config in asyncio.run(self._dataset.get_task_configs()):
            if not (config.git_url or config.name):
                config = config.model_copy(update={"path": config.path.resolve()})
            task_id = config.get_task_id()
            found = asyncio.run(TaskClient().download_tasks([task_id], output_dir=config.download_dir))
            task = Task(found.results[0].path)
            prompt = getattr(task, "instruction", "") or task.name
            yield {"prompt": prompt, "metadata": {"task": config.model_dump(mode="json", exclude_defaults=True)}}

    async def run(self, task: AgentTask) -> float:
        """Run the row's trial. Returns the verifier's reward, by Harbor's own rule: an agent that ran out of its time
        is judged too, and so is one with an error that Harbor does not know (`override_error_policy` of `settings`
        says which of them fail). AgentFailed with Harbor's errors where there is no valid reward."""
        from harbor.models.trial.config import TrialConfig
        from harbor.trial.trial import Trial

        row = task.row["metadata"].get("task")
        if row is None:
            raise AgentFailed("the row's metadata has no `task`: write the data set with HarborEnv.rows")
        with contextlib.ExitStack() as stack:
            trials = self._trials_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="rltool-trial-"))
            settings = {**self._settings, "agent": self._agent(task), "task": row, "trials_dir": Path(trials)}
            trial = await Trial.create(TrialConfig.model_validate(settings))
            return reward_of_trial(await trial.run(), self._reward)

    def _agent(self, task: AgentTask) -> dict[str, Any]:
        """Harbor's agent block, with the session as its model."""
        agent = dict(self._settings.get("agent") or {})
        anthropic = str(agent.get("model_api_format") or "").startswith("anthropic")
        prefix = "ANTHROPIC" if anthropic else "OPENAI"
        agent.setdefault("model_name", f"{prefix.lower()}/{task.model}")
        agent["env"] = {
            **(agent.get("env") or {}),
            "OPENAI_BASE_URL": task.base_url, "OPENAI_API_KEY": task.api_key,
            "ANTHROPIC_BASE_URL": task.anthropic_base_url, "ANTHROPIC_API_KEY": task.api_key,
        }  # fmt: skip
        if self._connects:
            agent["base_url"] = task.anthropic_base_url if anthropic else task.base_url
            agent["model_api_key_name"] = f"{prefix}_API_KEY"
        return agent


def reward_of_trial(result: Any, name: str) -> float:
    """result: Harbor's TrialResult. AgentFailed without a valid reward, or with several of which none has this name."""
    errors = "; ".join(
        f"{error.exception_type}: {error.exception_message}" for error in result.recorded_exceptions()
    )
    if not result.reward_valid:
        raise AgentFailed(errors or "its verifier gave no reward")
    rewards = result.verifier_result.rewards
    if name not in rewards and len(rewards) > 1:
        raise AgentFailed(f"the verifier gave {', '.join(sorted(rewards))}, and no {name!r}: name one as `reward`")
    return float(rewards[name] if name in rewards else next(iter(rewards.values())))
