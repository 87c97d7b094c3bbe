"""A Hugging Face checkpoint small enough to learn on two CPU cores, with a tokenizer of single characters."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + " =>:.,?!-"
"""With the three special tokens exactly 64: a vocabulary that no padding (to multiples of 64) changes."""

HEAD_DIM = 32
"""vLLM's CPU attention does not take 16."""


def make_tiny_model(
    directory: Path, *, seed: int, layers: int = 4, hidden: int = 128, vocabulary: int | None = None
) -> Path:
    """Write config, weights, tokenizer and generation config of a randomly initialised Qwen2 with tied embeddings.

    The defaults have 0.7 million parameters. vocabulary: the model's, at least the tokenizer's 64; tokens beyond those
    decode to nothing. The same seed gives the same weights. Returns `directory`.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    tokenizer = make_tokenizer()
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert isinstance(stop, int) and isinstance(pad, int)
    config = Qwen2Config(
        vocab_size=vocabulary or len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM,
        num_key_value_heads=hidden // HEAD_DIM // 2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=stop, pad_token_id=pad)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


VISION_TOKENS = {
    "vision_start": "<|vision_start|>", "vision_end": "<|vision_end|>", "image": "<|image_pad|>",
    "video": "<|video_pad|>",
}  # fmt: skip
PICTURE_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type in ('image', 'image_url') %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""Of Qwen3-VL's chat template what concerns pictures."""


def make_tiny_vision_model(directory: Path, *, seed: int, layers: int = 4, hidden: int = 128) -> Path:
    """Likewise of a Qwen3-VL: a vision tower with patches of 8 pixels, of which 2 x 2 are a token, features that the
    first two layers add, and an image processor that makes 1 to 16 tokens of a picture."""
    import torch
    from transformers import GenerationConfig, Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.qwen3_vl import Qwen3VLVideoProcessor

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(VISION_TOKENS.values())})
    tokenizer.chat_template = PICTURE_TEMPLATE
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    ids: dict[str, Any] = {f"{x}_token_id": tokenizer.convert_tokens_to_ids(name) for x, name in VISION_TOKENS.items()}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    text = dict(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIM, num_key_value_heads=hidden // HEAD_DIM // 2, head_dim=HEAD_DIM,
        max_position_embeddings=256, initializer_range=0.05, bos_token_id=None, eos_token_id=stop, pad_token_id=pad,
        tie_word_embeddings=True, rope_parameters=rope, dtype="float32",
    )  # fmt: skip
    vision = dict(
        depth=3, hidden_size=64, intermediate_size=128, num_heads=2, patch_size=8, spatial_merge_size=2,
        temporal_patch_size=2, out_hidden_size=hidden, num_position_embeddings=64, deepstack_visual_indexes=[0, 1],
        initializer_range=0.1,
    )  # fmt: skip
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, dtype="float32", **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(do_sample=True, temperature=1.0, eos_token_id=stop, pad_token_id=pad)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for processor in (Qwen2VLImageProcessor, Qwen3VLVideoProcessor):
        processor(
            patch_size=8, merge_size=2, temporal_patch_size=2, size={"shortest_edge": 16**2, "longest_edge": 64**2},
            image_mean=[0.5] * 3, image_std=[0.5] * 3,
        ).save_pretrained(directory)  # fmt: skip
    return directory


def make_tokenizer():
    """A transformers PreTrainedTokenizerFast: one token per character, neither BOS nor EOS added; characters it does
    not know are dropped.

    Byte-level BPE without merges, as Qwen's own tokenizers are: for a Qwen2 config AutoTokenizer replaces whatever
    other pre-tokenizer and decoder the file has by Qwen's, without a word, and spaces would be lost. That class also
    wants an unknown token; without one it would add Qwen's own, beyond the model's vocabulary.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    byte_level_space = "\u0120"
    vocabulary = {token: i for i, token in enumerate((PAD, EOS, UNK, *CHARACTERS.replace(" ", byte_level_space)))}
    backend = Tokenizer(models.BPE(vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNK, clean_up_tokenization_spaces=False
    )
