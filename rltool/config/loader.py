"""Merges a configuration from its sources: defaults < TOML files (in order) < --set < flags. Keeps each value's origin.

An unknown key is an error that names the nearest known one: a typo that is ignored costs a day of GPU time.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from rltool.config.base import OWN_FUNCTION, Config, is_list, is_table
from rltool.errors import UsageError
from rltool.masking import masked, masked_text

C = TypeVar("C", bound=Config)


_QUOTED = re.compile(r"'([^']*)'")
_SHAPES = {
    "model_type": "expected a table of settings, {KEY = VALUE, ...}",
    "dict_type": "expected a table, {NAME = VALUE, ...}",
    "tuple_type": "expected a list, [VALUE, ...]",
    "list_type": "expected a list, [VALUE, ...]",
}
"""What to write, in the words of TOML, for what pydantic names by Python's types."""
_KEY = re.compile(r"[a-z_][\w.]*\w")
_TYPES = frozenset({"str", "int", "float", "bool"})


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
    rules: Sequence[Callable[[Any], None]] | None = None,
) -> Loaded[C]:
    """Build `model` from its sources.

    files: TOML files, later ones win key by key. sets: "a.b=c", the right side read as a TOML value, else as text.
    flags: dotted key -> (flag name, value); a value of None means that the flag was not given. rules: of those in
    rltool/config/rules.py the ones to apply, for verbs that do not train; None: all.
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
        context = None if rules is None else {"rules": rules}
        return Loaded(model.model_validate(values, context=context), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, model, values)) from None


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


def variants(model: type[BaseModel], key: str) -> dict[str, type[BaseModel]]:
    """kind -> config model, the default's first, of a field that is a table with one of several `kind`s; else empty."""
    field = model.model_fields[key]
    if field.discriminator != "kind":
        return {}
    found = {
        name: kind for kind in get_args(field.annotation) for name in get_args(kind.model_fields["kind"].annotation)
    }
    first = field.default.kind
    return {first: found.pop(first), **found}


def _flatten(table: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in table.items():
        section = _section(model, key) if key in model.model_fields else None
        if section is not None and is_table(value):
            yield from _flatten(value, section, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _put(
    values: dict[str, Any], origins: dict[str, str], model: type[Config], key: str, value: Any, origin: str
) -> None:
    if key in model.renamed:
        raise ConfigError(f"{origin}: {key} is {model.renamed[key]} now: rename it there")
    if key in model.removed:
        raise ConfigError(f"{origin}: {key} is gone: {model.removed[key]}; leave it out")
    parts = key.split(".")
    here, section = values, model
    for depth, part in enumerate(parts):
        if part not in section.model_fields:
            _unknown(model, key, ".".join(parts[:depth]), part, section, origin)
        inner, kinds = _section(section, part), variants(section, part)
        rest = parts[depth + 1 :]
        if kinds and not rest and is_table(value):
            for name in sorted(value, key=lambda name: name != "kind"):  # it decides which others there are
                _put(values, origins, model, f"{key}.{name}", value[name], origin)
            return
        if kinds:
            here[part] = _of_kind(here.get(part) or {}, rest, value, kinds, (model, key, origin), origins)
            key = key if rest else f"{key}.kind"
        elif not rest:
            here[part] = value
        elif inner is None:
            here[part] = _entered(here.get(part) or {}, rest, value, _element(section, part), (model, key, origin))
        else:
            here = here.setdefault(part, {})
            section = inner
            continue
        origins[key] = origin
        return


def _of_kind(
    table: Mapping[str, Any], rest: Sequence[str], value: Any, kinds: Mapping[str, type[BaseModel]],
    where: tuple[type[BaseModel], str, str], origins: dict[str, str],
) -> dict[str, Any]:  # fmt: skip
    """The table with one more key; of a table of another kind than before nothing stays. rest: the key within the
    table; empty: a kind alone, or an import path."""
    entries: dict[str, Any]
    if not rest:
        entries = {"kind": "own", "function": value} if ":" in str(value) and "own" in kinds else {"kind": value}
    elif rest[0] == "kind":
        entries = {"kind": value}
    else:
        kind = table.get("kind", next(iter(kinds)))
        _check_of_kind(kind, rest, kinds, where)
        before = table.get(rest[0])
        inside = {**(before if is_table(before) else {}), ".".join(rest[1:]): value}
        entries = {"kind": kind, rest[0]: inside if len(rest) > 1 else value}
    if table.get("kind") == entries["kind"]:
        return {**table, **entries}
    parent = where[1].removesuffix("".join(f".{part}" for part in rest))
    for old in [key for key in origins if f"{key}.".startswith(f"{parent}.")]:
        del origins[old]
    return entries


def _check_of_kind(
    kind: Any, rest: Sequence[str], kinds: Mapping[str, type[BaseModel]], where: tuple[type[BaseModel], str, str]
) -> None:
    """ConfigError for a key that tables of this kind do not have. An unknown kind is pydantic's to refuse."""
    model, key, origin = where
    if not isinstance(kind, str) or kind not in kinds or rest[0] in kinds[kind].model_fields:
        return
    parent = key.removesuffix("".join(f".{part}" for part in rest))
    of = [name for name, other in kinds.items() if rest[0] in other.model_fields]
    if not of:
        _unknown(model, key, parent, rest[0], kinds[kind], origin)
    raise ConfigError(
        f"{origin}: {key} is a key of kind = {' or '.join(of)}, and {parent}.kind is {kind}: set that first, or leave "
        f"{key} out"
    )


def _element(model: type[BaseModel], key: str) -> type[BaseModel] | None:
    """The config model of the entries of a list of sections, or of a table of the user's own names (models.NAME)."""
    arguments = get_args(model.model_fields[key].annotation)
    return next((found for found in arguments if isinstance(found, type) and issubclass(found, BaseModel)), None)


def _entered(
    table: Mapping[str, Any], rest: Sequence[str], value: Any, element: type[BaseModel] | None,
    where: tuple[type[BaseModel], str, str],
) -> dict[str, Any]:  # fmt: skip
    """The table with one more entry: eval.sets.NAME, or models.NAME.KEY where entries are sections (`element`)."""
    if element is None or len(rest) != 2:
        return {**table, ".".join(rest): value}
    name, field = rest
    if field not in element.model_fields:
        model, key, origin = where
        _unknown(model, key, key.rpartition(".")[0], field, element, origin)
    return {**table, name: {**table.get(name, {}), field: value}}


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for name in model.model_fields:
        inner = _section(model, name)
        keys += _all_keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
        keys += [f"{prefix}{name}.{key}" for kind in variants(model, name).values() for key in kind.model_fields]
    return keys


def _unknown(model: type[BaseModel], key: str, parent: str, part: str, section: type[BaseModel], origin: str) -> None:
    before = f"{parent}." if parent else ""
    nearest = difflib.get_close_matches(part, section.model_fields, n=1, cutoff=0.6)
    rest = key.removeprefix(f"{before}{part}").removeprefix(".")
    # Right name, wrong section: looked for everywhere, also where a section is called nearly so, which is no value.
    elsewhere = [k for k in _all_keys(model) if k.rpartition(".")[2] == key.rpartition(".")[2]]
    if nearest and not (elsewhere and not rest and _section(section, nearest[0])):
        suggestion = f"did you mean {before}{nearest[0]}{_inside(_section(section, nearest[0]), rest)}?"
    else:
        suggestion = (
            f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(sorted(section.model_fields))}"
        )
    raise ConfigError(f"{origin}: unknown key {key!r}; {suggestion}")


def _inside(section: type[BaseModel] | None, rest: str) -> str:
    """What was to follow the misspelt name of this section, with its dot, as far as the section knows it."""
    first = rest.split(".")[0]
    near = difflib.get_close_matches(first, section.model_fields, n=1, cutoff=0.6) if section and rest else []
    if not near:
        return ""
    return f".{near[0]}{rest.removeprefix(first)}"


def _section_at(model: type[BaseModel], place: Sequence[int | str]) -> type[BaseModel] | None:
    """The config model at this place, in a list or a table of sections too; None for a plain value."""
    section: type[BaseModel] | None = model
    for part in place:
        if section is not None and isinstance(part, str) and part in section.model_fields:
            section = _section(section, part) or _element(section, part)
    return section


def _nearest(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """`; did you mean KEY?` for an unknown key in a section that may be repeated."""
    section = _section_at(model, place[:-1])
    near = difflib.get_close_matches(str(place[-1]), section.model_fields, n=1, cutoff=0.6) if section else []
    return f"; did you mean {near[0]}?" if near else ""


def _explain(error: ValidationError, origins: Mapping[str, str], model: type[BaseModel], values: Any) -> str:
    """One line for each key that is wrong, and for what is wrong with several of them together."""
    by_key: dict[tuple[int | str, ...], list[Any]] = {}
    for item in error.errors():
        by_key.setdefault(_key_of(item["loc"], values), []).append(item)
    return "\n".join(_line(place, items, origins, model) for place, items in by_key.items())


def _key_of(place: Sequence[int | str], values: Any) -> tuple[int | str, ...]:
    """The place of an error without what pydantic puts into it for the members of a union (`literal['a']`, `str`)."""
    kept: list[int | str] = []
    for part in place:
        here = values[part] if _holds(values, part) else None
        if here is None and is_table(values) and part == values.get("kind"):
            continue  # which of several kinds of table it is
        if isinstance(part, str) and here is None and (not part.isidentifier() or part in _TYPES):
            continue
        kept.append(part)
        values = here
    return tuple(kept)


def _holds(values: Any, part: int | str) -> bool:
    if is_table(values):
        return part in values
    return is_list(values) and isinstance(part, int) and part < len(values)


def _line(
    place: tuple[int | str, ...], items: Sequence[Any], origins: Mapping[str, str], model: type[BaseModel]
) -> str:  # fmt: skip
    """items: pydantic's errors at this place, several for a union of types."""
    first = items[0]
    if first["type"] == "union_tag_invalid":
        place, first = (*place, "kind"), {**first, "input": first["ctx"]["tag"]}
    key = ".".join(map(str, place))
    parents = (".".join(map(str, place[:depth])) for depth in range(len(place), 0, -1))
    origin = next((origins[parent] for parent in parents if parent in origins), None)
    from_where = f", from {origin}" if origin else _named_origins(first, key, origins)
    if first["type"] == "extra_forbidden":  # in a section of a list or a table; _put has seen to the others
        return f"unknown key {key!r}{from_where}{_nearest(model, place)}"
    if first["type"] == "missing":
        key += _required_in(model, place)
        return (
            f"{key} is required; set it in a TOML file (--config FILE, which `rltool init` writes) or with "
            f"--set {key}=..."
        )
    value = first["input"]
    shown = masked(value, str(place[-1]) if place else "")
    if isinstance(shown, str):  # perhaps a table that was no TOML, or a command line
        shown = masked_text(shown)
    given = f" (got {shown!r})" if not isinstance(value, dict) else ""
    message = "; or ".join(dict.fromkeys(_message(item) for item in items))
    hint = _did_you_mean(value, items)
    section = _section_at(model, place) if first["type"] == "model_type" else None
    if section is not None and all(isinstance(part, str) for part in place):
        hint = f"; set one of its keys, such as {key}.{next(iter(section.model_fields))}"
    if isinstance(value, str) and any(item["type"] in ("tuple_type", "list_type") for item in items):
        text = f'["{value}"]'
        hint = f"; give a list: --set '{key}={text}'" if origin == "--set" else f"; give a list: {text}"
    return (f"{key}: " if key else "") + f"{message}{given}{from_where}{hint}"


def _named_origins(item: Any, section: str, origins: Mapping[str, str]) -> str:
    """Where the keys were set that a rule between several names: ` (optimizer.lr from run.toml)`. section: of the rule;
    "" for the whole configuration."""
    if item["type"] != "value_error":
        return ""
    prefix, words = f"{section}." if section else "", set(_KEY.findall(item["msg"]))
    named = {key.removesuffix(".kind"): origin for key, origin in origins.items()}
    found = [
        f"{key} from {origin}"
        for key, origin in named.items()
        if key in words or (prefix and key.startswith(prefix) and key.removeprefix(prefix) in words)
    ]
    return f" ({', '.join(found)})" if found else ""


def _message(item: Any) -> str:
    if item["type"] == "union_tag_invalid":
        return f"expected one of {item['ctx']['expected_tags']}"
    if item["type"] in _SHAPES:
        return _SHAPES[item["type"]]
    if item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"] == OWN_FUNCTION:
        return "an import path `package.module:function`"
    return item["msg"].removeprefix("Value error, ")


def _did_you_mean(value: Any, items: Sequence[Any]) -> str:
    names = [n for item in items if item["type"] == "literal_error" for n in _QUOTED.findall(item["ctx"]["expected"])]
    if items[0]["type"] == "union_tag_invalid":
        names, value = _QUOTED.findall(items[0]["ctx"]["expected_tags"]), items[0]["ctx"]["tag"]
    near = difflib.get_close_matches(value, names, n=1, cutoff=0.6) if isinstance(value, str) else []
    return f"; {value!r}: did you mean {near[0]!r}?" if near else ""


def _required_in(model: type[BaseModel], place: Sequence[int | str]) -> str:
    """`.path` for a whole section that is missing and has required keys: of these the first."""
    section: type[BaseModel] | None = model
    for part in place:
        known = section is not None and isinstance(part, str) and part in section.model_fields
        section = _section(section, part) if known else None  # pyright: ignore[reportArgumentType]
    required = [name for name, field in section.model_fields.items() if field.is_required()] if section else []
    return f".{required[0]}" if required else ""
