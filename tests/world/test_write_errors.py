"""What is said about files that cannot be written, from the errors of those who write them."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ddp_lab.world.write_errors import explain_write, system_error

LIMIT = 100 * 2**10  # bytes of a file, as of `ulimit -f 100`


def by_torch(path: Path) -> None:
    with path.open("wb") as file:
        torch.save({"weight": torch.zeros(100_000)}, file)


def by_safetensors(path: Path) -> None:
    save_file({"weight": torch.zeros(100_000)}, path)


def error_of(write: Callable[[], object]) -> Exception:
    """Return what a function raises."""
    try:
        write()
    except Exception as error:
        return error
    raise AssertionError("it was written")


@pytest.fixture
def limited():
    """Limit the size of files, for which Python ignores the signal SIGXFSZ."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "write", [by_torch, by_safetensors, lambda path: path.write_bytes(b"a" * 2**17)]
)
def test_limit_on_file_sizes_is_explained(write, limited, tmp_path):
    error = error_of(lambda: write(tmp_path / "file"))
    assert explain_write(error, tmp_path) == (
        "File too large: `ulimit -f` limits files to 100.0 KiB",
        "Raise this limit in the shell that starts the command, or ask for another one",
    )


def test_full_disk_is_explained_with_what_is_free(tmp_path, monkeypatch):
    error = error_of(lambda: by_torch(Path("/dev/full")))
    assert "enforce fail" in str(error) or isinstance(error, OSError)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 3 * 2**20}))
    assert explain_write(error, tmp_path) == (
        "No space left on device; without it 3.0 MiB are free there",
        "Free disk space",
    )


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EFBIG, "The file system of {tmp} allows smaller files only"),
        (errno.EDQUOT, "Delete files that count towards your quota"),
        (errno.EROFS, "Use a directory that you can write to"),
        (errno.EIO, "Check the disk of {tmp}"),
    ],
)
def test_reason_of_the_system_decides_the_remedy(number, remedy, tmp_path):
    error = RuntimeError("enforce fail")
    error.__context__ = OSError(number, os.strerror(number))
    assert explain_write(error, tmp_path) == (
        os.strerror(number),
        remedy.replace("{tmp}", str(tmp_path)),
    )


def test_error_without_a_reason_of_the_system_is_repeated(tmp_path):
    error = RuntimeError("unknown dtype.\nmore")
    assert system_error(error) is None
    assert explain_write(error, tmp_path) == ("unknown dtype", f"Check the disk of {tmp_path}")
