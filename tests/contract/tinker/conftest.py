"""Each test that the page of the API names calls the route that it stands beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from rltool.tinker.server import TinkerServer
from tests.contract.tinker.tested_by import check_called


@pytest.fixture(autouse=True)
def calls_what_the_docs_say(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    servers: list[TinkerServer] = []
    app = TinkerServer.app

    def noted(server: TinkerServer) -> Any:
        servers.append(server)
        return app(server)

    monkeypatch.setattr(TinkerServer, "app", noted)
    yield
    check_called(request.node.name, {}, sum((server.requests for server in servers), Counter()))
