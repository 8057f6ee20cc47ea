"""What is wrong with the hosts of a launch over ssh, one message for each fault."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddp_lab.config.errors import ConfigError, count

# seconds; the first of several errors is found by its time
CLOCK = 1.0
NOT_FOUND = (126, 127)  # exit codes of a shell that cannot start a program
OF_SSH = 255  # exit code of ssh if the connection failed


class Place(NamedTuple):
    """Where a launch runs on each host, for messages.

    Attributes:
        ssh: The command of --ssh.
        ssh_words: The same, split as by a shell.
        python: Path of the interpreter.
        directory: In which the launch runs.
    """

    ssh: str
    ssh_words: list[str]
    python: str
    directory: str


class Clock(NamedTuple):
    """By how many seconds a host's clock is ahead of this machine's.

    Attributes:
        ahead: The difference.
        error: Half of the time that the question took.
    """

    ahead: float
    error: float


def explain_loss(host: str, code: int, text: str, place: Place) -> str:
    """Return why a host did not answer: ssh or the remote shell has ended with an exit code.

    Args:
        host: As for ssh.
        code: The exit code.
        text: What was printed to stderr.
        place: Of the launch.
    """
    reason = text or f"exit code {code}"
    line = f"{place.ssh} -o BatchMode=yes {host} true"
    if code == OF_SSH:
        return (
            f"{host}: cannot be reached by ssh ({reason}). Must be a host that ssh enters without "
            f"a password and whose key it knows; `{line}` must print nothing"
        )
    if code in NOT_FOUND:
        return (
            f"{host}: --python {place.python}: cannot be started there ({reason}). Install ddp_lab "
            "on every host at the same path, or use --python PATH"
        )
    return (
        f"{host}: {place.python} ended before it could check the host ({reason}). Must be a Python "
        "of the environment with ddp_lab; choose another one by --python PATH"
    )


def explain_silence(host: str, seconds: float, place: Place) -> str:
    """Return the message for a host that has not answered within some seconds."""
    return (
        f"{host}: has not answered within {seconds:.0f} s. Must be a host that ssh enters without "
        f"a password, and {place.python} a program that starts at once there; try "
        f"`{place.ssh} -o BatchMode=yes {host} {shlex.quote(place.python)} --version`"
    )


def environment_faults(
    reports: Mapping[str, Mapping[str, Any]], local: Mapping[str, Any], place: Place
) -> list[str]:
    """Return what is wrong with the directories, the packages and the devices of the hosts.

    Args:
        reports: Facts by host, as `check` of host_agent.py sends them.
        local: `ddp_lab` (the version) and `files` of this machine.
        place: Of the launch.
    """
    faults = list[str]()
    complete = dict[str, Mapping[str, Any]]()
    for host, facts in reports.items():
        missing = missing_part(host, facts, place)
        if missing:
            faults.append(missing)
        else:
            complete[host] = facts
    if not complete:
        return faults

    first, reference = next(iter(complete.items()))
    for host, facts in complete.items():
        if different := different_code(facts, local):
            faults.append(
                f"{host}: {different}. Must be the same everywhere: copy this machine's to "
                f"{facts['folder']}, or install that of the host here"
            )
        if facts["torch"] != reference["torch"]:
            faults.append(
                f"{host}: has torch {facts['torch']}, but {first} {reference['torch']}. Must be "
                f"the same on all hosts: `{place.python} -m pip install "
                f"torch=={reference['torch']}` on {host}"
            )
    return faults


def missing_part(host: str, facts: Mapping[str, Any], place: Place) -> str | None:
    """Return the message for a directory or a package that a host lacks; None if it has all."""
    if facts["directory"]:
        return (
            f"{host}: --directory {place.directory}: cannot be entered there "
            f"({facts['directory']}). Must be a directory of every host, by default the one of "
            "this command; use --directory DIR"
        )
    for name, has_it in (("ddp_lab", facts["folder"]), ("torch", facts["torch"])):
        if not has_it:
            return (
                f"{host}: {name} is not installed for {place.python} in {place.directory}. Install "
                "it there, or choose another interpreter by --python PATH"
            )
    if isinstance(facts["gpus"], str):
        return (
            f"{host}: its GPUs cannot be counted ({facts['gpus']}). `{place.python} -c 'import "
            "torch'` must work there; --nproc N, or slots=N in a hostfile, needs no count"
        )
    return None


def different_code(facts: Mapping[str, Any], local: Mapping[str, Any]) -> str | None:
    """Return in what a host's ddp_lab differs from this machine's; None if it does not."""
    if facts["files"] == local["files"]:
        return None
    if facts["ddp_lab"] != local["ddp_lab"]:
        return f"has ddp_lab {facts['ddp_lab']}, but this machine {local['ddp_lab']}"
    files = {*facts["files"], *local["files"]}
    differ = sorted(each for each in files if facts["files"].get(each) != local["files"].get(each))
    return (
        f"has another ddp_lab than this machine, in {count(len(differ), 'file')}, the first of "
        f"which is {differ[0]}"
    )


def clock_faults(clocks: Mapping[str, Clock]) -> list[str]:
    """Return which clocks are apart from that of the first host."""
    first, reference = next(iter(clocks.items()))
    faults = list[str]()
    for host, clock in clocks.items():
        apart = clock.ahead - reference.ahead
        if abs(apart) - clock.error - reference.error > CLOCK:
            word = "ahead of" if apart > 0 else "behind"
            faults.append(
                f"{host}: its clock is {abs(apart):.1f} s {word} that of {first}. At most "
                f"{CLOCK:g} s is allowed, because the first of several errors is found by its "
                "time; synchronise both, for example by `timedatectl set-ntp true`"
            )
    return faults


def port_fault(host: str, port: int, reason: str) -> str:
    """Return the message for a port of the first host that cannot be taken."""
    return (
        f"{host}: port {port}, at which the hosts are to meet, cannot be opened ({reason}). Must "
        f"be a free port; choose another one by --rdzv-endpoint {host}:PORT, or leave the option "
        "out, for a port that is free"
    )


def connection_faults(reports: Mapping[str, Mapping[str, Any]], address: str) -> list[str]:
    """Return which hosts cannot reach the place where the ranks meet.

    Args:
        reports: By host, with an `error`.
        address: HOST:PORT.
    """
    return [
        f"{host}: cannot connect to {address}, where the ranks are to meet ({facts['error']}). "
        "Must be an address that every host reaches, through its firewall, too: name the hosts "
        "by such addresses, or use --rdzv-endpoint HOST:PORT"
        for host, facts in reports.items()
        if facts["error"]
    ]


def raise_faults(faults: Sequence[str]) -> None:
    """Raise the faults of the hosts, if there are any, with a line for each.

    Raises:
        ConfigError: There are.
    """
    if faults:
        raise ConfigError("\nerror: ".join(faults))
