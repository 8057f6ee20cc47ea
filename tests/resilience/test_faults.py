"""Faults in real processes: the run resumes, the fault is reported, and nothing hangs.

The faults are injected (ddp_lab/resilience/fault_injection.py) or real signals.
"""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from launches import (
    SMALL,
    finish,
    launch,
    newest,
    read_metrics,
    read_steps,
    start,
    wait_for,
    wait_for_heartbeat,
)
from slow_rows import slow_but
from torch.distributed.flight_recorder.fr_trace import main as torchfrtrace

from ddp_lab.resilience.run_directory import RESTART_WAIT

DDP = "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp"
STEPS = 5  # per epoch of SMALL


def overrides(tmp_path: Path, name: str, *more: str) -> list[str]:
    """Return the Hydra overrides of a small run of three epochs that averages its weights."""
    return [
        *SMALL,
        "epochs=3",
        "ema=0.8",
        "log_every=3",
        f"runs_dir={tmp_path}",
        f"name={name}",
        *more,
    ]


def status(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def failure(run_dir: Path) -> dict:
    return json.loads((run_dir / "failure.json").read_text())


def assert_same_end(run_dir: Path, other: Path, tolerance: float = 0.0) -> None:
    """Check that weights, momentum and the metrics are equal, and records complete.

    Each epoch and each third step has one record.
    """
    for record, expected in zip(read_steps(run_dir), read_steps(other), strict=True):
        for key in ("epoch", "step", "loss", "accuracy", "lr"):
            assert record[key] == pytest.approx(
                expected[key], rel=1e-12 + 100 * tolerance, abs=0
            ), key
    one = newest(run_dir)
    two = newest(other)
    assert one["progress"]["step"] == two["progress"]["step"] == 3 * STEPS
    for name, tensor in one["model"].items():
        assert torch.allclose(tensor, two["model"][name], rtol=0, atol=tolerance), name
        assert torch.allclose(one["ema"][name], two["ema"][name], rtol=0, atol=tolerance), name
        momenta = (state["optimizer"]["state"][name]["momentum_buffer"] for state in (one, two))
        assert torch.allclose(*momenta, rtol=0, atol=10 * tolerance), name
    for record, expected in zip(read_metrics(run_dir), read_metrics(other), strict=True):
        for key in ("epoch", "train_loss", "train_accuracy", "test_loss", "test_accuracy", "lr"):
            assert record[key] == pytest.approx(expected[key], rel=100 * tolerance, abs=0), key


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[int, Path]:
    """Return the directories of runs without faults, by number of ranks."""
    folder = tmp_path_factory.mktemp("undisturbed")
    # replicas that are equal pass
    for line, ranks in (("python train.py", 1), (f"{DDP} check_replicas=1", 2)):
        code, output = launch(line, *overrides(folder, f"run-{ranks}"))
        assert code == 0, output
    return {ranks: folder / f"run-{ranks}" for ranks in (1, 2)}


def test_run_killed_at_any_step_resumes_to_the_same_end(tmp_path, undisturbed):
    line = overrides(tmp_path, "killed", "checkpoint.every_steps=2", "inject=crash@rank=0,step=8")
    code, _ = launch("python train.py", *line)
    assert code == -signal.SIGKILL
    code, output = launch("python train.py", *line)
    assert code == 0, output
    assert_same_end(tmp_path / "killed", undisturbed[1])


@pytest.mark.slow
def test_run_resumes_in_mid_epoch_with_other_ranks_and_strategy(tmp_path, undisturbed):
    line = overrides(tmp_path, "moved", "checkpoint.every_steps=1")
    assert launch(DDP, *line, "data.loader=workers", "inject=raise@rank=1,step=8")[0] == 1
    code, output = launch(
        "torchrun --standalone --nproc_per_node=3 train.py strategy=scratch", *line
    )
    assert code == 0, output
    # Not always step 7, because a step's file is written while the next step is computed.
    assert re.search(
        r"resumed from .*: epoch 2, (24|48) samples into it, step [67]$", output, re.MULTILINE
    ), output
    assert re.search(r"\bnumber of ranks: 2 -> 3$", output, re.MULTILINE), output
    assert_same_end(tmp_path / "moved", undisturbed[1], tolerance=1e-6)


def test_elastic_restart_ends_with_the_same_weights(tmp_path, undisturbed):
    """`resume=never` applies only to the first start."""
    line = "python -m ddp_lab train --nproc 2 --max-restarts 3 strategy=ddp resume=never"
    code, output = launch(
        line,
        *overrides(tmp_path, "restarted", "checkpoint.every_steps=2", "inject=crash@rank=1,step=8"),
    )
    assert code == 0, output
    assert "started again after error: rank 1 on" in output
    assert "resumed from" in output
    assert "another config" not in output
    assert not list(tmp_path.glob("restarted/config.*.yaml")), "a restart changes no config"
    assert status(tmp_path / "restarted")["status"] == "finished"
    assert_same_end(tmp_path / "restarted", undisturbed[2])


REPORTS = {  # by fault: the kind in failure.json and a part of the message
    "exit": ("lost_rank", "exited without reporting an error"),
    "raise": ("exception", "RuntimeError: injected by inject=raise@rank=1,step=8"),
}


@pytest.mark.parametrize("fault", slow_but(["raise"], REPORTS))
@pytest.mark.covers("inject")
def test_first_failure_is_reported_once(fault, tmp_path):
    code, output = launch(DDP, *overrides(tmp_path, "failed", f"inject={fault}@rank=1,step=8"))
    assert code == 1
    record = failure(tmp_path / "failed")
    (kind, said) = REPORTS[fault]
    assert (record["kind"], record["rank"], record["epoch"], record["step"]) == (kind, 1, 2, 8)
    assert said in record["message"]
    assert [other["rank"] for other in record["others"]] == [0]
    assert output.count(record["message"].splitlines()[0]) == 1, output
    assert output.split("Root Cause")[1].count(said) == 1, output
    assert (
        status(tmp_path / "failed").items() >= {"status": "failed", "epoch": 2, "step": 8}.items()
    )


def test_skipped_all_reduce_is_named_and_nothing_hangs(tmp_path, caplog):
    """By the message and by torch's analyser, from the dumps of both ranks."""
    started = time.monotonic()
    code, output = launch(
        DDP, *overrides(tmp_path, "skipped", "timeout=5", "strategy._target_=crash.Skipping")
    )
    assert time.monotonic() - started < 40
    assert code == 1, output
    record = failure(tmp_path / "skipped")
    said = "all_reduce 8 of ranks 0, 1 (Float [7]): called by rank 0, not by rank 1\n"
    assert (record["kind"], record["rank"], [other["rank"] for other in record["others"]]) == (
        "hang",
        1,
        [0],
    )
    assert said in record["message"]
    assert "(timeout=5; raise it if a step may take longer), in\n" in record["message"]
    assert (
        output.split("Root Cause")[1].count(said)
        == output.count(record["message"].splitlines()[0])
        == 1
    ), output
    torchfrtrace([f"{tmp_path}/skipped/flight_recorder/step_{record['step']}"])
    analysed = "\n".join(caplog.messages)
    expected = r"sequence number: 8\n(.*\n){3}missing ranks: \{1\}\ninput sizes: \[\[7\]\]"
    if torch.__version__ < "2.15":
        expected = "gloo != 'nccl'"  # the analyser of torch 2.11 reads only NCCL's calls
    assert re.search(expected, analysed), analysed


@pytest.mark.parametrize(
    ("seconds", "called"),
    [
        # The other rank calls the all-reduce of the next gradients, unless the ranks exchange what
        # concerns all of them before, which depends on how long steps take.
        (0.0, r"Float \[31818\]|Double \[\d+\]"),
        pytest.param(0.6, r"Double \[\d+\]", marks=pytest.mark.slow),  # so it does after each step
    ],
)
def test_all_reduce_of_another_shape_is_named(seconds, called, tmp_path):
    """gloo then aborts the rank with the smaller tensor at once, and prints why."""
    more = "strategy._target_=crash.Skipping", "+strategy.shared=true"
    code, output = launch(
        DDP, *overrides(tmp_path, "shapes", *more, f"+strategy.seconds={seconds}")
    )
    assert code == 1, output
    assert "Is there a distributed collective mismatch in your code?" in output
    record = failure(tmp_path / "shapes")
    assert (record["kind"], record["rank"]) == ("lost_rank", 0), record
    assert re.search(
        rf"The last collective of rank 1 is all_reduce \d+ of ranks 0, 1 \(({called})\)",
        record["message"],
    ), record


@pytest.mark.covers("timeout")
def test_frozen_rank_is_named(tmp_path, monkeypatch):
    """A suspended process cannot report anything itself. torch's recorder is off."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    process = start(DDP, *overrides(tmp_path, "frozen", "timeout=5", "epochs=100000"))
    frozen = wait_for_heartbeat(tmp_path / "frozen", 1, lambda record: record["step"] > 10)
    os.kill(frozen["pid"], signal.SIGSTOP)
    try:
        while not (tmp_path / "frozen" / "failure.json").exists():
            assert process.poll() is None
            time.sleep(0.1)
    finally:
        os.kill(frozen["pid"], signal.SIGKILL)  # to which torchrun would give 30 s to end
    code, output = finish(process)
    assert code == 1, output
    assert "stalls the other ranks" in failure(tmp_path / "frozen")["message"]
    assert (
        "The collective in which ranks wait is unknown: torch's"
        in failure(tmp_path / "frozen")["message"]
    )
    assert not (tmp_path / "frozen" / "flight_recorder").exists()
    assert (failure(tmp_path / "frozen")["kind"], failure(tmp_path / "frozen")["rank"]) == (
        "hang",
        1,
    )


@pytest.mark.covers("check_replicas")
def test_drifting_replicas_are_named(tmp_path):
    line = overrides(tmp_path, "drifting", "check_replicas=2", "strategy._target_=crash.Drifting")
    code, output = launch(DDP, *line)
    assert code == 1, output
    said = (
        "the replicas have drifted apart: after step 8 head.1.bias differs between replicas 0 and 1"
    )
    assert output.split("Root Cause")[1].count(said) == 1, output
    assert failure(tmp_path / "drifting")["kind"] == "replicas_drifted"


def test_loss_not_finite_stops_all_ranks_at_the_same_step(tmp_path):
    code, output = launch(DDP, *overrides(tmp_path, "stopped", "inject=nan@rank=1,step=8"))
    assert code == 1
    assert (
        "the loss of step 8 (epoch 2) is not finite, on rank 1 first"
        in output.split("Root Cause")[1]
    )
    record = failure(tmp_path / "stopped")
    assert [other["rank"] for other in record["others"]] == [0]
    assert record["others"][0]["step"] == record["step"]
    assert (record["kind"], record["rank"]) == ("not_finite", 1)
    assert all(tensor.isfinite().all() for tensor in newest(tmp_path / "stopped")["model"].values())


def test_weights_not_finite_are_not_saved(tmp_path):
    """The loss of the epoch's last step is finite: it was computed before the step."""
    line = overrides(
        tmp_path,
        "diverged",
        "optimizer.lr=1e38",
        "data.dataset.train_size=24",
        "optimizer.weight_decay=1e30",
    )
    code, output = launch("python train.py", *line)
    assert code == 1
    assert "after step 1 some weights are not finite; they are not saved" in output
    assert failure(tmp_path / "diverged")["kind"] == "not_finite"
    assert not list((tmp_path / "diverged").glob("checkpoints/*.pt"))


def test_on_nan_skip_continues_after_a_loss_that_is_not_finite(tmp_path):
    code, output = launch(
        DDP, *overrides(tmp_path, "skipped", "on_nan=skip", "inject=nan@rank=0,step=8")
    )
    assert code == 0, output
    assert "the loss of step 8" in output
    assert output.count("its gradient counts as zero (on_nan=skip)") == 1
    state = newest(tmp_path / "skipped")
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    assert [record["epoch"] for record in read_metrics(tmp_path / "skipped")] == [1, 2, 3]
    assert all(record["train_loss"] is not None for record in read_metrics(tmp_path / "skipped"))


@pytest.mark.slow
def test_preemption_of_one_rank_saves_and_the_run_resumes(tmp_path, undisturbed):
    """One rank receives the signal; all ranks exit after the same step.

    The run is then started again.
    """
    line = overrides(tmp_path, "preempted", "inject=sigterm@rank=1,step=8")
    code, output = launch(DDP, *line)
    assert code == 0, output
    assert status(tmp_path / "preempted")["status"] == "preempted"
    assert status(tmp_path / "preempted")["step"] >= 8
    code, output = launch(DDP, *line)
    assert code == 0, output
    assert_same_end(tmp_path / "preempted", undisturbed[2])


@pytest.mark.parametrize(
    ("line", "code"), [pytest.param("python train.py", 130, marks=pytest.mark.slow), (DDP, 1)]
)
def test_ctrl_c_saves_a_checkpoint(line, code, tmp_path):
    """A terminal sends SIGINT to all processes, and torchrun sends it to its ranks once more."""
    process = start(line, *overrides(tmp_path, "mine", "epochs=100000"))
    wait_for_heartbeat(tmp_path / "mine", 0, lambda record: record["step"] > 10)
    os.killpg(process.pid, signal.SIGINT)
    ended, output = finish(process, timeout=60)
    assert ended == code, output
    assert "run the same command with name=mine" in output
    assert status(tmp_path / "mine")["status"] == "interrupted"
    assert newest(tmp_path / "mine")["progress"]["step"] == status(tmp_path / "mine")["step"]


@pytest.mark.slow
def test_preemption_does_not_wait_for_a_long_evaluation(tmp_path):
    """The run exits within seconds, and the next launch begins with the evaluation."""
    process = start(DDP, *overrides(tmp_path, "long"), "data.dataset.test_size=150000")
    wait_for_heartbeat(tmp_path / "long", 1, lambda record: record["doing"] == "evaluating", 120)
    asked = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    _, output = finish(process, timeout=60)
    assert time.monotonic() - asked < 15, output
    assert (
        status(tmp_path / "long").items()
        >= {"status": "preempted", "epoch": 1, "step": STEPS}.items()
    )
    progress = newest(tmp_path / "long")["progress"]
    assert (progress["epoch"], progress["step"]) == (1, STEPS)


@pytest.mark.parametrize(
    "override", ["data.num_workers=2", pytest.param("compile=true", marks=pytest.mark.slow)]
)
def test_sigterm_to_all_processes_spares_loader_workers_and_compilers(
    override, tmp_path, monkeypatch
):
    """A scheduler may send it to all processes of a launch.

    The ranks need batches and kernels until they stop.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kernels"))
    process = start(
        "python train.py",
        *overrides(tmp_path, "mine", "epochs=100000", "data.loader=workers", override),
    )
    busy = compiles_kernel if override == "compile=true" else lambda record: record["step"] > 10
    wait_for_heartbeat(tmp_path / "mine", 0, busy, 120)
    os.killpg(process.pid, signal.SIGTERM)
    code, output = finish(process, timeout=200)
    assert code == 75, output
    assert status(tmp_path / "mine")["status"] == "preempted"


def compiles_kernel(record: dict) -> bool:
    """Return whether a child of one of the rank's threads is a compiler of Inductor's kernels."""
    with contextlib.suppress(OSError):  # a thread or a child has ended meanwhile
        children = " ".join(
            file.read_text() for file in Path(f"/proc/{record['pid']}/task").glob("*/children")
        ).split()
        return any(
            b".main.cpp" in Path(f"/proc/{child}/cmdline").read_bytes() for child in children
        )
    return False


def test_second_writer_is_refused_and_no_rank_outlives_torchrun(tmp_path):
    process = start(DDP, *overrides(tmp_path, "mine", "inject=hang@rank=1,step=8"))
    pids = [
        wait_for_heartbeat(tmp_path / "mine", rank, lambda record: record["step"] == 8)["pid"]
        for rank in (0, 1)
    ]
    begin = time.monotonic()
    code, output = launch("python train.py", *overrides(tmp_path, "mine"))
    assert time.monotonic() - begin < RESTART_WAIT, output  # it waits for LOCK_WAIT only
    assert code == 2
    assert "name=mine: another launch is writing in" in output
    assert f"pid {pids[0]} on" in output
    os.kill(process.pid, signal.SIGKILL)
    finish(process)
    wait_for("end of all ranks", lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10)


@pytest.mark.slow
def test_limit_on_file_sizes_is_named_and_not_the_free_disk_space(tmp_path):
    """A limit of `ulimit -f`, in KiB, is that of a user on many clusters."""
    line = " ".join(["exec", "python", "train.py", *SMALL, "epochs=1", "tracker=none"])
    line += f" runs_dir={tmp_path} name=limited"
    code, output = launch("bash -c", f"ulimit -f 100; {line}", cold=True)
    assert code == 1, output
    assert (
        "step_00000005.pt could not be written (File too large: `ulimit -f` limits files to 100.0 "
        "KiB); the last valid checkpoint is none. Raise this limit in the shell that starts the "
        "command, or ask for another one" in output
    )
    assert "enforce fail" not in output
    assert "are free" not in output


def test_full_disk_fails_the_run_and_keeps_the_last_valid_checkpoint(tmp_path):
    """Training has ended before the write fails.

    The best checkpoints of epochs 1 and 2 were written.
    """
    full = "checkpoint.every_epochs=3", "inject=disk_full@rank=0,step=12"
    full += "data.dataset.train_size=125", "data.val_fraction=0.2"
    code, output = launch(DDP, *overrides(tmp_path, "full", *full))
    assert code == 1, output
    folder = tmp_path / "full" / "checkpoints"
    assert (
        f"step_{3 * STEPS:08d}.pt could not be written (No space left on device; without it "
        in output
    )
    assert f"the last valid checkpoint is {folder}/step_{2 * STEPS:08d}.pt" in output
    assert {path.name for path in folder.iterdir() if path.suffix != ".sha256"} == {
        "best.pt",
        *(f"step_{epoch * STEPS:08d}.pt" for epoch in (1, 2)),
    }
    assert (status(tmp_path / "full")["status"], failure(tmp_path / "full")["kind"]) == (
        "failed",
        "checkpoint",
    )
