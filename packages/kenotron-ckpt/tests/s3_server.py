"""An S3 server in this process: moto's, over HTTP, with faults that a test plants."""

from __future__ import annotations

import io
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

BUCKET = "runs"
KEY, SECRET = "test-key", "test-secret"

Fault = Callable[[WSGIEnvironment], str | None]
"""Answers a request with a status such as "503 Slow Down", or lets it pass (None)."""

_BODY = """<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>{code}</Code><Message>planted by the test</Message></Error>"""
_CODES = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}


class S3Server:
    """Counts what it was asked to store; ``fault`` is asked before each request."""

    def __init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self._server.port}"
        self.stored: Counter[str] = Counter()
        """How often each object was stored, by its key."""
        self.fault: Fault = lambda request: None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def reset(self) -> None:
        """An empty store with one bucket, and no faults."""
        self.fault = lambda request: None
        self.call("POST", "moto-api/reset")
        self.call("PUT", BUCKET)
        self.stored.clear()

    def call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """A request of the test's own, without any of the faults."""
        request = urllib.request.Request(f"{self.url}/{path}", data, method=method)
        request.add_header("Authorization", f"AWS4-HMAC-SHA256 Credential={KEY}/x/us-east-1/s3/y")
        request.add_header("Content-Type", "application/octet-stream")
        request.add_header("x-test", "own")
        with urllib.request.urlopen(request) as reply:
            return reply.read()

    def get(self, path: str) -> bytes:
        """The bytes of an object in the bucket."""
        return self.call("GET", f"{BUCKET}/{path}")

    def put(self, path: str, data: bytes) -> None:
        """Plant an object in the bucket."""
        self.call("PUT", f"{BUCKET}/{path}", data)

    def _answer(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        own = request.get("HTTP_X_TEST") == "own"
        status = None if own else self.fault(request)
        if status is not None:
            text = _BODY.format(code=_CODES[status[:3]]).encode()
            request["wsgi.input"].read(int(request.get("CONTENT_LENGTH") or 0))
            start(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(text)))])
            return [text]
        if request["REQUEST_METHOD"] == "PUT" and not own:
            with self._lock:
                self.stored[request["PATH_INFO"].removeprefix(f"/{BUCKET}/")] += 1
        return self._app(request, start)


def flip(request: WSGIEnvironment, *, unseen: bool) -> None:
    """Change the last byte of what a request brings; unseen: without a checksum that says so."""
    if unseen:
        for name in [name for name in request if name.startswith("HTTP_X_AMZ_CHECKSUM")]:
            del request[name]
    data = bytearray(request["wsgi.input"].read(int(request["CONTENT_LENGTH"])))
    data[-1] ^= 1
    request["wsgi.input"] = io.BytesIO(bytes(data))
