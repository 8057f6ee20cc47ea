"""Two hosts for launches over ssh: real sshd on two loopback addresses of this machine.

Keys, configs and known hosts are in a folder of their own, and ~/.ssh is neither read nor written.
The program is that of Debian's package openssh-server. It needs no systemd; as root it needs the
directory /run/sshd.
"""

import getpass
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
from launches import wait_for
from slurm_cluster import free_ports

SEARCH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
ADDRESSES = ("127.0.0.2", "127.0.0.3")
SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
PrintMotd no
"""
CLIENT = """\
Host *
    User {user}
    Port {port}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
"""


class SshHosts:
    """Running servers; use it as a context manager.

    Args:
        folder: Empty folder for keys, configs and logs.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.servers: dict[str, subprocess.Popen] = {}
        self.config = folder / "config"

    @staticmethod
    def missing() -> list[str]:
        """Return which programs are not installed."""
        names = ("sshd", "ssh", "ssh-keygen")
        return [name for name in names if not shutil.which(name, path=SEARCH)]

    @property
    def option(self) -> str:
        """The value of --ssh."""
        return f"ssh -F {self.config}"

    def __enter__(self) -> "SshHosts":
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        for name in ("key", "host_key"):
            path = self.folder / name
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
            subprocess.run(command, check=True, timeout=60)
        shutil.copy(self.folder / "key.pub", self.folder / "authorized_keys")
        (port,) = free_ports(1)
        public = (self.folder / "host_key.pub").read_text()
        known = "".join(f"[{address}]:{port} {public}" for address in ADDRESSES)
        (self.folder / "known_hosts").write_text(known)
        self.config.write_text(CLIENT.format(folder=self.folder, port=port, user=getpass.getuser()))
        for address in ADDRESSES:
            self.start_server(address, port)
        wait_for("answer of sshd", self.answers, 20, self.logs)
        return self

    def start_server(self, address: str, port: int) -> None:
        config = self.folder / f"sshd.{address}"
        config.write_text(SERVER.format(folder=self.folder, address=address, port=port))
        with (self.folder / f"log.{address}").open("w") as log:
            self.servers[address] = subprocess.Popen(
                [shutil.which("sshd", path=SEARCH), "-D", "-e", "-f", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def answers(self) -> bool:
        commands = [[*self.option.split(), address, "true"] for address in ADDRESSES]
        done = [subprocess.run(each, capture_output=True, timeout=20) for each in commands]
        return not any(each.returncode for each in done)

    def logs(self) -> str:
        """Return what the servers have logged, for a failed test."""
        return "\n".join(path.read_text()[-1500:] for path in self.folder.glob("log.*"))

    def sessions(self, address: str) -> list[psutil.Process]:
        """Return the processes of sshd that serve the connections to a host."""
        server = psutil.Process(self.servers[address].pid)
        return [each for each in server.children(recursive=True) if "sshd" in each.name()]

    def processes(self, address: str) -> list[psutil.Process]:
        """Return what runs on a host: the processes below the sessions of its server."""
        server = psutil.Process(self.servers[address].pid)
        others = []
        for each in server.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended since
                if "sshd" not in each.name():
                    others.append(each)
        return others

    def __exit__(self, *error: object) -> None:
        for server in self.servers.values():
            below = psutil.Process(server.pid).children(recursive=True)
            for each in below:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            server.terminate()
            server.wait(20)
