"""Whether all nodes share the run directory, and whether the run's checkpoints fit on its disk."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.preflight import Finding
from ddp_lab.resilience.run_directory import find_launch
from ddp_lab.training.optimizer import MakeOptimizer, state_copies
from ddp_lab.world.runtime import Runtime

TOKEN_WAIT = 3.0  # seconds within which every node must see a new file; network file systems cache the absence of a file


def check_storage(runtime: Runtime, root: Path, name: str | None, size: int, kept: int, required: bool) -> list[Finding]:
    """Check that all nodes share `runs_dir` and that the run's checkpoints fit on its disk.

    Collective. Call it before anything is written.

    Args:
        runtime: The ranks.
        root: The config key `runs_dir`.
        name: The config key `name`.
        size: Bytes of one checkpoint.
        kept: Number of checkpoints that are kept.
        required: Whether a checkpoint that cannot be written ends the run.

    Raises:
        ConfigError: The nodes do not share the directory, or not even one checkpoint fits and `required` is true.
    """
    shared = [check_shared(root, runtime)] if runtime.nodes > 1 else []  # on a single node, RunDir checks the directory
    launch = runtime.launch  # all ranks take part
    found = runtime.agree(
        "free_disk", lambda: json.dumps(check_free_disk(root, name or find_launch(root, launch), size, kept, required))
    )
    return [*shared, Finding(*json.loads(found))]


def check_shared(root: Path, runtime: Runtime) -> Finding:
    """Check that every node can write to `root` and sees a file that rank 0 writes there. Collective.

    Raises:
        ConfigError: Rank 0 cannot write there, or another node does not see its file or cannot write.
    """
    here = socket.gethostname()

    def write() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            token = root / f".token-{here}-{os.getpid()}-{time.time_ns()}"
            token.touch()
        except OSError as error:
            raise ConfigError(
                f"runs_dir={root}: cannot create the run directory there ({error.strerror}). Use a directory that {here} can "
                "write to"
            ) from None
        return token.name

    token = root / runtime.agree("token", write)
    problem = "" if runtime.local_rank else _try_token(token, runtime.rank)
    problems = runtime.collect("token", problem)

    def conclude() -> None:
        token.unlink(missing_ok=True)
        if found := "; ".join(filter(None, problems or [])):  # only rank 0 runs this function, and it has the list
            raise ConfigError(
                f"runs_dir={root}: is not shared by all nodes: {found}. Use the absolute path of a directory on a file system "
                "that every node has mounted for writing"
            )

    runtime.agree("shared", conclude)
    return Finding("ok", "runs_dir", f"{root} is writable" + (" and shared" if runtime.nodes > 1 else ""))


def _try_token(token: Path, rank: int) -> str:
    """Return what is wrong with the directory of `token` on this node; an empty text if nothing is wrong."""
    here = socket.gethostname()
    deadline = time.monotonic() + TOKEN_WAIT
    while not token.exists():
        if time.monotonic() > deadline:
            return f"{here} does not see the file that rank 0 wrote there"
        time.sleep(0.1)
    own = token.with_name(f"{token.name}-{rank}")
    try:
        own.touch()
        own.unlink()
    except OSError as error:
        return f"{here} cannot write to it ({error.strerror})"
    return ""


def checkpoint_bytes(optimizer: MakeOptimizer, model: nn.Module, ema: bool = False) -> int:
    """Return the size in bytes of a checkpoint's tensors: the unsharded model, its averages and the optimizer's state.

    Args:
        optimizer: Constructs the optimizer of a list of parameters.
        model: The unsharded model.
        ema: Whether the weights are averaged.
    """
    parameters = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    return (1 + ema) * sum(tensor.nbytes for tensor in model.state_dict().values()) + state_copies(optimizer) * parameters


def check_free_disk(root: Path, name: str | None, size: int, kept: int, required: bool) -> Finding:
    """Check the free space on the node that calls it; disk quotas are not taken into account.

    The run needs space for the checkpoints that it keeps and the one being written, less those that it already has there.
    `name` is the run's directory in `root`; None if it is new. The other arguments are those of `check_storage`.
    """
    files = [path.stat() for path in (root / name / "checkpoints").rglob("*") if path.is_file()] if name else []
    held = sum({file.st_ino: file.st_size for file in files}.values())  # the best is a second name of a file, as a rule
    needed = max(size, (kept + 1) * size - held)
    folder = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    usage = shutil.disk_usage(folder)
    free = usage.free if usage.total else size  # of /proc, for example, which is not a disk: RunDir reports it
    text = (
        f"{free / 2**20:,.1f} MiB are free at {folder}; a checkpoint takes {size / 2**20:,.1f} MiB; the {kept} that are kept "
        f"and the one being written need {needed / 2**20:,.1f} MiB{' more' if held else ''}"
    )
    if free >= needed:
        return Finding("ok", "free disk", text)
    text = f"runs_dir={root}: {text}. Free some space, use another runs_dir, or lower checkpoint.keep"
    if free < size and required:
        raise ConfigError(text)
    return Finding("warning", "free disk", text)
