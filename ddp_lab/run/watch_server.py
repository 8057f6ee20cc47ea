"""The server of `ddp-lab watch`: one page, and what its script asks for as JSON.

| request | answer |
|---|---|
| GET / | the page, watch.html |
| GET /state | `Watched.state` |
| GET /curves | `Watched.curves` |
| GET /stacks | `Watched.answers` |
| POST /stacks | asks the ranks for their stacks |

It listens on 127.0.0.1 only. Any page in a browser on this machine can send requests there. So a
request must name this machine as its host, which excludes names that lead here only for a moment
(DNS rebinding). A POST needs the token that the page contains, which other pages cannot read. What
the run has written is shown as text and never becomes part of the page's code.
"""

import errno
import json
import secrets
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any
from urllib.parse import urlsplit

from ddp_lab.config.errors import ConfigError
from ddp_lab.run.watched import Watched

HERE = "127.0.0.1"
NAMES = (HERE, "localhost")  # of this machine, in the header Host
PAGE = Path(__file__).with_name("watch.html")
POLICY = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class WatchServer(ThreadingHTTPServer):
    """The server of the page of a run.

    Args:
        run: that is watched.
        port: to listen on; 0: a free one.

    Attributes:
        token: that a POST needs.
        address: of the page.

    Raises:
        ConfigError: the port cannot be used.
    """

    daemon_threads = True

    def __init__(self, run: Watched, port: int):
        self.run = run
        self.token = secrets.token_hex(16)
        self.lock = threading.Lock()  # `run` remembers what it has read
        try:
            super().__init__((HERE, port), Handler)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                reason = "another program listens there"
            raise ConfigError(
                f"--port {port}: cannot be used ({reason}). Choose another one, or --port 0 for a "
                "free one"
            ) from None
        self.address = f"http://{HERE}:{self.server_port}/"

    def server_bind(self) -> None:
        """Bind to the port, without asking the name service for the name of this machine."""
        TCPServer.server_bind(self)
        self.server_name = HERE
        self.server_port = int(self.server_address[1])


class Handler(BaseHTTPRequestHandler):
    """The answer to a request."""

    server: WatchServer  # pyright: ignore[reportIncompatibleVariableOverride]  # the only one
    timeout = 10  # seconds for a request, so that no thread waits for ever

    def do_GET(self) -> None:
        """Send the page or a part of it."""
        if not self._is_for_here():
            return
        run = self.server.run
        answers = {"/state": run.state, "/curves": run.curves, "/stacks": run.answers}
        path = urlsplit(self.path).path
        if path == "/":
            self._send_page()
        elif path in answers:
            with self.server.lock:
                answer = answers[path]()
            self._send_json(200, answer)
        else:
            self._send_json(404, {"error": f"{path}: there is no such page"})

    def do_POST(self) -> None:
        """Ask the ranks for their stacks."""
        if not self._is_for_here() or not self._is_from_page():
            return
        if urlsplit(self.path).path != "/stacks":
            self._send_json(404, {"error": f"{self.path}: there is no such page"})
            return
        try:
            with self.server.lock:
                number = self.server.run.ask_for_stacks()
        except ConfigError as error:
            self._send_json(409, {"error": str(error)})
            return
        self._send_json(200, {"request": number})

    def _is_for_here(self) -> bool:
        """Return whether the request names this machine as its host; refuse it if not."""
        host = self.headers.get("Host", "")
        # with another port if it comes through a tunnel, as by `ssh -L`
        name, _, port = host.partition(":")
        if name in NAMES and (port == "" or port.isdigit()):
            return True
        self._send_json(403, {"error": f"Host: {host}: must be {' or '.join(NAMES)}"})
        return False

    def _is_from_page(self) -> bool:
        """Return whether the request comes from the page; refuse it if not."""
        token = self.headers.get("X-Token", "")
        origin = self.headers.get("Origin")
        is_same_origin = origin in (None, f"http://{self.headers.get('Host', '')}")
        if is_same_origin and secrets.compare_digest(token.encode(), self.server.token.encode()):
            return True
        self._send_json(403, {"error": "the token is missing or wrong: use the button of the page"})
        return False

    def _send_page(self) -> None:
        nonce = secrets.token_hex(16)
        text = PAGE.read_text(encoding="utf-8")
        page = text.replace("@NONCE@", nonce).replace("@TOKEN@", self.server.token)
        self._send(200, "text/html; charset=utf-8", page.encode(), POLICY.format(nonce))

    def _send_json(self, code: int, record: dict[str, Any]) -> None:
        self._send(code, "application/json", json.dumps(record).encode())

    def _send(self, code: int, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the page asks every second."""
