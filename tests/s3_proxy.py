"""A proxy in front of an S3 server that fails requests by plan, as networks and services do."""

from __future__ import annotations

import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

__all__ = ["Proxy", "Trouble", "Way", "proxied"]


class Way(StrEnum):
    """How a request goes wrong."""

    SLOW_DOWN = "503"
    CONFLICT = "409"
    DENIED = "403"
    RESET = "reset"
    """The connection is reset, nothing was done."""
    UNANSWERED = "unanswered"
    """It was done, then the connection is reset."""
    SILENT = "silent"
    """No answer comes for as long as the proxy lives."""


@dataclass
class Trouble:
    """One line of the plan: which requests go wrong, and how often."""

    way: Way
    method: str = "*"
    path: str = "*"
    after: int = 0
    times: int = 1


_BODIES = {
    Way.SLOW_DOWN: (503, "SlowDown", "Please reduce your request rate."),
    Way.CONFLICT: (409, "ConditionalRequestConflict", "A conflicting operation occurred."),
    Way.DENIED: (403, "AccessDenied", "Access Denied"),
}


class Proxy(ThreadingHTTPServer):
    """The proxy; `plan` may be changed at any time.

    `seen` has the requests so far, `changes` those that changed something, with what they stored.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = port
        self.plan: list[Trouble] = []
        self.seen: list[tuple[str, str]] = []
        self.changes: list[tuple[str, str, bytes]] = []
        self.dropped_headers: set[str] = set()
        self.at_once = 0
        self.at_once_max = 0
        self.came = threading.Event()
        self.ended = threading.Event()
        self.mutex = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def count(self, method: str = "*", path: str = "*") -> int:
        """How many requests of this kind came."""
        with self.mutex:
            return sum(fnmatchcase(m, method) and fnmatchcase(p, path) for m, p in self.seen)

    def drawn(self, method: str, path: str) -> Way | None:
        with self.mutex:
            self.seen.append((method, path))
            self.came.set()
            for trouble in self.plan:
                if not (fnmatchcase(method, trouble.method) and fnmatchcase(path, trouble.path)):
                    continue
                if trouble.after:
                    trouble.after -= 1
                elif trouble.times:
                    trouble.times -= 1
                    return trouble.way
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def _any(self) -> None:
        with self.server.mutex:
            self.server.at_once += 1
            self.server.at_once_max = max(self.server.at_once_max, self.server.at_once)
        try:
            self._answer()
        finally:
            with self.server.mutex:
                self.server.at_once -= 1

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _any

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        way = self.server.drawn(self.command, self.path)
        if way is Way.RESET:
            self._reset()
        elif way is Way.SILENT:
            self.server.ended.wait()
            self._reset()
        elif way in _BODIES:
            status, code, message = _BODIES[way]
            self._send(status, [], f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())
        else:
            status, headers, answer = self._forwarded(body)
            if way is Way.UNANSWERED:
                self._reset()
            else:
                self._send(status, headers, answer)

    def _forwarded(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        behind = http.client.HTTPConnection("127.0.0.1", self.server.behind, timeout=60)
        try:
            dropped = {"connection", *self.server.dropped_headers}
            headers = {key: value for key, value in self.headers.items() if key.lower() not in dropped}
            behind.request(self.command, self.path, body, headers)
            answer = behind.getresponse()
            if self.command in ("PUT", "DELETE") and answer.status < 300:
                with self.server.mutex:
                    self.server.changes.append((self.command, self.path, body))
            return answer.status, answer.getheaders(), answer.read()
        finally:
            behind.close()

    def _send(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for key, value in headers:
            if key.lower() in ("connection", "transfer-encoding"):
                continue
            if key.lower() == "content-length":
                length = value if self.command == "HEAD" else length
                continue
            self.send_header(key, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing; `Proxy.seen` has the requests."""


@contextmanager
def proxied(port: int) -> Iterator[Proxy]:
    """Run a proxy in front of the server on `port`."""
    proxy = Proxy(port)
    thread = threading.Thread(target=proxy.serve_forever, args=(0.05,), name="s3-proxy", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        proxy.shutdown()
        proxy.server_close()
        thread.join()
