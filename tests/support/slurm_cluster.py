"""A Slurm cluster of two nodes on this machine, for the tests.

Real daemons have their own directory, on the loopback device.

The programs are those of Debian's packages slurm-wlm and munge. They need no root privileges,
systemd or control groups.
"""

import getpass
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from pathlib import Path

from launches import wait_for

NODES = ("n1", "n2")
LOST = 6  # seconds without a response from a slurmd after which its node counts as down
CONF = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SrunPortRange={ports[3]}-{ports[4]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MailProg=/bin/true
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdTimeout={lost}
KillWait=20
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=2000
PartitionName=low Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
    PreemptMode=REQUEUE GraceTime=25
PartitionName=high Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def find(program: str, search: str) -> str | None:
    """Return the path of a program.

    Debian may install it under another name, for example slurmctld as slurmctld-wlm.
    """
    return shutil.which(program, path=search) or shutil.which(f"{program}-wlm", path=search)


def free_ports(count: int) -> list[int]:
    """Return `count` consecutive free ports, below Linux's ephemeral ports."""
    start = 20000 + secrets.randbelow(8000)
    for first in range(start, start + 4000, count):
        sockets = [socket.socket() for _ in range(count)]
        try:
            for offset, sock in enumerate(sockets):
                sock.bind(("127.0.0.1", first + offset))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for sock in sockets:
                sock.close()
    raise AssertionError("no consecutive free ports on the loopback device")


class Cluster:
    """A running cluster; use it as a context manager.

    Args:
        folder: Empty folder for configuration, state and logs.
        path: Folder that comes first on the PATH of the jobs.
    """

    def __init__(self, folder: Path, path: Path):
        self.folder = folder
        search = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SLURM_", "SBATCH_", "TORCH"))
        }
        self.env |= {
            "PATH": f"{path}:{search}",
            "SLURM_CONF": f"{folder}/slurm.conf",
            "CUDA_VISIBLE_DEVICES": "",
        }
        names = (
            "slurmctld",
            "slurmd",
            "slurmstepd",
            "munged",
            "sbatch",
            "srun",
            "scontrol",
            "scancel",
            "sinfo",
            "squeue",
        )
        self.programs = {name: find(name, search) for name in names}
        self.daemons: dict[str, subprocess.Popen] = {}

    def missing(self) -> list[str]:
        return [name for name, place in self.programs.items() if place is None]

    def __enter__(self) -> "Cluster":
        try:
            self._up()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _up(self) -> None:
        for name in ("munge", "state", *(f"spool.{node}" for node in NODES)):
            (self.folder / name).mkdir(mode=0o755)
        key = self.folder / "munge" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(1024))
        host = socket.gethostname().split(".")[0]
        ports = free_ports(64)
        conf = CONF.format(
            host=host,
            user=getpass.getuser(),
            folder=self.folder,
            ports=[*ports[:4], ports[-1]],
            lost=LOST,
        )
        (self.folder / "slurm.conf").write_text(conf)
        munge = self.folder / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        # --force: munged requires a socket that all users can reach, but other users cannot enter
        # pytest's folders.
        self._start("munged", "--foreground", "--force", *files, f"--socket={munge / 'socket'}")
        wait_for("socket of munged", (munge / "socket").exists, 10, self.logs)
        self._start("slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        for node in NODES:
            self.start_node(node)
        wait_for(
            "two idle nodes",
            lambda: self._ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == "2",
            40,
            self.logs,
        )

    def _start(self, program: str, *arguments: str, name: str | None = None) -> None:
        with (self.folder / f"{name or program}.out").open("a") as out:
            self.daemons[name or program] = subprocess.Popen(
                [self.programs[program], *arguments],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def start_node(self, node: str) -> None:
        self._start(
            "slurmd",
            "-D",
            "-N",
            node,
            "-d",
            self.programs["slurmstepd"],
            "-f",
            self.env["SLURM_CONF"],
            name=node,
        )

    def kill_node(self, node: str) -> None:
        """Kill the node's slurmd with SIGKILL. The processes that it started keep running."""
        self.daemons[node].kill()
        self.daemons.pop(node).wait()

    def __exit__(self, *error: object) -> None:
        if "slurmctld" in self.daemons:
            for node in set(NODES) - set(self.daemons):
                self.start_node(node)  # it ends the processes that the killed one left
            self._ask("scancel", "--user", getpass.getuser())
            self._ask("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
            deadline = time.monotonic() + 30
            while (
                self._ask("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") != "2"
                and time.monotonic() < deadline
            ):
                time.sleep(0.2)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def logs(self) -> str:
        """Return the ends of the daemons' logs, for a failed test."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(
            f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files
        )

    def _ask(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [self.programs[program], *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout.strip()

    def run(self, program: str, *arguments: str, cwd: Path | None = None, **env: str) -> str:
        """Run a command of Slurm, assert that it succeeds, and return its output."""
        command = [self.programs[program], *arguments]
        done = subprocess.run(
            command, env=self.env | env, cwd=cwd, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """Return the fields of `scontrol show job`. Slurm forgets a job 300 s after its end."""
        return dict(
            re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", "--oneliner", job))
        )
