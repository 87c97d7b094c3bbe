"""The run's endpoints.json follows the fleet of a living run, so that `train --resume` begins with the engines that are
there now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rltool.engines.endpoints import Endpoints, EngineEndpoint, edit_endpoints
from rltool.errors import UsageError


class EndpointsFollow:
    """file: the run's own. Only what has changed since the start is changed in it: engines that came are put in, those
    that left taken out. What else stands there is other processes' business (serve-engines, router).

    Where the run was given its engines by other means there is no such file; then it is made, with the whole fleet, at
    the first change. say: a line for the user where it cannot be written; the run goes on.
    """

    def __init__(
        self, file: Path, engines: Iterable[EngineEndpoint], *, data_url: str | None, say: Callable[[str], None]
    ) -> None:
        self._file, self._data_url, self._say = file, data_url, say
        self._known = {engine.url for engine in engines}
        self._lock = threading.Lock()  # the training loop and the run's endpoint both come here

    def follow(self, ask: Callable[[], Sequence[EngineEndpoint]]) -> None:
        """ask: for the engines that have not been told to leave. Called here, so that the last answer is written
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
                came = [engine for engine in present if engine.url not in known]
                return endpoints.with_engines(model, [*kept, *came], entry.data_url)

            try:
                edit_endpoints(self._file, change)
            except (OSError, UsageError) as error:
                self._say(f"{self._file} does not follow the fleet: {error}")
