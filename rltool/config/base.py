"""The base of every config model: frozen, an unknown key is an error, and a number is a finite number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from rltool.masking import masked

ImportPath = str
"""`package.module:attribute`"""

OWN_FUNCTION = r"^[\w.]+:[\w.]+$"
OwnFunction = Annotated[str, Field(pattern=OWN_FUNCTION, description="a function")]
"""An import path beside known names: without the colon it is a misspelt name."""
OwnFamily = Annotated[str, Field(pattern=OWN_FUNCTION, description="a family")]
"""Of a `models.base.FamilyDefinition`: a value, not a function."""


LARGEST_INTEGER = 2**63 - 1
"""What files, tensors and the programs that are started with a setting can hold."""


def is_table(value: Any) -> TypeGuard[dict[Any, Any]]:
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, list | tuple)


def _make_numbers_strict(schema: Any) -> None:
    """Wherever numbers stand below a field: behind a `| None`, in a tuple, in a table."""
    if is_table(schema):
        if schema.get("type") in ("int", "float"):
            schema["strict"] = True
        if schema.get("type") == "int":
            if "lt" not in schema:
                schema.setdefault("le", LARGEST_INTEGER)
            if "gt" not in schema:
                schema.setdefault("ge", -LARGEST_INTEGER)
        for part in schema.values():
            _make_numbers_strict(part)
    elif is_list(schema):
        for part in schema:
            _make_numbers_strict(part)


class Config(BaseModel):
    """Immutable; extra keys are refused (the loader names the nearest known one).

    A number is neither text nor a bool, and neither infinite nor NaN: `steps = true` or `lr = inf` would go through
    half of a run before something fails. An integer has at most 64 bits, and is accepted where a float is expected, not
    the other way round. A field for which inf has a meaning has Field(allow_inf_nan=True).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    renamed: ClassVar[Mapping[str, str]] = {}
    """Dotted keys of earlier releases -> the keys that took their place; they are refused with that name."""
    removed: ClassVar[Mapping[str, str]] = {}
    """Dotted keys of earlier releases that nothing took the place of -> why; they are refused with that."""

    def shown(self) -> dict[str, Any]:
        """As JSON, with secrets masked: what may be written into files and shown."""
        return masked(self.model_dump(mode="json"))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        # Not ConfigDict(strict=True): paths and tuples come from TOML as text and lists, and are to be converted.
        schema = handler(source)
        _make_numbers_strict(handler.resolve_ref_schema(schema))
        return schema
