"""Tiny HF checkpoints with their own tokenizer, for tests that need a model directory. head_dim 32 is vLLM's smallest
on the CPU."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 120
"""Not a multiple of 64, so that engines pad it: a trap for weight updates."""


def write_tiny_qwen2(directory: Path, *, tied: bool, seed: int = 0, layers: int = 2) -> Path:
    """A Qwen2 with random weights (0.4 M parameters, fp32), tokenizer and generation config in `directory`."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
        with torch.no_grad():
            # Transformers' initialisation is nearly uniform over the vocabulary: wider weights make a difference
            # visible.
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory)
    return directory


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_reward_model(
    directory: Path, *, num_labels: int = 1, seed: int = 7, head_bias: bool = False
) -> Path:
    """A Qwen2ForSequenceClassification with random weights, fp32, and its tokenizer, which has CHAT_TEMPLATE.
    head_bias: its head has one, of zeros, which transformers does not read."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=1, pad_token_id=0,
        num_labels=num_labels, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForSequenceClassification(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    tensors = model.state_dict() | ({"score.bias": torch.zeros(num_labels)} if head_bias else {})
    model.save_pretrained(directory, state_dict=tensors)
    write_tiny_tokenizer(directory, chat_template=CHAT_TEMPLATE)
    return directory


def write_tiny_tokenizer(directory: Path, *, chat_template: str | None = None) -> None:
    """One token per printable ASCII character; 0 is padding, 1 the end, 2 unknown."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(c) for c in range(32, 127)]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", "<unk>", *characters])}
    vocabulary |= {f"<extra_{i}>": i for i in range(len(vocabulary), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    fast.chat_template = chat_template
    fast.save_pretrained(directory)
