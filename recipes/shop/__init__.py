"""A small model learns to work a till with tools, as the policy of an agent of openai-agents."""
