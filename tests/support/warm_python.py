"""A Python for hosts of tests whose launches are forked from the server of warm.py."""

import os
import shlex
import sys
from pathlib import Path

from warm import VARIABLE, programs


def write_warm_python(path: Path) -> None:
    """Write a program that executes `-c CODE` with this Python and starts others by warm ones."""
    start = f"import sys; sys.executable = {str(programs() / 'python')!r}; "
    server = os.environ.get(VARIABLE)
    lines = [
        "#!/bin/sh",
        *([f"export {VARIABLE}={shlex.quote(server)}"] if server else []),
        f'exec {shlex.quote(sys.executable)} -c {shlex.quote(start)}"$2"',
    ]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o755)
