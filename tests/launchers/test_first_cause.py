"""Of several ranks' errors, users see the first cause: their own, from a rank that raised it."""

import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from culprits import KINDS, Outcome, launch_planted
from launches import launch as launch_command
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from worlds import once, run_world

from ddp_lab import Lab
from ddp_lab.config.causes import (
    WAIT_FOR_CAUSE,
    OtherRankError,
    from_record,
    is_secondary,
    to_record,
)
from ddp_lab.config.errors import ConfigError, SampleError
from ddp_lab.lab.launch import RankError, launch
from ddp_lab.launchers.command import user_errors
from ddp_lab.launchers.start_ranks import report_failure
from ddp_lab.world.process import show
from ddp_lab.world.runtime import Runtime

# kind and place of the error, the ranks with their delays (own_failing.py), and the command
PLANTED = [
    ("strategy", "constructor", "ranks=0,1 after=0:0.7", "ddp-lab"),
    ("strategy", "call", "ranks=1 before=1:0.7", "torchrun"),
    ("task", "constructor", "ranks=1 before=1:0.7", "torchrun"),
    ("task", "call", "ranks=0,1 after=0:0.7", "ddp-lab"),
    ("tracker", "constructor", "ranks=0 before=0:0.7", "ddp-lab"),
    ("tracker", "call", "ranks=0 after=0:0.7", "torchrun"),
    ("optimizer", "constructor", "ranks=0,1 before=0:0.7", "torchrun"),
    ("optimizer", "call", "ranks=1 after=1:0.7", "ddp-lab"),
    ("dataset", "constructor", "ranks=0,1 after=0:0.7", "ddp-lab"),
    ("dataset", "call", "ranks=0 before=0:0.7", "torchrun"),
    ("model", "constructor", "ranks=0 after=0:0.7", "ddp-lab"),
    ("model", "call", "ranks=1 before=1:0.7", "torchrun"),
]


@once
def outcomes(folder: Path) -> dict[tuple[str, ...], Outcome]:
    """Launch three at a time: most of the time they wait."""
    with ThreadPoolExecutor(3) as pool:
        launched = pool.map(
            lambda case: launch_planted(*case, folder / "-".join(case[:2])), PLANTED
        )
        return dict(zip(PLANTED, launched, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", PLANTED, ids=lambda case: " ".join(case[:2]))
def test_error_of_a_users_class_is_shown_and_none_that_it_causes(case, tmp_path):
    outcome = outcomes(tmp_path.parent / "causes")[case]
    assert outcome.problem == "", outcome.output


def test_two_of_each_kind_are_planted():
    assert sorted(case[0] for case in PLANTED) == sorted(2 * KINDS)


def failed(error: Exception) -> Exception:
    """Return an error as it is after it was raised here."""
    try:
        raise error
    except Exception as raised:
        return raised


def chained(first: Exception, then: Exception) -> Exception:
    try:
        try:
            raise first
        except Exception:
            raise then  # noqa: B904  # as a mistake in an `except` of a user
    except Exception as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (dist.DistNetworkError("failed to recv"), True),
        (dist.DistStoreError("wait timeout after 100ms, keys: /a"), True),
        (dist.DistBackendError("a rank has left"), True),
        (
            RuntimeError(
                "[third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer "
                "[127.0.0.1]:1"
            ),
            True,
        ),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (OtherRankError("rank 0 raised TypeError: a"), True),
        (TypeError("a bug"), False),
        (ConfigError("data: cannot be read: Connection reset by peer"), False),
        (SampleError("sample 3: Connection reset by peer"), False),
        (chained(dist.DistNetworkError("failed to recv"), KeyError("gone")), True),
        (chained(KeyError("not cached"), dist.DistNetworkError("failed to recv")), True),
        (chained(KeyError("not cached"), TypeError("a bug")), False),
    ],
    ids=str,
)
def test_errors_that_follow_from_another_ranks_end_are_known(error, expected):
    assert is_secondary(error) is expected


def test_record_of_an_exception_has_its_rank_type_text_and_place():
    error = from_record(to_record(failed(TypeError("a bug.")), 3))
    assert type(error) is OtherRankError
    assert re.fullmatch(
        r"rank 3 raised TypeError: a bug \(test_first_cause.py, line \d+\)", str(error)
    )
    assert str(from_record(to_record(error, 1))) == str(error), "it is passed on again unchanged"
    mistake = from_record(to_record(ConfigError("lr=x: must be a number"), 3))
    assert (type(mistake), str(mistake)) == (ConfigError, "lr=x: must be a number")


def raise_in_an_answer(own_store: bool, port: int) -> str:
    """Ask two questions and do a work of all ranks; return the exceptions of this rank."""
    if own_store:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)

    def decide() -> str:
        raise KeyError("a bug")

    try:
        with Runtime("cpu", timeout=30) as runtime:
            runtime.gather_objects("here", "")
            time.sleep(0.3 * runtime.rank)
            runtime.broadcast_from_rank0("thing", decide)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


@pytest.mark.parametrize("own_store", [False, True], ids=["agents_store", "own_store"])
def test_answer_carries_any_exception(own_store):
    with socket.create_server(("", 0)) as free:
        port = free.getsockname()[1]
    first, second = run_world(2, raise_in_an_answer, own_store, port, timeout=60)
    assert first == "KeyError: 'a bug'"
    assert re.fullmatch(
        r"OtherRankError: rank 0 raised KeyError: 'a bug' \(test_first_cause.py, line \d+\)", second
    )


def work_of_all(failing: int, kind: type[Exception]) -> str:
    """Do a work of all ranks that one of them cannot do while the others already ask a question."""

    def work() -> str:
        if runtime.rank == failing:
            raise kind("impossible")
        return runtime.broadcast_from_rank0("inner", lambda: "done") if failing == 0 else "done"

    try:
        with Runtime("cpu", timeout=30) as runtime:
            runtime.gather_objects("here", "")
            return runtime.succeed("work", work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("kind", [ConfigError, KeyError])
def test_work_that_one_rank_cannot_do_fails_on_all_ranks_at_once(failing, kind):
    begin = time.monotonic()
    texts = run_world(3, work_of_all, failing, kind, timeout=60)
    text_of_failing = texts.pop(failing)
    assert text_of_failing == f"{kind.__name__}: {kind('impossible')}"
    others = (
        "ConfigError: impossible"
        if kind is ConfigError
        else f"OtherRankError: rank {failing} raised KeyError: "
    )
    assert all(text.startswith(others) for text in texts), texts
    assert time.monotonic() - begin < 60


def test_work_that_all_ranks_can_do_returns_each_ranks_result():
    assert run_world(2, succeed_everywhere) == ["0 done", "1 done"]


def succeed_everywhere() -> str:
    with Runtime("cpu", timeout=30) as runtime:
        return runtime.succeed(
            "work",
            lambda: f"{runtime.rank} {runtime.broadcast_from_rank0('inner', lambda: 'done')}",
        )


def failure_of(rank: int, tmp_path: Path, monkeypatch, **options) -> ProcessFailure:
    """Return what torch's launcher knows of a rank that has reported an error."""
    file = tmp_path / f"{rank}.json"
    with monkeypatch.context() as of_rank:
        of_rank.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        show(f"error of rank {rank}", **options)
    return ProcessFailure(rank, 1, options.get("code", 1), str(file))


def test_first_error_is_shown_by_fractions_of_a_second_and_network_errors_last(
    tmp_path, monkeypatch, capsys
):
    now = float(int(time.time()))
    failures = {
        0: failure_of(0, tmp_path, monkeypatch, began=now + 0.1, secondary=True),
        1: failure_of(1, tmp_path, monkeypatch, began=now + 0.9),
        2: failure_of(2, tmp_path, monkeypatch, began=now + 0.5, code=2),
    }
    assert report_failure(failures) == 2, "the exit code is that of the error that is shown"
    assert capsys.readouterr().err == "error of rank 2\n"
    del failures[2]
    assert report_failure(failures) == 1
    assert capsys.readouterr().err == "error of rank 1\n"
    del failures[1]
    report_failure(failures)
    assert capsys.readouterr().err == "error of rank 0\n", "it is shown if there is no other"
    record = json.loads((tmp_path / "0.json").read_text())["message"]["extraInfo"]
    assert record["timestamp"] == str(int(now)), "torch reads whole seconds only"


def fail_on_one_rank(failing: int) -> None:
    """As a user's function for `launch`: one rank raises late, while the others wait for it."""
    with Lab("ddp", device="cpu") as lab:
        lab.runtime.open_group()
        if lab.rank == failing:
            time.sleep(0.5)
            raise TypeError("a bug of the user")
        lab.runtime.all_reduce(torch.zeros(1))


@pytest.mark.parametrize("failing", [0, 1])
def test_launch_raises_the_error_of_the_rank_that_failed_first(failing, capfd):
    with pytest.raises(RankError) as error:
        launch(fail_on_one_rank, failing)
    assert str(error.value).startswith(f"rank {failing} raised:")
    assert str(error.value).endswith("TypeError: a bug of the user")
    assert "closed" not in capfd.readouterr().err


SCRIPT = """
import time
import torch
from ddp_lab import Lab
with Lab("ddp", device="cpu") as lab:
    lab.runtime.open_group()
    if lab.rank == {failing}:
        time.sleep(0.5)
        raise TypeError("a bug of the user")
    lab.runtime.all_reduce(torch.zeros(1))
"""


@pytest.mark.parametrize("failing", [0, 1])
def test_lab_under_torchrun_shows_the_traceback_of_the_rank_that_failed_first(failing, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(failing=failing))
    code, output = launch_command(f"torchrun --nproc_per_node=2 {script}")
    assert code == 1
    assert output.count("TypeError: a bug of the user") == 1
    assert "Connection closed" not in output
    cause = output.partition("Root Cause")[2]
    assert f"rank      : {failing} " in cause


@pytest.mark.parametrize(
    ("error", "waits"),
    [
        (ValueError("of this rank"), False),
        (RuntimeError("Connection closed by peer"), True),
        (OtherRankError("rank 1 raised ValueError: of that rank"), True),
    ],
)
def test_rank_waits_for_the_cause_of_its_error(error, waits, monkeypatch, capfd):
    """torchrun ends all ranks when one exits: one that has the cause must not wait."""
    slept: list[float] = []
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    monkeypatch.setattr(time, "sleep", slept.append)
    with pytest.raises(SystemExit) as ended, user_errors():
        raise error
    assert ended.value.code == 1
    assert slept == [WAIT_FOR_CAUSE] * waits
    assert str(error) in "".join(capfd.readouterr())
