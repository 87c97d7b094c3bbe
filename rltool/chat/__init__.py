"""Conversations: messages and tools as values, chat templates, how models write tool calls and reasoning."""
