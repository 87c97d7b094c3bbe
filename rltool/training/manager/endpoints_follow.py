"""The run's endpoints.json follows the fleet of a living run, so that `train --resume` begins with the engines that are
there now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rltool.engines.endpoints import Endpoints, EngineEndpoint, edit_endpoints
from rltool.errors import UsageError


class EndpointsFollow:
    """file: the run's own; where the run was given its engines by other means it is made at the first change. At each
    change of the fleet those that left are taken out, and all that are there are put in. What else stands there is
    other processes' business (serve-engines, router).

    log: a line for the user where it cannot be written; the run goes on.
    """

    def __init__(
        self, file: Path, engines: Iterable[EngineEndpoint], *, data_url: str | None, log: Callable[[str], None]
    ) -> None:
        self._file, self._data_url, self._log = file, data_url, log
        self._known = {engine.url for engine in engines}
        self._lock = threading.Lock()  # the training loop and the run's endpoint both come here

    def follow(self, ask: Callable[[], Sequence[EngineEndpoint]]) -> None:
        """ask: for the engines that are not leaving. Called here, so that the last answer is written
        last."""
        with self._lock:
            present = ask()
            urls = {engine.url for engine in present}
            if urls == self._known:
                return
            known, self._known = self._known, urls

            def change(endpoints: Endpoints) -> Endpoints:
                model = endpoints.model_with(known | urls)
                entry = endpoints.models.get(model)
                if entry is None:
                    return endpoints.with_engines(model, present, self._data_url)
                kept = [engine for engine in entry.engines if engine.url not in known ^ urls]
                kept_urls = {engine.url for engine in kept}
                missing = [engine for engine in present if engine.url not in kept_urls]
                return endpoints.with_engines(model, [*kept, *missing], entry.data_url or self._data_url)

            try:
                edit_endpoints(self._file, change)
                self._data_url = None  # written once: a router may be taken out of the file later
            except (OSError, UsageError) as error:
                self._log(f"{self._file} does not follow the fleet: {error}")
