"""The hosts of a launch over ssh: `--hosts a,b,c`, or a file with a host per line."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ddp_lab.config.errors import ConfigError, count

# Names, addresses and aliases that ssh knows, with or without a user. None begins with a hyphen,
# which ssh would take for an option.
NAME = re.compile(r"(?:[\w.-]+@)?[\w.:%][\w.:%-]*", re.ASCII)
SLOTS = re.compile(r"slots=(\d+)", re.ASCII)
FORM = "a line is `HOST` or `HOST slots=N`, where N is the number of ranks, and # begins a comment"


class Host(NamedTuple):
    """A machine of a launch.

    Attributes:
        name: What ssh gets, for example node1 or user@node1.
        slots: Number of ranks that its hostfile gives it; None: it gives none.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """Return the hosts of --hosts, which are separated by commas.

    Raises:
        ConfigError: A name is empty, not allowed, or given twice.
    """
    hosts = [Host(name.strip()) for name in text.split(",")]
    for name, _ in hosts:
        check_name(name, f"--hosts {text}")
    check_names_differ(hosts, f"--hosts {text}")
    return hosts


def read_hostfile(path: Path) -> list[Host]:
    """Return the hosts of a file, in the form that OpenMPI and DeepSpeed read.

    Raises:
        ConfigError: The file cannot be read, has no host, or a line is not of that form.
    """
    option = f"--hostfile {path}"
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(
            f"{option}: cannot be read ({reason}). Must be a text file, of which {FORM}"
        ) from None

    hosts = list[Host]()
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            hosts.append(parse_line(words, f"{option}, line {number}"))
    if not hosts:
        raise ConfigError(f"{option}: has no host; {FORM}")
    check_names_differ(hosts, option)
    return hosts


def parse_line(words: list[str], place: str) -> Host:
    """Return the host of a line.

    Args:
        words: The line without its comment, split at spaces.
        place: Where it is, for a message.

    Raises:
        ConfigError: It is not of the form of FORM.
    """
    name, *options = words
    check_name(name, place)
    if not options:
        return Host(name)
    slots = SLOTS.fullmatch(options[0])
    if len(options) > 1 or not slots:
        raise ConfigError(f"{place}: {' '.join(options)}: is not supported; {FORM}")
    if int(slots[1]) < 1:
        raise ConfigError(f"{place}: {options[0]}: must be at least 1; leave the host out instead")
    return Host(name, int(slots[1]))


def check_name(name: str, place: str) -> None:
    """Check that ssh takes a name as that of a host.

    Raises:
        ConfigError: It does not, or the name has the ranks of the host in it, as in mpirun's
            --host.
    """
    if re.fullmatch(r"[\w.@-]+:\d+", name, re.ASCII):
        host, _, number = name.partition(":")
        raise ConfigError(
            f"{place}: {name}: is no name of a host. For {count(int(number), 'rank')} on each "
            f"host use --nproc {number}, for other numbers a --hostfile with the line `{host} "
            f"slots={number}`; a port of ssh belongs in its config"
        )
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{place}: {name!r}: is no name of a host. Must be a name, an address or USER@HOST, "
            "as for ssh; separate several by commas, without spaces"
        )


def check_names_differ(hosts: Iterable[Host], place: str) -> None:
    """Check that no host is named twice.

    Raises:
        ConfigError: One is.
    """
    name, number = Counter(host.name for host in hosts).most_common(1)[0]
    if number > 1:
        raise ConfigError(
            f"{place}: {name} is named {number} times; name each host once, with all its ranks "
            "(--nproc N, or slots=N in a hostfile)"
        )
