"""`ddp-lab train --hosts a,b,c`: start the ranks of several machines over ssh, without a scheduler.

One ssh for each host carries everything: the checks, the launch, its output and its end. On the
host an agent (host_agent.py) starts `ddp-lab train --nnodes ...`, as one would by hand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig

from ddp_lab.config.worlds import check_world
from ddp_lab.launchers.command import refuse_tasks
from ddp_lab.launchers.host_agent import fingerprint, version_of
from ddp_lab.launchers.host_checks import clock_faults, environment_faults, raise_faults
from ddp_lab.launchers.host_group import connected
from ddp_lab.launchers.host_options import read_command_line
from ddp_lab.launchers.host_run import HostRun


def launch_on_hosts(
    arguments: list[str], wants_outcome: bool, command: Sequence[str] = ("train",)
) -> int:
    """Start the ranks of all hosts, wait for them, and return the exit code of the command.

    Args:
        arguments: Of the command, without --json.
        wants_outcome: Whether the outcome of the run is to be noted for --json.
        command: What each rank executes: it trains, or `doctor --fabric` examines the machines,
            for which the config need not fit the number of ranks.

    Raises:
        ConfigError: The command line, the config or a host has a mistake.
    """
    refuse_tasks(False)
    trains = command[0] == "train"
    launch = read_command_line(arguments, trains)
    if trains and not launch.counts_gpus:
        check_ranks(launch.cfg, launch.ranks({}))
    local = {"ddp_lab": version_of("ddp_lab"), "files": fingerprint(str(Path(__file__).parents[1]))}
    with connected(launch) as group:
        reports = group.check(launch.counts_gpus)
        raise_faults(environment_faults(reports, local, launch.place))
        ranks = launch.ranks({name: facts["gpus"] for name, facts in reports.items()})
        if trains:
            check_ranks(launch.cfg, ranks)
        clocks = group.compare_clocks()
        raise_faults(clock_faults(clocks))
        commands, first = group.arrange(ranks)
        for name, connection in group.connections.items():
            connection.is_started = True
            connection.ask(
                "start", arguments=commands[name], wants_outcome=wants_outcome, command=command
            )
        ahead = {name: clock.ahead for name, clock in clocks.items()}
        return HostRun(group.connections, group.answers, ahead, first).wait()


def check_ranks(cfg: DictConfig, ranks: Mapping[str, int]) -> None:
    """Check that the numbers of ranks of all hosts fit the config.

    Raises:
        ConfigError: As of `check_world`.
    """
    check_world(cfg, sum(ranks.values()), 1)
