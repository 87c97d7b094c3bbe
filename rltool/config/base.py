"""The base of every config model: frozen, and an unknown key is an error."""

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Immutable; extra keys are refused (the loader names the nearest known one)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    renamed: ClassVar[Mapping[str, str]] = {}
    """Dotted keys of earlier releases -> the keys that took their place; they are refused with that name."""
