"""What the fork server of tests/e2e/commands.py imports.

Not Ray: where it was imported before the fork, two of some sixty commands on a busy host did not get past the token of
the Ray that they had started.
"""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # as in Job.environment: torch reads it once

for name in (
    "transformers.models.auto.tokenization_auto", "torch.distributed.tensor", "torch.utils.tensorboard",
    "rltool.commands.debug", "rltool.commands.train", "rltool.config.loader", "rltool.config.train",
    "rltool.training.checks.preflight", "rltool.megatron.trainer",
):  # fmt: skip
    importlib.import_module(name)
