"""The files of ddp_lab that a run loads, or that its calls pass through."""

import sys
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import ddp_lab

ROOT = Path(ddp_lab.__file__).parent


def name_of(file: str) -> str | None:
    """Return the name of a file of ddp_lab, as training/loop.py; None: another file."""
    path = Path(file)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None


def loaded_files() -> list[str]:
    """Return the files of ddp_lab that this process has loaded."""
    modules = [
        module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] == "ddp_lab"
    ]
    names = [name_of(module.__file__) for module in modules if getattr(module, "__file__", None)]
    return [name for name in names if name is not None]


def files_on_stack() -> list[str]:
    """Return the files of ddp_lab whose functions are on the stack, outermost first, each once."""
    names = [name_of(frame.filename) for frame in traceback.extract_stack()]
    return list(dict.fromkeys(name for name in names if name is not None))


@contextmanager
def calls() -> Generator[list[str]]:
    """Return a list that gets the file of each call of a function of ddp_lab in the body.

    A generator's next part counts, too.
    """
    names: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and (name := name_of(frame.f_code.co_filename)):
            names.append(name)

    sys.setprofile(note)
    try:
        yield names
    finally:
        sys.setprofile(None)


def after_each(owner: Any, method: str, react: Callable[[], None]) -> None:
    """Call a function after each call of a method of a class, from now on."""
    original = getattr(owner, method)

    def changed(self: Any, *arguments: Any, **options: Any) -> Any:
        result = original(self, *arguments, **options)
        react()
        return result

    setattr(owner, method, changed)
