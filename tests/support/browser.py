"""A headless Chromium that opens a page and reaches no other host than this one."""

import subprocess
from pathlib import Path
from shutil import which

import pytest

OFF = ("gpu", "quic", "background-networking", "component-update", "sync", "dev-shm-usage")
FLAGS = ["--headless=new", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in OFF)]


def open_page(address: str, folder: Path, *options: str) -> str:
    """Return what Chromium prints for a page; skip the test where it is not installed.

    `folder` is for its profile.
    """
    browser = which("chromium") or pytest.skip("there is no chromium")
    profile = [
        f"--user-data-dir={folder}/profile",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    command = [browser, *FLAGS, *profile, *options, address]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=True).stdout
