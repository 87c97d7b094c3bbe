"""The Megatron-core side: runtime (device, process groups, versions), model, weights, optimizer, one training step."""

import logging
import warnings


def quieten() -> None:
    """Leave out what other packages say here that is no user's business: nothing else of theirs."""
    # Megatron-core announces at import and at every save that Apex and Transformer Engine are absent, and that it calls
    # torch functions that will go away. Neither is the user's business: rltool brings its own modules, and pins what it
    # runs with.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings(
        "ignore", category=FutureWarning, module=r"megatron\.core|rltool\.megatron\.patches|torch\.distributed"
    )
    # 0.19: an escape sequence in a docstring of its inference code, which every process that compiles it prints.
    warnings.filterwarnings("ignore", category=SyntaxWarning, module=r".*megatron[/\\.]core")
    # 0.19 wants HybridModel in the place of GPTModel, which 0.16 lacks.
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
        lambda record: not record.getMessage().startswith("GPTModel IS DEPRECATED")
    )
    # FlashAttention 4 hands over an argument that its compiler does not take, and does not need.
    warnings.filterwarnings("ignore", category=UserWarning, message=r"(?s).*cannot be converted to a JitArgument")


quieten()
