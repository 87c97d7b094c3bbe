"""A router as a process of its own, for what does not depend on how sglang-router routes: it takes workers, lists
them, and forgets them when it dies."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODULE = "tests.contract.fakes.router_process"


class Handler(BaseHTTPRequestHandler):
    workers: list[dict] = []

    def do_GET(self) -> None:
        self.answer(200, {"workers": self.workers} if self.path == "/workers" else {})

    def do_POST(self) -> None:
        url = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["url"]
        worker = {"id": str(len(self.workers)), "url": url, "is_healthy": True, "model_id": "policy", "load": 0}
        self.workers.append(worker)
        self.answer(202, {"worker_id": worker["id"]})

    def answer(self, status: int, body: dict) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


if __name__ == "__main__":
    print("this is the fake router", flush=True)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
