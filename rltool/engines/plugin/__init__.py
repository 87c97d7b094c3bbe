"""What runs inside a vLLM server: the weight receiver, the guard, and SGLang's /generate.

vLLM loads `register` in every process of every server on this environment, so it must be cheap, may run several times,
and must change nothing unless the backend "rltool" or the middleware is asked for on the command line, or the
environment sets it. Not here: what the driver does with a server.
"""

from rltool.engines.plugin.outputs import hold_outputs
from rltool.engines.plugin.patches import (
    fork_engine_processes,
    keep_causal_blocks,
    limit_busy_loop,
    reset_hashed_blocks,
)

BACKEND = "rltool"


def register() -> None:
    """Make `--weight-transfer-config '{"backend": "rltool"}'` known to vLLM, limit_busy_loop,
    fork_engine_processes, hold_outputs, reset_hashed_blocks and keep_causal_blocks.

    Idempotent; imports no receiver yet."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "rltool.engines.plugin.receiver", "WeightReceiver")
    limit_busy_loop()
    fork_engine_processes()
    hold_outputs()
    reset_hashed_blocks()
    keep_causal_blocks()
