"""A worker process of a loader that is killed: the signal, the likely reason and what to do."""

import multiprocessing
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import launches
import pytest
import torch
from torch import nn

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import SampleError
from ddp_lab.data.lost_worker import RaisesOnce, find_ended, find_lost_worker, raise_once
from ddp_lab.lab.launch import RankError, launch

SIZE = 40
BAD = 21
KILLED = (
    "was killed by SIGKILL, most likely by the system because the memory of the machine or of the "
    "container was used up"
)
FEWER = (
    "Use fewer worker processes (data.num_workers, in a Lab num_workers) or a smaller batch_size"
)


class Kills:
    """Images, one of which ends the process that reads it, as the system does without memory."""

    def __init__(self, split: str = "train"):
        self.parent = os.getpid()

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        if index == BAD and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1, 8, 8), 0


def train() -> None:
    with Lab("ddp", device="cpu") as lab:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        make = partial(torch.optim.SGD, lr=0.1)
        trainer = lab.trainer(model, tasks.Classification(), make, batch_size=4, num_workers=2)
        data = Kills()
        trainer.fit(data, data, epochs=1)


def print_outcome() -> None:
    try:
        launch(train)
    except RankError as error:
        print(error)


def test_killed_worker_process_under_launch_is_one_message():
    done = launches.call_in_process(print_outcome, timeout=100)
    first, empty, line = done.stdout.splitlines()
    assert first in ("rank 0 raised:", "rank 1 raised:")
    assert empty == ""
    assert line.startswith("SampleError: a worker process that reads the dataset (pid "), line
    # the system does not always report the signal of a forked server's child
    assert KILLED in line or "has exited: it was killed, most likely because memory" in line
    assert FEWER in line
    assert done.stderr == ""


def test_killed_worker_process_of_the_command_is_one_message(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    options = [
        "data=own",
        "data.dataset._target_=test_lost_worker.Kills",
        "data.num_classes=2",
        "data.image_size=8",
    ]
    options += ["data.num_workers=2", "data.mean=[0]", "data.std=[1]", "model=simple_cnn"]
    options += ["epochs=9", "batch_size=4", f"runs_dir={tmp_path}"]
    code, printed = launches.launch("ddp-lab train --nproc 1", *options)
    assert code != 0
    # Whoever reads the exit status of a forked server's child second does not learn the signal.
    messages = printed.count(KILLED) + printed.count(
        "has exited: it was killed, most likely because memory"
    )
    assert messages == 1, printed
    assert "Traceback" not in printed
    assert "RuntimeError" not in printed


def test_loader_that_reads_a_batch_explains_a_lost_worker_process():
    with Lab(device="cpu") as lab:
        make = partial(torch.optim.SGD, lr=0.1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        trainer = lab.trainer(model, tasks.Classification(), make, batch_size=4, num_workers=1)
        with pytest.raises(SampleError, match=KILLED):
            list(trainer.batches(Kills(), 0))
        assert isinstance(signal.getsignal(signal.SIGCHLD), RaisesOnce)


class KillsAll(Kills):
    """Images, one of which ends all processes that read them, as the system does without memory."""

    def __getitem__(self, index):
        return torch.zeros(1, 8, 8), 0


def train_until_all_are_killed() -> None:
    with Lab("ddp", device="cpu") as lab:
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
        make = partial(torch.optim.SGD, lr=0.1)
        trainer = lab.trainer(model, tasks.Classification(), make, batch_size=4, num_workers=2)
        data = KillsAll()
        for step, batch in enumerate(trainer.batches(data, 0)):
            if step == 1:
                trainer.evaluate(data)  # by two other processes
                for worker in multiprocessing.active_children():
                    os.kill(worker.pid, signal.SIGKILL)
            trainer.step(*batch)


def print_outcome_of_all() -> None:
    try:
        launch(train_until_all_are_killed, nproc=1)
    except RankError as error:
        print(error)


def test_all_worker_processes_killed_at_once_are_one_message():
    for _ in range(3):  # the signals arrive at different places
        done = launches.call_in_process(print_outcome_of_all, timeout=100)
        line = done.stdout.splitlines()[-1]
        assert line.startswith("SampleError: a worker process that reads the dataset (pid "), line
        assert done.stderr == ""


def test_second_lost_worker_raises_no_error_until_a_loader_starts_again():
    """The second error would come while the first one is handled, where Python prints it."""

    def fail(number, frame):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")

    before = signal.signal(signal.SIGCHLD, fail)
    try:
        raise_once()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="pid 7"):
                signal.raise_signal(signal.SIGCHLD)
            signal.raise_signal(signal.SIGCHLD)
            raise_once()
        in_thread = threading.Thread(target=raise_once)  # where signals cannot be set
        in_thread.start()
        in_thread.join(10)
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def test_own_handler_is_called_after_an_error_about_a_lost_worker():
    lost = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    users = RuntimeError("an error of a user")
    raised = [users, lost, users, lost, None]
    calls = []

    def handle(number, frame):
        calls.append(number)
        if (error := raised[len(calls) - 1]) is not None:
            raise error

    handler = RaisesOnce(handle)
    for error in (users, lost, users):
        with pytest.raises(RuntimeError, match=str(error).partition("(")[0]):
            handler(signal.SIGCHLD, None)
    handler(signal.SIGCHLD, None)
    handler(signal.SIGCHLD, None)
    assert calls == [signal.SIGCHLD] * len(raised)


def test_failure_of_closing_hides_neither_the_cause_nor_the_rest_of_the_exit():
    make = partial(torch.optim.SGD, lr=0.1)

    def fail():
        raise RuntimeError("DataLoader worker (pid 8) is killed by signal: Killed. ")

    def leave_with(error):
        with Lab(device="cpu") as lab:
            trainer = lab.trainer(nn.Linear(4, 1), tasks.Regression(), make, batch_size=4)
            trainer.close = fail
            if error is not None:
                raise error

    lost = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
    with pytest.raises(SampleError, match=r"pid 7"):
        leave_with(lost)
    with pytest.raises(ValueError, match="of the loop"):
        leave_with(ValueError("of the loop"))
    with pytest.raises(RuntimeError, match="pid 8"):
        leave_with(None)
    with Lab(device="cpu"):  # the former ones have ended
        pass


ENDS = {
    "(pid 7) is killed by signal: Killed. ": f"(pid 7) {KILLED}",
    "(pid 7) is killed by signal: Bus error. It is possible that": "was killed by SIGBUS, most "
    "likely because shared",
    "(pid 7) is killed by signal: Segmentation fault. ": "was killed by SIGSEGV, most likely in a "
    "compiled library",
    "(pid 7) exited unexpectedly with exit code 3. Details are "
    "lost": "(pid 7) has exited: it was killed, most likely because",
    "(pid(s) 7, 8) exited unexpectedly": "(pid 7, 8) has exited: it was killed, most likely "
    "because memory",
}


def test_worker_process_that_breaks_the_connection_of_a_batch_is_lost():
    context = multiprocessing.get_context("fork")
    killed = context.Process(target=time.sleep, args=(60,))
    running = context.Process(target=time.sleep, args=(60,))
    for process in (killed, running):
        process.start()
    error = ConnectionResetError(104, "Connection reset by peer")
    assert find_ended(error, [running, killed]) is None
    killed.kill()
    assert f"(pid {killed.pid}) {KILLED}" in str(find_ended(error, [running, killed]))
    running.kill()


@pytest.mark.parametrize("text", ENDS)
def test_what_torch_says_of_a_lost_worker_is_explained(text):
    lost = find_lost_worker(RuntimeError(f"DataLoader worker {text}"))
    assert isinstance(lost, SampleError)
    assert ENDS[text] in str(lost)
    assert find_lost_worker(RuntimeError("Connection closed by peer")) is None


def test_errors_that_are_each_others_reasons_are_no_lost_worker():
    first = RuntimeError("of a stage")
    second = RuntimeError("of torch")
    first.__context__ = second
    second.__cause__ = first
    assert find_lost_worker(first) is None
