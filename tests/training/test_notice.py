"""Notices of long work before the first step, in the log and on a terminal."""

import logging
import os
import pty
import re
import shutil
import sys
import threading
import time
from select import select

import pytest
from launches import SMALL, finish, only_run, start

from ddp_lab.training.speed.notice import working

WHAT = "compiling the training step (compile=true): the model in 1 piece"


def notices(caplog) -> list[str]:
    return [re.sub(r"\d+(\.\d+)? s", "N s", record.getMessage()) for record in caplog.records]


def test_notice_logs_beginning_interval_and_end(caplog):
    caplog.set_level(logging.INFO, "ddp_lab")
    with working("waiting", tick=0.1, interval=0.3):
        time.sleep(1)
    first, *between, last = notices(caplog)
    assert (first, last) == ("waiting ...", "waiting: took N s")
    assert set(between) == {"waiting: N s so far"}
    assert float(caplog.records[-1].getMessage().split()[-2]) >= 1


def test_short_work_has_no_notice(caplog):
    caplog.set_level(logging.INFO, "ddp_lab")
    with working("waiting", tick=60):
        pass
    assert notices(caplog) == []


def test_other_ranks_show_no_notice(caplog, capsys):
    caplog.set_level(logging.WARNING, "ddp_lab")
    with working("waiting", tick=0.01, interval=0.01):
        time.sleep(0.1)
    assert notices(caplog) == []
    assert capsys.readouterr() == ("", "")


def test_failed_work_ends_its_notice(caplog):
    caplog.set_level(logging.INFO, "ddp_lab")

    def fail() -> None:
        with working("waiting", tick=0.05, interval=60):
            time.sleep(0.3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert notices(caplog) == ["waiting ..."]
    assert "notice" not in [thread.name for thread in threading.enumerate()]


def test_terminal_line_counts_seconds_and_is_cleared(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "ddp_lab")
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", 0) as screen, os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with working("waiting", tick=0.2):
            time.sleep(1.8)
        monkeypatch.undo()
        written = b""
        # What is read from a terminal may be split into pieces.
        while not written.endswith(b"\r\033[K") and select([screen], [], [], 10)[0]:
            written += screen.read(4096)
    *lines, last = written.decode().split("\r")[1:]
    assert (lines[0], last) == ("waiting: 0 s\033[K", "\033[K")
    assert "waiting: 1 s\033[K" in lines
    assert notices(caplog) == ["waiting: took N s"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_compiling_is_announced_by_rank_0_before_the_first_epoch(tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp compile=true epochs=1"
    code, output = finish(start(line, *SMALL, f"runs_dir={tmp_path}"), timeout=240)
    assert code == 0, output
    assert output.count(f"{WHAT} ...\n") == 1
    took = re.findall(re.escape(WHAT) + r": took \d+\.\d s\n", output)
    assert len(took) == 1
    assert output.index(took[0]) < output.index("epoch 1:")
    log = (only_run(tmp_path) / "train.log").read_text()
    assert f"INFO {took[0]}" in log
