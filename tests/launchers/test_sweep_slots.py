"""The slots of a sweep, for which more jobs wait, and the keys that a longer sweep may change."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers import torchrun_launcher
from ddp_lab.launchers.sweep import Job, is_finished, refuse_another
from ddp_lab.launchers.torchrun_launcher import TorchrunLauncher
from ddp_lab.resilience.run_directory import write_status

LONG = "import time; print('started', flush=True); time.sleep(60)"
PATIENCE = 10.0  # seconds after which a sweep that hangs is given slots, so that the test ends
GPUS = ("0,1", "2,3")


def launcher_of(
    folder: Path, slots: queue.Queue, names: list[str], max_parallel: int
) -> TorchrunLauncher:
    """Return a launcher with these slots, of jobs with these names."""
    launcher = TorchrunLauncher(2, max_parallel)
    launcher.sweep_dir = folder
    launcher.searches = False
    launcher._slots = lambda: slots
    launcher._jobs = lambda overrides: [
        Job(name, [], folder / name, {"epochs": 1}, "auto", False) for name in names
    ]
    return launcher


def slots_of(gpus: tuple[str, ...]) -> queue.Queue:
    slots = queue.Queue()
    for each in gpus:
        slots.put(each)
    return slots


def run_program(monkeypatch, program: str) -> None:
    """Let each job be a Python program in place of a launch."""
    monkeypatch.setattr(
        torchrun_launcher,
        "command_of",
        lambda overrides, ranks: ([sys.executable, "-S", "-c", program], dict(os.environ)),
    )


def when(condition: Callable[[], object], act: Callable[[], object]) -> threading.Thread:
    """Call `act` in a thread as soon as `condition` is true."""

    def wait() -> None:
        while not condition():
            threading.Event().wait(0.02)
        act()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_ends_the_running_job_and_no_third_job_waits_for_ever(
    number, code, tmp_path, monkeypatch, capfd
):
    run_program(monkeypatch, LONG)
    slots = slots_of(GPUS[:1])
    hung = threading.Event()
    launcher = launcher_of(tmp_path, slots, ["one", "two", "three"], 1)

    def free() -> None:
        hung.set()
        for _ in range(3):
            slots.put("given by the test")

    watch = threading.Timer(PATIENCE, free)
    watch.start()
    interrupt = when(lambda: launcher.processes, lambda: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as ended:
        launcher.launch([[]] * 3, 0)
    watch.cancel()
    interrupt.join()
    assert not hung.is_set(), "a job waited for the slot of one that was not started"
    assert ended.value.code == code
    assert list(slots.queue) == [GPUS[0]], "each slot is given back"
    assert "[two]" not in capfd.readouterr().out
    assert not launcher.processes


@pytest.mark.parametrize("ends_with", [0, 3])
def test_third_waiting_job_gets_the_gpus_of_one_that_has_ended(
    ends_with, tmp_path, monkeypatch, capfd
):
    """Three jobs, two slots: all run, on the GPUs of a slot, also after a job that fails."""
    program = (
        "import os; print('on', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); raise "
        f"SystemExit({ends_with})"
    )
    run_program(monkeypatch, program)
    slots = slots_of(GPUS)
    names = ["one", "two", "three", "four", "five"]
    launcher = launcher_of(tmp_path, slots, names, 2)
    if ends_with:
        with pytest.raises(SystemExit) as ended:
            launcher.launch([[]] * len(names), 0)
        assert ended.value.code == 1
    else:
        assert len(launcher.launch([[]] * len(names), 0)) == len(names)
    rows = [row.partition(" on ") for row in capfd.readouterr().out.splitlines() if " on " in row]
    assert {row[0] for row in rows} == {f"[{name}]" for name in names}
    assert {row[2] for row in rows} <= set(GPUS)
    assert sorted(slots.queue) == [*GPUS]


def test_sweep_goes_on_after_output_that_is_no_text(tmp_path, monkeypatch, capfd):
    run_program(monkeypatch, r"import os; os.write(1, b'broken \xff byte\n')")
    launcher = launcher_of(tmp_path, slots_of(GPUS[:1]), ["one", "two"], 1)
    assert len(launcher.launch([[]] * 2, 0)) == 2
    output = capfd.readouterr().out
    assert "[one] broken \N{REPLACEMENT CHARACTER} byte\n" in output
    assert "[two] broken " in output


def test_job_that_cannot_be_started_gives_its_slot_back(tmp_path, monkeypatch):
    """No other job waits for it forever; the error ends the sweep."""
    missing = tmp_path / "missing"
    monkeypatch.setattr(torchrun_launcher, "command_of", lambda *_: ([str(missing)], {}))
    slots = slots_of(GPUS[:1])
    launcher = launcher_of(tmp_path, slots, ["one", "two", "three"], 2)
    watch = threading.Timer(PATIENCE, lambda: slots.put("given by the test"))
    watch.start()
    with pytest.raises(FileNotFoundError):
        launcher.launch([[]] * 3, 0)
    watch.cancel()
    assert list(slots.queue) == [GPUS[0]]


CONFIG = {
    "seed": 1,
    "epochs": 2,
    "timeout": 60,
    "resume": "auto",
    "name": "a",
    "runs_dir": "runs",
    "checkpoint": {"keep": 2},
    "inject": None,
    "evaluate_test": "end",
    "optimize": "auto",
    "optimizer": {"lr": 0.1},
}
OTHER = CONFIG | {
    "epochs": 5,
    "timeout": 90,
    "resume": "never",
    "name": "b",
    "runs_dir": "other",
    "checkpoint": {"keep": 3},
    "inject": "nan@rank=0,step=1",
    "evaluate_test": "every_epoch",
    "optimize": "val_loss",
}


@pytest.mark.parametrize("key", [key for key in CONFIG if CONFIG[key] != OTHER[key]])
def test_key_that_does_not_change_the_result_so_far_may_change_in_a_resumed_sweep(key, tmp_path):
    OmegaConf.save(OmegaConf.create(CONFIG), tmp_path / "config.yaml")
    refuse_another(tmp_path, OmegaConf.create(CONFIG | {key: OTHER[key]}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("seed", 2), ("optimizer", {"lr": 0.2}), ("optimizer", {"lr": 0.1, "nesterov": True})],
)
def test_key_that_changes_the_result_is_refused_in_a_resumed_sweep(key, value, tmp_path):
    OmegaConf.save(OmegaConf.create(CONFIG), tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=f"was started there with another {key}"):
        refuse_another(tmp_path, OmegaConf.create(CONFIG | {key: value}))


def test_finished_jobs_of_a_sweep_that_is_extended_train_the_further_epochs(
    tmp_path, monkeypatch, capfd
):
    run_program(monkeypatch, "print('trains', flush=True)")
    for name, epochs in (("short", 2), ("long", 5)):
        (tmp_path / name).mkdir()
        OmegaConf.save(
            OmegaConf.create(CONFIG | {"epochs": epochs}), tmp_path / name / "config.yaml"
        )
        (tmp_path / name / "metrics.jsonl").write_text(
            f'{{"epoch": {epochs}, "samples_per_second": 1}}\n'
        )
        write_status(tmp_path / name, "finished", epochs, epochs)
    launcher = launcher_of(tmp_path, slots_of(GPUS), [], 1)
    jobs = [
        Job(name, [], tmp_path / name, {"epochs": 5}, "auto", False) for name in ("short", "long")
    ]
    launcher._jobs = lambda overrides: jobs
    assert [is_finished(job) for job in jobs] == [False, True]
    launcher.launch([[]] * 2, 0)
    output = capfd.readouterr().out
    assert "[short] trains" in output
    assert "[long] already finished" in output
