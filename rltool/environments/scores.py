"""Scores of a model's answer, for `ToolUse`: f(answer, task) -> float."""

from __future__ import annotations

from rltool.environments.protocol import Task


def exact_answer(answer: str, task: Task) -> float:
    """1.0 if the answer is the row's label, both without surrounding white space, else 0.0. ValueError for a row
    without one."""
    if task.label is None:
        raise ValueError(f"row {task.row} has no label to compare with")
    return float(answer.strip() == task.label.strip())


def reasoning_gym_answer(answer: str, task: Task) -> float:
    """The score of the reasoning-gym task named in the row's metadata["source_dataset"]: metadata is the entry's own,
    the label its answer. Note that many tasks pay for near misses."""
    import reasoning_gym

    entry = {"question": task.messages[-1].text, "answer": task.label, "metadata": dict(task.metadata)}
    score = reasoning_gym.get_score_answer_fn(task.metadata["source_dataset"])
    return float(score(answer.strip(), entry))  # pyright: ignore[reportCallIssue]  # declared without its parameters
