"""Contract tests that users run on what they give the driver, in their own test suites.

from rltool.training.contracts import check_logger
def test_my_logger():
    check_logger("my_package.loggers:to_our_database")
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from rltool.errors import ContractViolation, UsageError
from rltool.training.observe.loggers import LoggedRun, own_logger


def check_logger(path: str) -> None:
    """ContractViolation unless monitor.logger = path gives a logger that takes what a run logs: the evaluation before
    the first step, steps, an evaluation that ended late under an earlier step, and the steps that a resumed run does
    again. It must leave the numbers as they are, for other loggers get the same."""
    with tempfile.TemporaryDirectory() as directory:
        for first_step, steps in ((0, (-1, 0, 1, 0)), (1, (1, 2))):
            run = LoggedRun("contract", "0" * 32, Path(directory), {"optimizer.lr": 1e-6}, first_step)
            try:
                logger = own_logger(path, run)
                for step in steps:
                    metrics = {"train/loss": 0.5, "rollout/reward_mean": 0.25}
                    logger.log(step, metrics)
                    if metrics != {"train/loss": 0.5, "rollout/reward_mean": 0.25}:
                        raise ContractViolation(f"{path}: log() changed the metrics, which other loggers get as well")
                logger.close()
            except UsageError as error:
                raise ContractViolation(f"{path}: {error}") from error
            except ContractViolation:
                raise
            except Exception as error:
                raise ContractViolation(f"{path}: raised {type(error).__name__}: {error}") from error
