"""A tokenizer for tests of the gateway: byte-level BPE with merges, ChatML, tools and reasoning in Qwen's form.

It has merges, so that a text has more than one tokenisation: what a model sampled letter by letter is other ids once
somebody tokenises it again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("t", "h"), ("i", "n"), ("o", "u"), ("a", "n")]
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

TEMPLATE = """
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') }}
    {%- for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- if not loop.first %}{{ raise_exception('a system message comes first') }}{% endif %}
        {%- if not tools %}{{ '<|im_start|>system\\n' + m.content + '<|im_end|>\\n' }}{% endif %}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if m.reasoning_content and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first %}{{ raise_exception('a tool answers a call') }}{% endif %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
"""Drops the reasoning of earlier turns once a user speaks again, as Qwen3's does."""

STOP = "<|im_end|>"
PAD = "<|image_pad|>"
SEEN = ("<|vision_start|>", PAD, "<|vision_end|>")
SEES = """
{%- macro seen(content) %}{% if content is string %}{{ content }}{% else %}
    {%- for part in content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>
    {%- else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}
"""


def gateway_tokenizer():
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *TAGS, *letters, *("".join(pair) for pair in MERGES)]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=STOP, pad_token=SPECIAL[0], unk_token="<unk>",
        chat_template=TEMPLATE.strip(), clean_up_tokenization_spaces=False,
    )  # fmt: skip


def seeing_tokenizer():
    """Likewise with pictures, as Qwen3-VL's."""
    tokenizer = gateway_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(SEEN)})
    ends = ("user\\n' + ", "<tool_response>\\n' + ")
    for end in ends:
        tokenizer.chat_template = tokenizer.chat_template.replace(f"{end}m.content", f"{end}seen(m.content)")
    assert tokenizer.chat_template.count("seen(") == 2
    tokenizer.chat_template = SEES.strip() + tokenizer.chat_template
    return tokenizer


def write_seeing_model(directory: Path) -> Path:
    """As much of a model as a gateway reads: this tokenizer, and an image processor that makes 1 to 16 tokens of 16
    pixels a side."""
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    seeing_tokenizer().save_pretrained(directory)
    size = {"shortest_edge": 16**2, "longest_edge": 64**2}
    Qwen2VLImageProcessor(patch_size=8, merge_size=2, size=size).save_pretrained(directory)
    return directory


def write_gateway_tokenizer(directory: Path) -> Path:
    tokenizer = gateway_tokenizer()
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    return directory


def write_gateway_model(directory: Path, *, seed: int = 0, window: int | None = None) -> Path:
    """A tiny Qwen2 with random weights (fp32) and this tokenizer; with a window, a Mistral whose layers see so far
    back, for long prompts."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig, MistralConfig, Qwen2Config

    tokenizer = gateway_tokenizer()
    make, more = (Qwen2Config, {}) if window is None else (MistralConfig, {"sliding_window": window})
    config = make(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048 if window is None else 16_384,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        dtype="float32",
        **more,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
OTHERS = tuple(byte for byte in range(256) if byte not in PRINTABLE)
LETTERS = {byte: chr(byte) for byte in PRINTABLE} | {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}
"""Byte-level BPE writes each byte as a letter: a printable one as itself, the others as letters from 256 up."""


class Words:
    """Texts as a model may sample them: byte by byte, which is not how the tokenizer writes them."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.size = len(tokenizer)
        self.stop: int = tokenizer.convert_tokens_to_ids(STOP)

    def spell(self, text: str, *, stop: bool = True) -> list[int]:
        """Ids of the text, each byte a token, tags whole; with the stop token at the end."""
        pieces = re.split(f"({'|'.join(map(re.escape, TAGS))})", text)
        ids = [token for piece in pieces for token in self._ids(piece)]
        return [*ids, self.stop] if stop else ids

    def _ids(self, piece: str) -> list[int]:
        names = [piece] if piece in TAGS else [LETTERS[byte] for byte in piece.encode()]
        return self.tokenizer.convert_tokens_to_ids(names)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
