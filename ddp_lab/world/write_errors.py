"""Why a file could not be written: the error of the operating system, and what to do about it.

torch and safetensors raise errors of their own, of which only the causes or the texts have it.
"""

import errno
import os
import re
import resource
import shutil
from pathlib import Path
from typing import NamedTuple

from ddp_lab.world.device import size

# errors that another directory mends
PLACES = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
)


class WriteError(NamedTuple):
    """An explanation.

    Attributes:
        reason: Why the file could not be written, to be put in brackets.
        remedy: A sentence without its full stop.
    """

    reason: str
    remedy: str


def system_error(error: BaseException | None) -> OSError | None:
    """Return the error of the operating system that has caused an error; None if none has.

    Args:
        error: Of Python; or of torch.save, whose cause it is ("enforce fail", says torch); or of
            safetensors, whose text ends with its number.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number:
            return OSError(int(number[1]), os.strerror(int(number[1])))
        error = error.__cause__ or error.__context__
    return None


def explain_write(error: BaseException, folder: Path) -> WriteError:
    """Explain why a file could not be written.

    Args:
        error: What the attempt has raised.
        folder: The directory of the file.
    """
    cause = system_error(error)
    if cause is None:
        return WriteError(str(error).partition("\n")[0].rstrip("."), f"Check the disk of {folder}")
    reason = cause.strerror or str(cause)
    if cause.errno == errno.EFBIG:
        limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if limit == resource.RLIM_INFINITY:
            return WriteError(reason, f"The file system of {folder} allows smaller files only")
        return WriteError(
            f"{reason}: `ulimit -f` limits files to {size(limit)}",
            "Raise this limit in the shell that starts the command, or ask for another one",
        )
    if cause.errno == errno.ENOSPC:
        free = shutil.disk_usage(folder).free if folder.exists() else 0
        return WriteError(f"{reason}; without it {size(free)} are free there", "Free disk space")
    if cause.errno == errno.EDQUOT:
        return WriteError(reason, "Delete files that count towards your quota")
    if cause.errno in PLACES:
        return WriteError(reason, "Use a directory that you can write to")
    return WriteError(reason, f"Check the disk of {folder}")
