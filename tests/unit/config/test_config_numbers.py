"""A number in the configuration is a finite number, wherever it stands: no key has to remember it."""

import math
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from rltool.config.base import Config
from rltool.config.loader import ConfigError, load_config, variants
from rltool.config.router import RouterConfig
from rltool.config.serve import ServeConfig
from rltool.config.train import TrainConfig
from rltool.engines.endpoints import EngineEndpoint

REQUIRED = {TrainConfig: {"model.path": "m"}, ServeConfig: {"model": "m"}, RouterConfig: {}}


def numbers(annotation: Any) -> Iterator[Any]:
    """For each number in this type a function that puts a value in its place."""
    if annotation in (int, float):
        yield lambda value: value
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from (lambda v, n=name, put=put: {n: put(v)} for put in numbers(field.annotation))
    elif get_origin(annotation) is Annotated:
        yield from numbers(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for choice in get_args(annotation):
            yield from numbers(choice)
    elif get_origin(annotation) is tuple:
        items = [item for item in get_args(annotation) if item is not ...]
        for index, item in enumerate(items):
            before, after = [1] * index, [1] * (len(items) - index - 1)
            yield from (lambda v, b=before, a=after, put=put: [*b, put(v), *a] for put in numbers(item))
    elif get_origin(annotation) is dict:
        yield from (lambda v, put=put: {"name": put(v)} for put in numbers(get_args(annotation)[1]))
    elif annotation is Any:
        return  # an argument of the user's own function or template, which may be whatever that takes
    else:
        # Any: arguments that are handed on to a class of the user's, or to a chat template.
        plain = annotation in (str, bool, NoneType, Any) or get_origin(annotation) is Literal
        assert plain or "Path" in str(annotation)


def numeric_keys(model: type[Config], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Config):
            yield from numeric_keys(annotation, f"{prefix}{name}.")
        elif kinds := variants(model, name):
            for kind, variant in kinds.items():
                for key, put in numeric_keys(variant):
                    yield prefix + name, lambda v, kind=kind, key=key, put=put: {"kind": kind, key: put(v)}
        else:
            yield from ((prefix + name, put) for put in numbers(annotation))


def as_table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) and "kind" in value else {}


KEYS = [(model, key, put) for model in REQUIRED for key, put in numeric_keys(model)]
IDS = [f"{model.__name__}-{key}" for model, key, _ in KEYS]


def test_the_numbers_are_found_that_stand_in_a_tuple_a_union_and_a_table():
    names = [key for _, key, _ in KEYS]
    assert {"steps", "optimizer.lr", "eval.stop_at", "sampling.stop_token_ids", "weights.port_range"} <= set(names)
    assert names.count("weights.port_range") == 2 and names.count("engines.groups") == 10 and len(names) > 90


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, True, "3"], ids=str)
@pytest.mark.parametrize(("model", "key", "put"), KEYS, ids=IDS)
def test_a_number_is_neither_text_nor_a_bool_and_it_is_finite(model, key, put, wrong):
    flags = {name: ("--flag", value) for name, value in REQUIRED[model].items()}
    if wrong == math.inf and model is TrainConfig and (limits := {"clip_high", "cap"} & set(as_table(put(wrong)))):
        found = load_config(model, flags=flags | {key: ("--it", put(wrong))}).config.algorithm
        assert getattr(getattr(found, key.removeprefix("algorithm.")), *limits) == math.inf
        return
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")) as error:
        load_config(model, flags=flags | {key: ("--it", put(wrong))})
    assert error.value.exit_code == 2


def test_a_whole_number_is_a_float_where_one_is_expected():
    config = load_config(TrainConfig, sets=["model.path=m", "optimizer.lr=1"]).config
    assert config.optimizer.lr == 1.0 and isinstance(config.optimizer.lr, float)


def test_what_is_read_from_endpoints_json_is_strict_as_well():
    with pytest.raises(ValueError, match="valid integer"):
        EngineEndpoint.model_validate({"url": "http://127.0.0.1:1", "tp": True})


@pytest.mark.parametrize(
    ("model", "key", "value"),
    [
        (TrainConfig, "seed", 2**63),
        (TrainConfig, "seed", -1),
        (TrainConfig, "sampling.top_k", 0),
        (TrainConfig, "sampling.top_k", -2),
        (ServeConfig, "seed", 2**31),
        (TrainConfig, "steps", 10**23),
        (TrainConfig, "rollout.prompts_per_step", 2**63),
        (TrainConfig, "trainer.gpus", [2**63]),
    ],
)
def test_a_number_that_an_engine_or_torch_would_refuse_is_refused_when_it_is_read(model, key, value):
    required = {name: ("--flag", text) for name, text in REQUIRED[model].items()}
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config(model, flags=required | {key: ("--it", value)})
