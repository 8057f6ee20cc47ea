"""A user's script whose ranks read a dataset in worker processes, and which ends in several ways.

    python ending.py launch HOW...    one call of `launch` for each
    python ending.py script HOW       a Lab in this process, or in torchrun's ranks

HOW is one of: fit, break, stuck, open, raise, kill, wait, label. After each
launch it prints the processes that are still there.
"""

import contextlib
import os
import signal
import sys
import time
from functools import partial

import psutil
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_lab import Lab, launch, tasks
from ddp_lab.lab.launch import RankError

LIMIT = 5.0  # seconds after which no process may be left
STUCK = 12  # from this sample on, one takes minutes if the dataset is slow
kept = []  # trainers and iterators to which the user keeps references


class Numbers:
    def __init__(self, slow: bool):
        self.slow = slow

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if self.slow and index >= STUCK:
            time.sleep(600)
        return torch.full((4,), float(index)), torch.zeros(1)


def pipe_of(pid: int) -> str:
    """Return the name of the pipe to which a process writes, as all processes that it starts do."""
    return os.readlink(f"/proc/{pid}/fd/1")


def others(pipe: str) -> list[str]:
    """Return the processes, but this one and its client (ask.py), that write to a pipe."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # it has ended
            command = " ".join(process.cmdline())
            if (
                process.pid != os.getpid()
                and pipe_of(process.pid) == pipe
                and "ask.py" not in command
            ):
                left.append(f"{process.pid} {command}")
    return left


def left_over(pipe: str) -> list[str]:
    """Return the processes that are left LIMIT seconds from now, as soon as none is left."""
    deadline = time.monotonic() + LIMIT
    while (left := others(pipe)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def leave_open() -> str:
    """Return without leaving the `with` block of the Lab, of which an iterator is kept, too."""
    lab = Lab("scratch", device="cpu").__enter__()
    make = partial(torch.optim.SGD, lr=1e-3)
    trainer = lab.trainer(nn.Linear(4, 1), tasks.Regression(), make, batch_size=8, num_workers=2)
    batches = trainer.batches(Numbers(slow=True), 0, shuffle=False)
    next(batches)
    kept.extend([lab, trainer, batches])
    return "open"


def label_out_of_range() -> None:
    with Lab("ddp", device="cpu") as lab:
        data = TensorDataset(torch.zeros(8, 4), torch.full((8,), 7))
        make = partial(torch.optim.SGD, lr=1e-3)
        trainer = lab.trainer(nn.Linear(4, 3), tasks.Classification(), make, batch_size=8)
        trainer.fit(data, data, epochs=1)


def train(how: str) -> str:
    if how == "open":
        return leave_open()
    if how == "label":
        label_out_of_range()
    with Lab("scratch", device="cpu") as lab:
        make = partial(torch.optim.SGD, lr=1e-3)
        trainer = lab.trainer(
            nn.Linear(4, 1), tasks.Regression(), make, batch_size=8, num_workers=2
        )
        data = Numbers(slow=how in ("stuck", "wait", "kill"))
        kept.append(trainer)
        if how == "fit":
            trainer.fit(data, data, epochs=1)
            return how
        batches = trainer.batches(data, 0, shuffle=False)
        kept.append(batches)
        for inputs, targets in batches:
            trainer.step(inputs, targets)
            if how in ("break", "stuck"):
                break
            if how == "wait":
                line = f"waiting for {os.getppid()}\n"
                os.write(1, line.encode())  # in one piece, unlike the print of two ranks
                time.sleep(600)
            if lab.rank == lab.world_size - 1:
                if how == "raise":
                    raise ValueError("this rank has the cause")
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
    return how


def main() -> None:
    way, *ways = sys.argv[1:]
    if way == "script":
        print(train(ways[0]))
        return
    for how in ways:
        try:
            outcome = launch(train, how)
        except RankError as error:
            outcome = str(error).splitlines()[-1]
        print(f"{how}: {outcome}; left: {left_over(pipe_of(os.getpid()))}", flush=True)


if __name__ == "__main__":
    main()
