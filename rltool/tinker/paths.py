"""Paths of checkpoints, tinker://MODEL/KIND/NAME, as clients give and get them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rltool.errors import UsageError

STATES, SAMPLERS = "weights", "sampler_weights"
"""Kinds of checkpoints: what training goes on from, and what is sampled with."""
SHARED = "shared"
"""In place of a model's name: checkpoints that the server was given for all clients. No model is called so."""

_SCHEME = "tinker://"
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,99}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_USES = {STATES: "training", SAMPLERS: "sampling"}
UNNAMED = ".unnamed-"
"""Begins the names of weights for sampling that the client gave none; no client's name begins like this."""


@dataclass(frozen=True)
class CheckpointPath:
    """kind: STATES or SAMPLERS. str: as clients have it."""

    model: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{_SCHEME}{self.model}/{self.kind}/{self.name}"

    @property
    def is_unnamed(self) -> bool:
        return self.name.startswith(UNNAMED)


def parse_path(path: object, kind: str | None = None) -> CheckpointPath:
    """kind: the one that is expected, None: either. UsageError that says what is wrong."""
    expected = f"expected {_SCHEME}MODEL/{kind or f'{STATES}|{SAMPLERS}'}/NAME"
    if not isinstance(path, str) or not path.startswith(_SCHEME):
        raise UsageError(f"{path!r} is no path of a checkpoint, {expected}")
    parts = path.removeprefix(_SCHEME).split("/")
    if len(parts) != 3:
        raise UsageError(f"{path!r} has {len(parts)} parts, {expected}")
    model, given, name = parts
    if not _MODEL.fullmatch(model):
        raise UsageError(f"{path!r}: {model!r} is no model's name, {expected}")
    if given not in _USES:
        raise UsageError(f"{path!r}: {given!r} is no kind of checkpoint, {expected}")
    if kind is not None and given != kind:
        raise UsageError(f"{path!r} is a checkpoint for {_USES[given]}, one for {_USES[kind]} is wanted: {expected}")
    return CheckpointPath(model, given, checkpoint_name(name, path))


def checkpoint_name(name: object, path: str | None = None) -> str:
    """path: which it is a part of. UsageError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        what = f"path {name!r}" if path is None else f"{path!r}"
        raise UsageError(
            f"{what}: a checkpoint's name is letters, digits, '.', '_' and '-', at most 100, and begins with a letter "
            "or a digit"
        )
    return name


def unnamed(seq: int) -> str:
    """The name of weights for sampling that have none; in the order of seq."""
    return f"{UNNAMED}{seq:012d}"
