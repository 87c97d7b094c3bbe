"""The errors that a user reads. Each states what was expected, what was found and what to do next.

`exit_code` is what the command line ends with: 1 failure, 2 wrong usage or configuration (nothing was started), 4 a
host that was lost.
A room defines further subclasses next to the code that raises them; these are the ones that cross rooms.
"""

from typing import Self


class RltoolError(Exception):
    """Base of every error that is shown without a traceback."""

    exit_code = 1

    of_a_peer = False
    """True: it only reports that another process of the run failed, whose own error is the one to read."""

    def with_context(self, *, before: str = "", after: str = "") -> Self:
        """This error again, same class and attributes, with text around its message. To be raised `from` the original.

        `type(error)(text)` would lose what the class keeps beside the message, such as EngineRejected.status.
        """
        copy = self.__class__.__new__(self.__class__)
        copy.__dict__.update(self.__dict__)
        copy.args = (f"{before}{self}{after}",)
        return copy


class UsageError(RltoolError):
    """Wrong flags, configuration or input, found before anything was started."""

    exit_code = 2


class EngineError(RltoolError):
    """An engine or router did not do what was asked of it."""


class EngineUnreachable(EngineError):
    """No answer: connection refused or reset, or the deadline passed, after all retries; or an answer without end."""


class EngineTimedOut(EngineUnreachable):
    """The deadline passed. The client knows the seconds, its caller the setting."""

    def named(self, setting: str) -> Self:
        """This error with the name of the setting that the deadline comes from. To be raised `from` the original."""
        return self.with_context(after=f": {setting} has passed")


class EngineFailed(EngineError):
    """The engine or router answered 429 or 5xx, to the end. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status


class EngineRejected(EngineError):
    """The engine answered 4xx: the request is wrong, and repeating it cannot help. `status` is the HTTP status."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class MissingLogprobs(EngineError):
    """A reply without one finite log-probability per token. Never replaced by a default: 0.0 would mean probability
    1."""


class TrainingStopped(RltoolError):
    """The run cannot go on (log-probability difference, non-finite steps, failing rewards); a checkpoint was saved."""


class RunFault(RltoolError):
    """A part of the run failed that is no matter of its settings, and that a resumed run may not meet again: `train
    --restarts` goes on after it."""


class PartLost(RunFault):
    """A rank, the rollout manager or Ray died or hangs, so no checkpoint can be written of this state any more."""


class HostLost(PartLost):
    """As its host, or Ray's head, has vanished or cannot be reached from here."""

    exit_code = 4


class SaveFailed(RltoolError):
    """A checkpoint could not be written. Nothing of its name is there, and those before it are untouched."""


class DiskFull(SaveFailed):
    """As there is no room for it, or no quota. What was to be saved is whole."""


class ExportFailed(SaveFailed):
    """A Hugging Face export could not be written. The training state is whole, and its checkpoint can be."""


class OutputFailed(RltoolError):
    """A file beside the checkpoints (metrics, samples, a dump) could not be written. The training state is whole."""


class ContractViolation(RltoolError):
    """A user's function does not keep the contract of its extension point; the text lists every violation."""


class PicturesDiffer(RltoolError):
    """An engine made something else of a prompt's pictures than the trainer: what it sampled is not trained on."""


class UnknownEngine(RltoolError):
    """The run has no engine of this URL."""


class EngineConflict(RltoolError):
    """The run has that engine already, or is in a state in which it cannot take it or let it go."""
