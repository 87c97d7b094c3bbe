"""The one import for your own functions: what they are given, what they return, and a test for each kind.

    from rltool.api import Sample, check_reward_function

    def short(sample: Sample, text: str) -> float:
        return 1 / (1 + len(sample.response_ids))

    def test_short():
        check_reward_function("my_rewards:short")

These names stay; where they are defined may change. A name is imported when it is first asked for: a reward function
that needs `Sample` alone does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same as `_MODULES`; a test compares them
    from rltool.algorithms.batch import TrainBatch as TrainBatch
    from rltool.algorithms.contracts import check_advantage_function as check_advantage_function
    from rltool.algorithms.contracts import check_loss_function as check_loss_function
    from rltool.algorithms.losses import LossTokens as LossTokens
    from rltool.chat.conversation import Message as Message
    from rltool.config.algorithm import AlgorithmConfig as AlgorithmConfig
    from rltool.config.data import DataConfig as DataConfig
    from rltool.engines.types import Completion as Completion
    from rltool.engines.types import GenerateRequest as GenerateRequest
    from rltool.engines.types import SamplingParams as SamplingParams
    from rltool.environments.protocol import Environment as Environment
    from rltool.environments.protocol import Start as Start
    from rltool.environments.protocol import Step as Step
    from rltool.environments.protocol import Task as Task
    from rltool.models.base import Family as Family
    from rltool.models.base import FamilyDefinition as FamilyDefinition
    from rltool.models.decoder import Variant as Variant
    from rltool.models.decoder import decoder as decoder
    from rltool.models.decoder import refuse as refuse
    from rltool.processes.tasks import all_of as all_of
    from rltool.rollout.contracts import ContractViolation as ContractViolation
    from rltool.rollout.contracts import check_batch_hook as check_batch_hook
    from rltool.rollout.contracts import check_data_source as check_data_source
    from rltool.rollout.contracts import check_eval_function as check_eval_function
    from rltool.rollout.contracts import check_generate_function as check_generate_function
    from rltool.rollout.contracts import check_group_filter as check_group_filter
    from rltool.rollout.contracts import check_group_hook as check_group_hook
    from rltool.rollout.contracts import check_group_reward as check_group_reward
    from rltool.rollout.contracts import check_metrics_function as check_metrics_function
    from rltool.rollout.contracts import check_reward_function as check_reward_function
    from rltool.rollout.contracts import check_rollout_function as check_rollout_function
    from rltool.rollout.generate import GenerateContext as GenerateContext
    from rltool.rollout.groups import Group as Group
    from rltool.rollout.measure.eval_set import EvalSet as EvalSet
    from rltool.rollout.measure.own_evaluation import EvalContext as EvalContext
    from rltool.rollout.own_rollout import RolloutContext as RolloutContext
    from rltool.rollout.sample import Sample as Sample
    from rltool.rollout.sample import SampleStatus as SampleStatus
    from rltool.rollout.serving.model_clients import RewardContext as RewardContext
    from rltool.training.contracts import check_logger as check_logger
    from rltool.training.observe.loggers import LoggedRun as LoggedRun

_MODULES = {
    "rltool.algorithms.batch": ("TrainBatch",),
    "rltool.algorithms.contracts": ("check_advantage_function", "check_loss_function"),
    "rltool.algorithms.losses": ("LossTokens",),
    "rltool.chat.conversation": ("Message",),
    "rltool.config.algorithm": ("AlgorithmConfig",),
    "rltool.config.data": ("DataConfig",),
    "rltool.engines.types": ("Completion", "GenerateRequest", "SamplingParams"),
    "rltool.environments.protocol": ("Environment", "Start", "Step", "Task"),
    "rltool.models.base": ("Family", "FamilyDefinition"),
    "rltool.models.decoder": ("Variant", "decoder", "refuse"),
    "rltool.processes.tasks": ("all_of",),
    "rltool.rollout.contracts": (
        "ContractViolation", "check_batch_hook", "check_data_source", "check_eval_function", "check_generate_function",
        "check_group_filter", "check_group_hook", "check_group_reward", "check_metrics_function",
        "check_reward_function", "check_rollout_function",
    ),
    "rltool.rollout.measure.eval_set": ("EvalSet",),
    "rltool.rollout.generate": ("GenerateContext",),
    "rltool.rollout.groups": ("Group",),
    "rltool.rollout.serving.model_clients": ("RewardContext",),
    "rltool.rollout.measure.own_evaluation": ("EvalContext",),
    "rltool.rollout.own_rollout": ("RolloutContext",),
    "rltool.rollout.sample": ("Sample", "SampleStatus"),
    "rltool.training.contracts": ("check_logger",),
    "rltool.training.observe.loggers": ("LoggedRun",),
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"rltool.api has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
