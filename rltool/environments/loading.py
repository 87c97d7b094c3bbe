"""`rollout.environment` and what belongs to it, as a generate function."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from rltool.chat.parsers.registry import parser_of
from rltool.chat.rendering import Renderer
from rltool.config.import_path import load_callable
from rltool.config.rollout import RolloutConfig
from rltool.config.train import TrainConfig
from rltool.environments.episodes import EpisodeLimits, Episodes
from rltool.environments.protocol import Environment
from rltool.errors import UsageError
from rltool.masking import masked
from rltool.models.pictures import Pictures
from rltool.rollout.pictures import PictureReader
from rltool.rollout.tokenizer import Tokenizer, load_tokenizer

METHODS = ("reset", "step", "reward", "close")


def load_environment(config: RolloutConfig) -> Callable[[], Environment] | None:
    """Makes one environment for each call; None where none is configured. One is made here, to see that the arguments
    fit. UsageError for what is no environment."""
    if config.environment is None:
        return None
    setting = f"rollout.environment = {config.environment!r}"
    factory = load_callable(config.environment, setting="rollout.environment")
    arguments = config.environment_arguments
    try:
        example = factory(**arguments)
    except UsageError as error:
        raise UsageError(f"{setting}: {error}") from error
    except Exception as error:
        raise UsageError(
            f"{setting} with rollout.environment_arguments = {masked(arguments)}: {type(error).__name__}: {error}"
        ) from error
    lacking = [name for name in METHODS if not callable(getattr(example, name, None))]
    if lacking:
        raise UsageError(f"{setting} is no environment: it lacks {', '.join(lacking)} (docs/agents.md)")
    return lambda: cast(Environment, factory(**arguments))


def load_episodes(config: TrainConfig, pictures: Pictures | str) -> Episodes | None:
    """With a tokenizer of its own, which a thread of its own uses. pictures: how the model takes them, or why it gets
    none. UsageError for a model without a chat template."""
    rollout = config.rollout
    make = load_environment(rollout)
    if make is None:
        return None
    limits = EpisodeLimits(
        turns=rollout.max_turns,
        turn_tokens=rollout.max_turn_tokens,
        prompt_tokens=config.sampling.max_prompt_tokens,
        call_seconds=config.deadlines.call,
    )
    tokenizer = _chat_tokenizer(config)
    parser = parser_of(rollout.tool_parser, tokenizer.template)
    renderer = Renderer(tokenizer, parser, rollout.template_arguments)
    if not isinstance(pictures, str):
        return Episodes(
            make, renderer, limits, pictures=PictureReader(pictures, config.model.path, config.data.media_root)
        )
    return Episodes(make, renderer, limits, pictures=pictures)


def _chat_tokenizer(config: TrainConfig) -> Tokenizer:
    """UsageError for a model without a chat template."""
    tokenizer = load_tokenizer(
        config.model.path,
        stop_token_ids=config.sampling.stop_token_ids,
        trust_remote_code=config.model.trust_remote_code,
    )
    if not tokenizer.has_template:
        raise UsageError(
            f"model.path: the tokenizer of {config.model.path} has no chat template, which conversations of several "
            "turns are written with"
        )
    return tokenizer
