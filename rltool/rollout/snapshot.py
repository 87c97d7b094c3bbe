"""What a checkpoint keeps of the rollout side: the data position, the books of all groups, and samples that were not
trained on.

The books are JSON; samples lie in two files of their own beside the checkpoint's, in the format of dump.py, for they
may be long. Groups in hand, running and partial count as not trained: a run that resumes loses no prompt and repeats
none, along the line of weights that survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rltool.algorithms.fields import held_fields
from rltool.rollout.collector import Collector
from rltool.rollout.groups import Group, GroupState, new_samples
from rltool.rollout.measure import dump
from rltool.rollout.sample import Sample

VERSION = 2
TENSORS, DESCRIPTION = "samples.safetensors", "samples.json"


@dataclass(frozen=True)
class SourceState:
    """state: JSON; files: name -> content, written into the checkpoint beside it; for the driver, which does not read
    them, a reference to that (training/manager/actor.py)."""

    state: dict[str, Any]
    files: Any = field(default_factory=dict)


def books(collector: Collector, done: int, *, keeps_partial: bool) -> tuple[dict[str, Any], list[Sample]]:
    """The rollout side after `done` training steps: batches from step `done` on are not trained, wherever they are.
    On the collector's event loop: groups go on meanwhile. Returns the state and the samples, which no one changes any
    more.

    keeps_partial: samples of groups that are not complete can be taken up again; else such groups start over.
    """
    groups, samples = [], []
    for group in collector.ledger.groups():
        if group.state is GroupState.IN_HAND and collector.delivered <= done:
            continue  # the batch of the last finished step: trained, though not reported yet
        state = GroupState.READY if group.state in (GroupState.IN_HAND, GroupState.READY) else GroupState.PARTIAL
        kept = state is GroupState.READY or (keeps_partial and any(sample.response_ids for sample in group.samples))
        groups.append(
            {
                "id": group.id,
                "prompt": collector.source.saved(group.prompt),
                "state": state.value,
                "samples": len(group.samples) if kept else None,
            }
        )
        if kept:
            samples += map(_as_it_is, group.samples)
    state = {
        "version": VERSION,
        "source": collector.source.state_dict(),
        "issued": collector.ledger.issued,
        "dropped": dict(collector.ledger.dropped),
        "done": done,
        "groups": groups,
    }
    return state, samples


def encoded(state: dict[str, Any], samples: Sequence[Sample], *, run_seed: int) -> SourceState:
    """What `books` has found, for a checkpoint; in any thread."""
    if not samples:
        return SourceState(state)
    data, text = dump.encode(TENSORS, step=state["done"], seed=run_seed, samples=samples)
    return SourceState(state, {TENSORS: data, DESCRIPTION: text})


def _as_it_is(sample: Sample) -> Sample:
    growing = ["response_ids", "response_mask", "response_logprobs", "versions", "turn_rewards"]
    for name, (_, held) in held_fields().items():
        growing += [column.name for column in held.columns(name) if held.comes == "appended"]
    copied: dict[str, Any] = {name: getattr(sample, name)[:] for name in growing}
    return replace(sample, **copied, train_metadata=dict(sample.train_metadata))


def kept_samples(directory: Path | None) -> Sequence[Sample]:
    """The inverse of `encoded`, in any thread. directory: of the checkpoint; None where it holds no samples."""
    if directory is None or not (directory / DESCRIPTION).exists():
        return ()
    return dump.read_files(directory / TENSORS, directory / DESCRIPTION).samples


def restore(collector: Collector, state: dict[str, Any], samples: Sequence[Sample]) -> None:
    """The inverse of `books`, on the collector's event loop. UsageError for other data."""
    source = collector.source
    source.load_state_dict(state["source"])
    at = 0
    groups = []
    for entry in state["groups"]:
        prompt = source.restored(entry["prompt"])
        if entry["samples"] is None:
            own = new_samples(
                entry["id"], prompt, count=collector.config.samples_per_prompt, run_seed=collector.config.run_seed
            )
        else:
            own = list(samples[at : at + entry["samples"]])
            at += entry["samples"]
        groups.append(Group(entry["id"], prompt, own, GroupState(entry["state"])))
    collector.restore(groups, issued=state["issued"], delivered=state["done"], dropped=state["dropped"])
