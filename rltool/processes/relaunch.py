"""Processes of a group that end by themselves are started again in their place, within a budget."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from rltool.processes.restarts import RestartBudget, RestartPolicy
from rltool.processes.signals import deferred_interrupts
from rltool.processes.spawn import RunningProcess
from rltool.processes.supervise import ProcessGroup

Launch = TypeVar("Launch")
"""What is needed to start one of them."""


class Relaunch(ABC, Generic[Launch]):
    """`Restarts` (supervise.py) of one kind of process in a group."""

    vital: bool

    def __init__(self, group: ProcessGroup, policy: RestartPolicy) -> None:
        self._group, self._policy, self._budget = group, policy, RestartBudget(policy)
        self._launches: dict[str, Launch] = {}

    @abstractmethod
    def start(self, process: RunningProcess) -> RunningProcess: ...

    def watch(self, process: RunningProcess, launch: Launch) -> None:
        self._launches[process.role] = launch

    def owns(self, process: RunningProcess) -> bool:
        return self._policy.most > 0 and process.role in self._launches

    def delay(self, process: RunningProcess) -> float:
        delay = self._budget.died(process.role)
        return math.inf if delay is None else delay

    def end(self, process: RunningProcess) -> None:
        with deferred_interrupts():  # which stopping would take for impatience
            self._group.stop([process])
