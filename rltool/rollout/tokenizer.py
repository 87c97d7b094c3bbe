"""The tokenizer of a model directory, reduced to what rollouts need: prompt -> ids, ids -> text, where to stop."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rltool.errors import UsageError
from rltool.models.weight_files import check_tokenizer_files, no_tokenizer
from rltool.rollout.pictures import PictureReader


class TemplateFailed(UsageError):
    """A chat template does not take these messages."""


class TokenizerIsCode(UsageError):
    """The tokenizer is code that comes with the model, which nothing runs unless the user allows it."""


class Tokenizer:
    """Wraps a Hugging Face tokenizer. Prompts are tokenised once, here; responses are never tokenised again.

    stop_ids: token ids that end a response, sorted: those of generation_config.json, the tokenizer's EOS, and
    configured ones. vocab_size: rows of the model's embedding (config.json), so ids below it are safe to send; the
    tokenizer's own length where there is no config.json.
    eos_id: the token that supervised targets end with; None if the tokenizer has none.
    pictures: reads those of prompts; None: they are not read.
    """

    def __init__(
        self, hf_tokenizer: Any, *, stop_ids: Iterable[int], vocab_size: int, pictures: PictureReader | None = None
    ) -> None:
        self._hf = hf_tokenizer
        self.pictures = pictures
        self.eos_id: int | None = hf_tokenizer.eos_token_id
        self.stop_ids = tuple(sorted(set(stop_ids)))
        self.vocab_size = vocab_size
        for token_id in self.stop_ids:
            if not 0 <= token_id < vocab_size:
                raise UsageError(
                    f"stop token id {token_id} is outside the vocabulary of {vocab_size} tokens: "
                    "check sampling.stop_token_ids and generation_config.json"
                )

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain prompt, with BOS where the tokenizer adds one.
        A trailing EOS that some tokenizers add is removed."""
        ids = list(self._hf(text)["input_ids"])
        if ids and ids[-1] == self.eos_id and not text.endswith(self._hf.eos_token or ""):
            # such a tokenizer (add_eos_token) would end the text before the answer begins
            ids.pop()
        return ids

    def differs_from(self, other: Tokenizer) -> str | None:
        """A token that `other` has another id for, or lacks; None: it reads what this one writes."""
        theirs = other._hf.get_vocab()
        return next((token for token, number in self._hf.get_vocab().items() if theirs.get(token) != number), None)

    def longest_token(self) -> int:
        """Bytes that one token stands for, at most: a text of n characters has at least n divided by this."""
        return max(len(token.encode()) for token in self._hf.get_vocab())

    @property
    def has_template(self) -> bool:
        return bool(self._hf.chat_template)

    @property
    def template(self) -> str:
        """Jinja; of several the text of all; empty without one."""
        return str(self._hf.chat_template or "")

    def render_messages(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        ask: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat template's text; with `ask` it ends where the assistant's reply begins.

        tools: OpenAI's form; arguments: further ones of the template. UsageError if the model has no template;
        TemplateFailed, with the template's own words, if it does not take these messages.
        """
        if not self.has_template:
            raise UsageError(
                "this model's tokenizer has no chat template: "
                "give `prompt` (text) instead of `messages`, or set data.apply_chat_template = false"
            )
        from jinja2 import TemplateError

        try:
            return self._hf.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=ask,
                **(arguments or {}),
            )
        # A template indexes and concatenates what it is given: what is missing or of another type ends as one of these.
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateFailed(f"the model's chat template refuses these messages: {error}") from error

    def encode_rendered(self, text: str, spelled: Collection[int] = ()) -> list[int]:
        """Ids of a text that a chat template wrote. The template writes BOS itself:
        adding special tokens would double it.

        spelled: of the special tokens in the text, counted from 0, those that are to be letters."""
        ids: list[int] = list(self._hf(text, add_special_tokens=False)["input_ids"])
        if not spelled:
            return ids
        texts, found, number = {token: one for one, token in self.special_tokens.items()}, list[int](), -1
        for token in ids:
            number += token in texts
            if token in texts and number in spelled:
                found += self._hf(texts[token], add_special_tokens=False, split_special_tokens=True)["input_ids"]
            else:
                found.append(token)
        return found

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """What a text must have to become a special token, such as the end of a turn."""
        return {token.content: number for number, token in self._hf.added_tokens_decoder.items() if token.special}

    def encode_target(self, text: str) -> list[int]:
        """Ids of a supervised response: no BOS, EOS at the end. UsageError if the tokenizer has no EOS."""
        if self.eos_id is None:
            raise UsageError("the tokenizer has no EOS token, so a supervised model would never learn to stop")
        return [*self._hf(text, add_special_tokens=False)["input_ids"], self.eos_id]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; spaces are kept as the tokens have them."""
        return self._hf.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def decode_everything(self, token_ids: Sequence[int]) -> str:
        """Text with special tokens: a format of tool calls or reasoning may be written with some."""
        return self._hf.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_tokenizer(
    model_dir: Path, *, stop_token_ids: Iterable[int] = (), chat_template: Path | None = None,
    trust_remote_code: bool = False, allowed_by: str = "model.trust_remote_code = true",
    pictures: PictureReader | None = None,
) -> Tokenizer:  # fmt: skip
    """The tokenizer in a Hugging Face directory (or a converted one, which carries it along).

    chat_template: a Jinja file in place of the template that comes with it. trust_remote_code: run code of the
    directory; only ever an option that the user gave, never from a file. allowed_by: that option, for the error.
    UsageError if either cannot be loaded, TokenizerIsCode where the tokenizer is code that may not run.
    """
    from transformers import AutoTokenizer

    if not model_dir.is_dir():
        raise UsageError(f"model directory {model_dir} does not exist")
    check_tokenizer_files(model_dir)
    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(
            model_dir, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        if not trust_remote_code and (code := _own_code(model_dir)) is not None:
            raise TokenizerIsCode(
                f"the tokenizer of {model_dir} is code that comes with it ({code}): if you trust that directory, "
                f"allow it with {allowed_by}"
            ) from error
        raise UsageError(f"cannot load a tokenizer from {model_dir}: {error}") from error
    # From config.json alone transformers makes a tokenizer that turns every text into nothing.
    files = set(getattr(hf_tokenizer, "vocab_files_names", {}).values())
    if files and not any((model_dir / name).is_file() for name in files) and not hf_tokenizer("ab 1")["input_ids"]:
        raise no_tokenizer(model_dir, sorted(files))
    if chat_template is not None:
        try:
            hf_tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"data.chat_template: {chat_template} cannot be read: {error}") from error
    stop_ids = {*_eos_ids(model_dir / "generation_config.json"), *stop_token_ids}
    if hf_tokenizer.eos_token_id is not None:
        stop_ids.add(hf_tokenizer.eos_token_id)
    config = _read_json(model_dir / "config.json")
    vocab_size = (config.get("text_config") or config).get("vocab_size") or len(hf_tokenizer)
    return Tokenizer(hf_tokenizer, stop_ids=stop_ids, vocab_size=vocab_size, pictures=pictures)


def _own_code(model_dir: Path) -> str | None:
    """`file.Class` of the tokenizer that the directory brings along; None where it brings none."""
    found = _read_json(model_dir / "tokenizer_config.json").get("auto_map") or _read_json(
        model_dir / "config.json"
    ).get("auto_map")
    named = found.get("AutoTokenizer") if isinstance(found, dict) else found
    classes = named if isinstance(named, list | tuple) else [named]
    return next((str(one) for one in classes if one), None)


def _eos_ids(generation_config: Path) -> list[int]:
    value = _read_json(generation_config).get("eos_token_id")
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path} is not valid JSON: {error}") from error
