"""A real HTTP server that receives notices and answers as a test wants."""

from __future__ import annotations

import contextlib
import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from controlplane.local.certificates import Certificates
from tests.hosts import own_host

HOST = own_host(41)
Answer = Callable[[BaseHTTPRequestHandler], None]


def says(code: int, text: str = "", **headers: str) -> Answer:
    """Return an answer with a status and a text."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(text.encode())))
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


def drips(handler: BaseHTTPRequestHandler) -> None:
    """Send an endless answer, one byte at a time."""
    handler.send_response(500)
    handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            handler.wfile.write(b"x")
            handler.wfile.flush()
            time.sleep(0.05)


@dataclass
class HttpReceiver:
    """Keeps the received notices, and gives the chosen answer to each."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    answer: Answer = field(default_factory=lambda: says(202, "thanks"))


def certificates(folder: Path, address: str = HOST) -> Certificates:
    """Make certificates of a test authority, for the server's address."""
    made = Certificates(folder)
    made.make({"receiver": address})
    return made


@contextlib.contextmanager
def serving(port: int = 0, keys: Certificates | None = None) -> Iterator[HttpReceiver]:
    """Serve while the body runs; with keys, over HTTPS."""
    found = HttpReceiver("")

    class _Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.bodies.append(json.loads(body))
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            found.paths.append(self.path)
            found.answer(self)

        def log_message(self, *given: Any) -> None:
            pass

    class _Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, address: Any) -> None:
            pass

    server = _Quiet((HOST, port), _Handler)
    if keys is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(keys.folder / "receiver.crt", keys.folder / "receiver.key")
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    found.url = f"http{'s' if keys else ''}://{HOST}:{server.server_address[1]}/hook"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
