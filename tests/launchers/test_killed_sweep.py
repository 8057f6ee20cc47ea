"""A sweep that is killed kills its jobs, whose standard input closes with it."""

import os
import signal
import subprocess
import sys

from ddp_lab.launchers.command import ENDS_WITH_STDIN

JOB = """
import os, time
from ddp_lab.launchers.command import ENDS_WITH_STDIN, command
with command():
    print(ENDS_WITH_STDIN in os.environ, flush=True)
    time.sleep(60)
"""


def test_job_is_killed_when_the_standard_input_closes():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = os.environ | {ENDS_WITH_STDIN: "1"}
    with subprocess.Popen([sys.executable, "-c", JOB], env=environment, **pipes) as job:
        assert job.stdout.readline() == b"False\n", "the ranks of the job do not get the variable"
        assert job.poll() is None
        job.stdin.close()
        assert job.wait(20) == -signal.SIGKILL
