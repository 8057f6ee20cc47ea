"""A headless Chromium that opens a page and reaches no other host than this one."""

import json
import os
import select
import subprocess
import sys
import time
from base64 import b64decode
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import which
from typing import Any

import pytest

OFF = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in OFF)]
# Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
WITH_PIPES = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
ANSWER = 120.0  # seconds that a command may take; the first one starts the browser


def command_of(folder: Path) -> list[str]:
    """Return the start of the command; skip the test where Chromium is not installed.

    `folder` is for its profile.
    """
    browser = which("chromium") or pytest.skip("there is no chromium")
    profile = [
        f"--user-data-dir={folder}/profile",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    return [browser, *FLAGS, *profile]


def open_page(address: str, folder: Path, *options: str) -> str:
    """Return what Chromium prints for a page; skip the test where it is not installed.

    `folder` is for its profile.
    """
    command = [*command_of(folder), *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout


class Page:
    """A page that a test drives, by the debugging protocol over pipes.

    Args:
        commands, answers: descriptors of the pipes.
        address: of the page.
    """

    def __init__(self, commands: int, answers: int, address: str):
        self._commands = commands
        self._answers = answers
        self._rest = b""
        self._number = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url=address)["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page's script."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write what the page looks like as a PNG file."""
        size = {"width": 1100, "height": 1600, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        path.write_bytes(b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + ANSWER
        while True:
            message = self._next(deadline)
            if message.get("id") == self._number:
                assert "result" in message, message
                return message["result"]

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select(
                [self._answers], [], [], max(0.0, deadline - time.monotonic())
            )
            assert ready, f"Chromium has not answered within {ANSWER:g} s"
            received = os.read(self._answers, 2**16)
            assert received, "Chromium has ended"
            self._rest += received
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


@contextmanager
def driven_page(address: str, folder: Path) -> Generator[Page]:
    """Yield a page in a browser that ends with the context; `folder` as in `open_page`."""
    to_browser = os.pipe()
    from_browser = os.pipe()
    ours = (to_browser[1], from_browser[0])
    theirs = (to_browser[0], from_browser[1])
    command = [sys.executable, "-c", WITH_PIPES, *map(str, theirs)]
    try:
        browser = subprocess.Popen(
            [*command, *command_of(folder), "--remote-debugging-pipe", "about:blank"],
            pass_fds=theirs,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield Page(*ours, address)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(browser.pid, 9)
            browser.wait()
    finally:
        for descriptor in (*ours, *theirs):
            os.close(descriptor)
