"""An S3 server on loopback: HTTP in front of moto, which keeps the buckets. For clients in other processes.

moto's own server needs Flask and more; what this one adds to `mock_aws` is a socket. Run as a module it prints its
address, and serves until its standard input ends.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

MOCKED = "https://s3.us-east-1.amazonaws.com"
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
"""Of a client, beside AWS_ENDPOINT_URL_S3."""
NOT_PASSED_ON = {"connection", "content-length", "date", "server", "transfer-encoding"}
"""Headers of a reply that this server writes itself."""


@contextmanager
def s3_server(log: Path) -> Iterator[str]:
    """Its address, until the block ends. log: gets a line for each request, METHOD PATH STATUS."""
    argv, piped = [sys.executable, "-m", "tests.s3_server"], subprocess.PIPE
    with log.open("w") as file, subprocess.Popen(argv, stdin=piped, stdout=piped, stderr=file, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            assert address, log.read_text()
            yield address
        finally:
            process.stdin.close()
            try:
                process.wait(30)
            finally:
                process.kill()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    one_at_a_time = threading.Lock()

    def _answer(self) -> None:
        import requests

        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
        with self.one_at_a_time:
            reply = requests.request(
                self.command, MOCKED + self.path, headers=headers, data=body, allow_redirects=False, timeout=60
            )
        self.send_response(reply.status_code)
        for name, value in reply.headers.items():
            if name.lower() not in NOT_PASSED_ON:
                self.send_header(name, value)
        # That of an object that a HEAD request asks about.
        length = reply.headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(reply.content))
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _answer

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        sys.stderr.write(f"{self.command} {self.path} {int(code)}\n")
        sys.stderr.flush()


def _serve() -> None:
    from moto import mock_aws

    with mock_aws(), ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{server.server_port}", flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    _serve()
