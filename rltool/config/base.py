"""The base of every config model: frozen, and an unknown key is an error."""

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Immutable; extra keys are refused (the loader names the nearest known one)."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
