"""The Megatron-core side: runtime (device, process groups, versions), model, weights, optimizer, one training step."""

import warnings

# Megatron-core announces at import and at every save that Apex and Transformer Engine are absent, and that it calls
# torch functions that will go away. Neither is the user's business: rltool brings its own modules, and pins what it
# runs with.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
warnings.filterwarnings(
    "ignore", category=FutureWarning, module=r"megatron\.core|rltool\.megatron\.patches|torch\.distributed"
)
