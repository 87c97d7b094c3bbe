"""What the fork server of tests/e2e/commands.py imports, in this order."""

import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"  # as in Job.environment: torch reads it once

for name in (
    "transformers.models.auto.tokenization_auto", "torch.utils.tensorboard", "rltool.commands.debug",
    "rltool.commands.train", "rltool.training.prepare", "rltool.training.session",
):  # fmt: skip
    importlib.import_module(name)
