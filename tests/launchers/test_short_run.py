"""A launch that takes too long is ended with all its ranks."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from ddp_lab.launchers.short_run import in_one_line, run_in_time

# as torchrun, which starts each rank in a session of its own
LAUNCHER = """
import subprocess, sys, time
program = [sys.executable, "-c", "import time; time.sleep(300)"]
rank = subprocess.Popen(program, start_new_session=True)
open(sys.argv[1], "w").write(str(rank.pid))
time.sleep(300)
"""


@pytest.mark.slow
def test_launch_that_takes_too_long_leaves_no_rank(tmp_path):
    file = tmp_path / "pid"
    command = [sys.executable, "-c", LAUNCHER, str(file)]
    with pytest.raises(subprocess.TimeoutExpired):
        run_in_time(command, os.environ, 5, tmp_path)
    rank = int(file.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(rank) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(rank)


def test_launch_in_time_returns_its_code_and_what_it_prints(tmp_path):
    program = "import sys; print('out'); print('error', file=sys.stderr); sys.exit(3)"
    code, printed = run_in_time([sys.executable, "-c", program], os.environ, 60, tmp_path)
    assert (code, sorted(printed.split())) == (3, ["error", "out"])


def test_reason_of_a_failed_run_has_what_ended_its_traceback():
    of_a_rank = "rank 0, evaluating: failed:\nTraceback\n  File x\nOutOfMemoryError: tried 6 GiB\n"
    assert in_one_line(of_a_rank) == "rank 0, evaluating: failed: OutOfMemoryError: tried 6 GiB"
    assert in_one_line("error: lr=a: must be a number\nhint") == "lr=a: must be a number"
