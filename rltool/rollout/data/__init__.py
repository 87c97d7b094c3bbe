"""Prompts: data sets by name, rows that become prompts, and the order in which they are drawn.

Not here: samples and what becomes of them.
"""

from rltool.rollout.data.load import PromptSet, data_summary, load_prompts
from rltool.rollout.data.prompt import Prompt
from rltool.rollout.data.source import PromptSource, PromptSupply

__all__ = ["Prompt", "PromptSet", "PromptSource", "PromptSupply", "data_summary", "load_prompts"]
