"""What a process does that runs a user's step: it opens the group, calls the step, and reports."""

import os
import pickle
import random
import resource
import sys
import sysconfig
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddp_lab.config.causes import is_secondary
from ddp_lab.config.errors import ConfigError, describe_error, place_of

HOST = "127.0.0.1"
MARGIN = 60.0  # seconds
# Set by a launcher; a step with one rank must not see them.
OF_LAUNCHERS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
)


@dataclass(frozen=True)
class Place:
    """Which rank a process is.

    Attributes:
        rank, world_size: of this process.
        port: of the store of the ranks.
        timeout: seconds for all calls of the step.
    """

    rank: int
    world_size: int
    port: int
    timeout: float


@dataclass(frozen=True)
class Answer:
    """What a process reports of one call of the step.

    Attributes:
        kind: passed; raised, an exception; import, the step cannot be loaded; or waits.
        text: the error, or where the process is.
        tensors: the result, if the step has passed.
        is_secondary: whether the error most likely follows from the end of another rank.
        is_last: whether no answer of this rank follows, because its process cannot continue.
    """

    kind: str
    text: str = ""
    tensors: Mapping[str, Tensor] | None = None
    is_secondary: bool = False
    is_last: bool = False


def run_rank(place: Place, payload: bytes, batches: bytes, pipe: Connection) -> None:
    """Call the step for each batch, and send an answer for each. The parent ends this process.

    Args:
        place: which rank this is.
        payload: the pickled step.
        batches: pickled, a list; all but the first are of one rank only.
        pipe: to the parent.
    """
    prepare(place)
    main = threading.get_ident()

    def watch() -> None:
        try:
            pipe.recv()
            pipe.send_bytes(pickle.dumps(Answer("waits", location(main))))
        except (EOFError, OSError):  # the parent has ended
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        step = pickle.loads(payload)
        inputs = pickle.loads(batches)
        join_group(place)
        states = (torch.get_rng_state(), random.getstate())
        for batch in inputs:
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            pipe.send_bytes(pickle.dumps(call(step, place, batch)))
    except Exception as error:
        answer = Answer("raised", describe_error(error), None, is_secondary(error), is_last=True)
        pipe.send_bytes(pickle.dumps(answer))
    # A rank that ended would end the others' connections. The parent kills it.
    while True:
        time.sleep(3600)


def prepare(place: Place) -> None:
    """Set the environment variables of torchrun, or remove them, and use one thread."""
    for name in OF_LAUNCHERS:
        os.environ.pop(name, None)
    if place.world_size > 1:
        numbers = {
            "RANK": place.rank,
            "LOCAL_RANK": place.rank,
            "WORLD_SIZE": place.world_size,
            "LOCAL_WORLD_SIZE": place.world_size,
            "GROUP_RANK": 0,
            "MASTER_PORT": place.port,
        }
        os.environ |= {name: str(value) for name, value in numbers.items()}
        os.environ |= {
            "MASTER_ADDR": HOST,
            "TORCHELASTIC_RUN_ID": "verify",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # gloo aborts on tensors of different sizes


def join_group(place: Place) -> None:
    """Open the process group of several ranks."""
    if place.world_size > 1:
        # The parent ends the ranks before, and asks where they wait.
        timeout = timedelta(seconds=place.timeout + MARGIN)
        dist.init_process_group("gloo", timeout=timeout)


def call(step: Any, place: Place, batch: Any) -> Answer:
    """Call the step and return its tensors, or what is wrong."""
    try:
        returned = step(place.rank, place.world_size, batch)
        return Answer("passed", tensors=checked(returned))
    except SystemExit as error:
        code = "" if error.code is None else error.code
        return Answer("raised", f"it called sys.exit({code}){place_of(error)}")
    except ConfigError as error:
        return Answer("raised", str(error))
    except Exception as error:
        return Answer("raised", describe_error(error), is_secondary=is_secondary(error))


def checked(returned: Any) -> dict[str, Tensor]:
    """Return copies of the tensors that a step has returned, complete ones of sharded tensors.

    Raises:
        ConfigError: it is no mapping of names to tensors.
    """
    allowed = "Return a mapping of names to tensors, for example of gradients"
    if not isinstance(returned, Mapping):
        raise ConfigError(f"step returned {type(returned).__name__}. {allowed}")
    tensors = dict[str, Tensor]()
    for name, value in cast("Mapping[Any, Any]", returned).items():
        if value is None:  # a parameter without a gradient
            continue
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ConfigError(f"step returned {name!r}: {type(value).__name__}. {allowed}")
        tensor = value.detach()
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if tensor.is_sparse:
            tensor = tensor.to_dense()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        tensors[name] = tensor.cpu().contiguous().clone()
    return tensors


def location(thread: int) -> str:
    """Return the line of the user's code at which a thread is, innermost first."""
    frame: FrameType | None = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    others = [
        Path(__file__).parents[1],
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    ]
    name = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("distributed_c10d.py"):
            name = frame.f_code.co_name
        if not file.startswith("<") and not any(path in Path(file).parents for path in others):
            state = f"waits in {name}" if name else "is busy"
            return f"{state} ({Path(file).name}, line {frame.f_lineno})"
        frame = frame.f_back
    return "has returned from step"
