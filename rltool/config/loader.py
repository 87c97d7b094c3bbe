"""Merges a configuration from its sources: defaults < TOML files (in order) < --set < flags. Keeps each value's origin.

An unknown key is an error that names the nearest known one: a typo that is ignored costs a day of GPU time.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rltool.config.base import Config
from rltool.errors import UsageError

C = TypeVar("C", bound=Config)


class ConfigError(UsageError):
    """A configuration that cannot be used, with the key, its origin and the fix."""


class Loaded(NamedTuple, Generic[C]):
    """config: the frozen model. origins: dotted key -> "run.toml", "--set" or the flag's name; defaults are not
    listed."""

    config: C
    origins: dict[str, str]


def load_config(
    model: type[C],
    files: Sequence[Path] = (),
    sets: Sequence[str] = (),
    flags: Mapping[str, tuple[str, Any]] | None = None,
) -> Loaded[C]:
    """Build `model` from its sources.

    files: TOML files, later ones win key by key. sets: "a.b=c", the right side read as a TOML value, else as text.
    flags: dotted key -> (flag name, value); a value of None means that the flag was not given.
    Raises ConfigError (exit code 2) for a missing or broken file, an unknown key, or a value that does not validate.
    """
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in files:
        for key, value in _flatten(_read_toml(file), model):
            _put(values, origins, model, key, value, str(file))
    for text in sets:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--set {text!r}: expected section.key=value, for example --set optimizer.lr=1e-6")
        _put(values, origins, model, key.strip(), _toml_value(value.strip()), "--set")
    for key, (flag, value) in (flags or {}).items():
        if value is not None:
            _put(values, origins, model, key, value, flag)
    try:
        return Loaded(model.model_validate(values), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, model)) from None


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {file}: no such file; `rltool init {file}` writes a commented template") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {file}: not valid TOML: {error}") from None


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text  # a bare word or path: --set model.path=models/tiny


def _section(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The config model behind field `key`, or None if that field is a plain value (or a table of the user's own
    names)."""
    annotation = model.model_fields[key].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _flatten(table: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        section = _section(model, key) if key in model.model_fields else None
        if section is not None and isinstance(value, Mapping):
            yield from _flatten(value, section, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _put(
    values: dict[str, Any], origins: dict[str, str], model: type[Config], key: str, value: Any, origin: str
) -> None:
    if key in model.renamed:
        raise ConfigError(f"{origin}: {key} is {model.renamed[key]} now: rename it there")
    parts = key.split(".")
    here, section = values, model
    for depth, part in enumerate(parts):
        if part not in section.model_fields:
            _unknown(model, key, ".".join(parts[:depth]), part, section, origin)
        inner = _section(section, part)
        rest = parts[depth + 1 :]
        if not rest:
            here[part] = value
        elif inner is None:
            here[part] = _entered(here.get(part) or {}, rest, value, _element(section, part), (model, key, origin))
        else:
            here = here.setdefault(part, {})
            section = inner
            continue
        origins[key] = origin
        return


def _element(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The config model of the entries of a list of sections, or of a table of the user's own names (models.NAME)."""
    arguments = get_args(model.model_fields[key].annotation)
    return next((found for found in arguments if isinstance(found, type) and issubclass(found, BaseModel)), None)


def _entered(
    table: Mapping[str, Any], rest: Sequence[str], value: Any, element: type[BaseModel] | None,
    told: tuple[type[BaseModel], str, str],
) -> dict[str, Any]:  # fmt: skip
    """The table with one more entry: eval.sets.NAME, or models.NAME.KEY where entries are sections (`element`)."""
    if element is None or len(rest) != 2:
        return {**table, ".".join(rest): value}
    name, field = rest
    if field not in element.model_fields:
        model, key, origin = told
        _unknown(model, key, key.rpartition(".")[0], field, element, origin)
    return {**table, name: {**table.get(name, {}), field: value}}


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name in model.model_fields:
        inner = _section(model, name)
        keys += _all_keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return keys


def _unknown(model: type[BaseModel], key: str, parent: str, part: str, section: type[BaseModel], origin: str) -> None:
    nearest = difflib.get_close_matches(part, section.model_fields, n=1, cutoff=0.6)
    if nearest:
        suggestion = f"did you mean {parent + '.' if parent else ''}{nearest[0]}?"
    else:  # right name, wrong section: look for it everywhere
        elsewhere = [k for k in _all_keys(model) if k.rpartition(".")[2] == key.rpartition(".")[2]]
        suggestion = (
            f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(sorted(section.model_fields))}"
        )
    raise ConfigError(f"{origin}: unknown key {key!r}; {suggestion}")


def _nearest(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """`; did you mean KEY?` for an unknown key in a section that may be repeated."""
    section: type[BaseModel] | None = model
    for part in place[:-1]:
        if section is not None and isinstance(part, str) and part in section.model_fields:
            section = _section(section, part) or _element(section, part)
    near = difflib.get_close_matches(str(place[-1]), section.model_fields, n=1, cutoff=0.6) if section else []
    return f"; did you mean {near[0]}?" if near else ""


def _explain(error: ValidationError, origins: Mapping[str, str], model: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        parents = [key, *(".".join(map(str, item["loc"][:depth])) for depth in range(len(item["loc"]) - 1, 0, -1))]
        origin = next((origins[parent] for parent in parents if parent in origins), None)
        if item["type"] == "extra_forbidden":  # in a section of a list or a table; _put has seen to the others
            lines.append(f"unknown key {key!r}" + (f", from {origin}" if origin else "") + _nearest(model, item["loc"]))
        elif item["type"] == "missing":
            lines.append(f"{key} is required; set it in the TOML file or with --set {key}=...")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = f" (got {item['input']!r})" if not isinstance(item["input"], dict) else ""
            lines.append(f"{key}: {message}{given}" + (f", from {origin}" if origin else ""))
    return "\n".join(lines)
