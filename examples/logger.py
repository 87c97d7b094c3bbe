"""A logger: metrics as lines of a CSV file."""

import csv
from collections.abc import Mapping

from rltool.api import LoggedRun


class CsvLogger:
    """Lines of step, name, value. A resumed run drops what it will log again."""

    def __init__(self, run: LoggedRun) -> None:
        file = run.directory / "metrics.csv"
        earlier = csv.reader(file.read_text().splitlines() if file.exists() else [])
        kept = [row for row in earlier if int(row[0]) < run.first_step]
        self._file = file.open("w", newline="")
        self._writer = csv.writer(self._file)
        self._writer.writerows(kept)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._writer.writerows([step, name, value] for name, value in sorted(metrics.items()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def csv_file(run: LoggedRun) -> CsvLogger:
    """monitor.logger = "examples.logger:csv_file"; writes RUN/metrics.csv."""
    return CsvLogger(run)
