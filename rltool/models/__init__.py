"""Model families: from a Hugging Face config.json to Megatron's configuration, names and shapes, and back.
No Megatron here."""
