"""algorithm.exact in a run: a log-probability that is not the engines' ends it, with the token and the layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from torch import Tensor

from rltool.algorithms.batch import TrainBatch
from rltool.algorithms.mismatch import first_different_token
from rltool.checkpoints.directory import remove
from rltool.errors import PartLost, RltoolError, TrainingStopped
from rltool.processes.files import write_json_atomic


class FindsLayers(Protocol):
    """What is asked of training.ranks.trainer_group."""

    def differing_layer(self, tokens: list[int], logprob: float, directory: Path) -> str: ...


class LayerSearch:
    """directory: RUN/exact. log: a line for the console."""

    def __init__(self, trainer: FindsLayers, directory: Path, log: Callable[[str], None]) -> None:
        self._trainer, self._directory, self._log = trainer, directory, log

    def of(self, step: int, row: dict[str, object], tokens: list[int], logprob: float) -> str:
        """What is said of the last of `tokens`, to which the trainer gave `logprob`; also where nothing was found.
        `row` is kept beside what is found. PartLost: a rank died of it."""
        directory = self._directory / f"step_{step}"
        self._log(f"algorithm.exact: looking for the layer that differs from vLLM's, some minutes ({directory})")
        try:
            remove(directory)  # a resumed run does steps again
            directory.mkdir(parents=True)
            write_json_atomic(directory / "row.json", row)
            return f"{self._trainer.differing_layer(tokens, logprob, directory)} ({directory})"
        except PartLost:
            raise
        except (RltoolError, OSError) as error:
            return f"the layer that differs could not be found: {error}"


def stop(
    step: int, ours: Tensor, batch: TrainBatch, selection: Tensor, rows: Sequence[int], search: LayerSearch | None
) -> NoReturn:
    """TrainingStopped: of the selected tokens one differs at least. ours: the trainer's log-probabilities; ours,
    selection: [T]; rows: which samples of the step's batch these are."""
    theirs = batch.rollout_logprobs
    assert theirs is not None
    chosen = selection > 0
    differ, compared = int((ours != theirs)[chosen].sum()), int(chosen.sum())
    sample, place = first_different_token(ours, theirs, selection, batch.lengths)
    start = int(batch.lengths[:sample].sum())
    tokens = batch.tokens[start : start + int(batch.lengths[sample])].tolist()
    mine, other = float(ours[start + place]), float(theirs[start + place])
    said = (
        f"algorithm.exact: {differ} of {compared} log-probabilities are not the engines' (max "
        f"{float((ours - theirs)[chosen].abs().max()):.2e}); no optimizer step was made on this rollout. Step {step}, "
        f"sample {rows[sample]}, token {place} of {len(tokens)} (id {tokens[place]}): trainer {mine:.9g}, "
        f"engine {other:.9g}"
    )
    where = ""
    if search is not None:
        row = {
            "step": step, "sample": rows[sample], "token": place, "tokens": tokens, "trainer": mine,
            "engine": other,
        }  # fmt: skip
        try:
            where = f"; {search.of(step, row, tokens[: place + 1], mine)}"
        except PartLost as lost:
            raise lost.with_context(before=f"{said}. Then, looking for the layer: ") from lost
    raise TrainingStopped(
        f"{said}{where}. Engines that the run does not start need `serve-engines --exact`, of the vLLM version that is "
        "installed beside the trainer"
    )
