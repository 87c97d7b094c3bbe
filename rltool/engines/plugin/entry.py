"""What `--middleware` names on the command line of a vLLM server.

Importing this module reads the key. It must fail here, while the server is built: an error in a middleware's
constructor comes with the first ASGI event, and uvicorn (lifespan "auto") would swallow it and listen.
"""

from __future__ import annotations

import os

from rltool.engines.plugin.guard import read_key
from rltool.engines.plugin.server import ServerMiddleware

_KEY = read_key()


class RltoolMiddleware(ServerMiddleware):
    """ServerMiddleware with the key and the boot id of this process's environment."""

    def __init__(self, app) -> None:
        super().__init__(app, key=_KEY, boot_id=os.environ.get("RLTOOL_BOOT_ID"))
