"""The command line of a launch over ssh."""

import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.worlds import ONE_PROCESS
from ddp_lab.launchers.arguments import Parser
from ddp_lab.launchers.command import quote_faults
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.launchers.host_checks import Place
from ddp_lab.launchers.hostfile import Host, parse_hosts, read_hostfile
from ddp_lab.launchers.start_ranks import parse as parse_torchrun

# What this command decides itself.
DECIDED = (
    *("--nnodes", "--node-rank", "--master-addr", "--master-port", "--standalone"),
    *("--rdzv-id", "--rdzv-backend", "--local-addr"),
)


@dataclass(frozen=True)
class HostLaunch:
    """A command line with --hosts or --hostfile.

    Attributes:
        hosts: In the order of the command line or the file.
        place: Where the launch runs on each of them.
        nproc: Number of ranks of each host; None: by slots or GPUs.
        endpoint: Of --rdzv-endpoint.
        rdzv_conf: Of --rdzv-conf.
        config_dir: Of --config-dir.
        others: Overrides and other options of torchrun, for the hosts.
        cfg: The composed config.
        trains: Whether its ranks train, with a strategy, or examine the machines.
    """

    hosts: list[Host]
    place: Place
    nproc: int | None
    endpoint: str | None
    rdzv_conf: str
    config_dir: str | None
    others: list[str]
    cfg: DictConfig
    trains: bool = True

    @property
    def counts_gpus(self) -> bool:
        """Whether the number of ranks of some host is that of its GPUs."""
        has_numbers = self.nproc or all(host.slots for host in self.hosts)
        several = not self.trains or self.cfg.strategy["_target_"] not in ONE_PROCESS
        return not has_numbers and several and self.cfg.device in ("auto", "cuda")

    def ranks(self, gpus: Mapping[str, int | None]) -> dict[str, int]:
        """Return the number of ranks by host: --nproc, else the slots, else the GPUs, else 1."""
        return {
            host.name: self.nproc or host.slots or gpus.get(host.name) or 1 for host in self.hosts
        }


def read_command_line(arguments: list[str], trains: bool = True) -> HostLaunch:
    """Return the launch that a command line asks for.

    Args:
        arguments: Of the command.
        trains: As in `HostLaunch`.

    Raises:
        ConfigError: An option or the config has a mistake.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "--hosts and --hostfile: are not supported under torchrun, of which each rank would "
            "start ranks; start this command without it"
        )
    options, others = parse_options(arguments)
    hosts = read_hosts(options.hosts, options.hostfile)
    place = Place(options.ssh, split_ssh(options.ssh), options.python, options.directory)
    if options.nproc is not None and not (options.nproc.isdecimal() and int(options.nproc)):
        raise ConfigError(
            f"--nproc {options.nproc}: must be an integer of at least 1: the ranks of each host"
        )
    overrides = others
    if any(each.startswith("-") for each in others):
        _, overrides = parse_torchrun(others)
    cfg = compose_config(quote_faults(overrides), options.config_dir)
    check(cfg)
    return HostLaunch(
        hosts=hosts,
        place=place,
        nproc=int(options.nproc) if options.nproc else None,
        endpoint=options.rdzv_endpoint,
        rdzv_conf=options.rdzv_conf,
        config_dir=options.config_dir,
        others=others,
        cfg=cfg,
        trains=trains,
    )


def parse_options(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Return the options of a launch over ssh, and the other arguments.

    Raises:
        ConfigError: An option has no value, or cannot be combined with --hosts.
    """
    parser = Parser("ddp-lab train", None, add_help=False, allow_abbrev=False)
    parser.add_argument("--hosts")
    parser.add_argument("--hostfile", type=Path)
    parser.add_argument("--ssh", default="ssh")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--directory", default=os.getcwd())
    parser.add_argument("--nproc", "--nproc-per-node", "--nproc_per_node", dest="nproc")
    parser.add_argument("--rdzv-endpoint", "--rdzv_endpoint")
    parser.add_argument("--rdzv-conf", "--rdzv_conf", default="")
    parser.add_argument("--config-dir")
    options, others = parser.parse_known_args(arguments)

    for each in others:
        option = each.partition("=")[0].replace("_", "-")
        if option in DECIDED:
            raise ConfigError(
                f"{option}: cannot be combined with --hosts and --hostfile, which decide it. Leave "
                "it out; --rdzv-endpoint HOST:PORT sets where the hosts meet"
            )
        if each in ("-m", "--multirun"):
            raise ConfigError(
                f"{each}: a sweep cannot be combined with --hosts and --hostfile. Start each job "
                "in a loop of the shell, with a name of its own"
            )
    return options, others


def split_ssh(text: str) -> list[str]:
    """Return the words of --ssh.

    Raises:
        ConfigError: It is no command.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--ssh {text}: {error}; quote it as in a shell") from None
    if not words:
        raise ConfigError("--ssh '': must be a command, for example 'ssh -F FILE'")
    return words


def read_hosts(names: str | None, file: Path | None) -> list[Host]:
    """Return the hosts of --hosts or --hostfile.

    Raises:
        ConfigError: Both or none are given, or the one that is has a mistake.
    """
    if names is not None and file is not None:
        raise ConfigError(f"--hosts {names}: cannot be combined with --hostfile {file}; use one")
    if names is not None:
        return parse_hosts(names)
    if file is not None:
        return read_hostfile(file)
    raise ConfigError(
        "--ssh, --python and --directory are for a launch over ssh; add --hosts a,b or --hostfile "
        "FILE"
    )
