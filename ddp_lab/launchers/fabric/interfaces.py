"""Fault: the network interface that NCCL or gloo will use does not exist or is unusable.

Both choose it before they connect, NCCL by names and gloo by the address of the host's name.
"""

import ipaddress
import os
import socket
from collections.abc import Iterable
from typing import NamedTuple

import psutil

from ddp_lab.launchers.preflight import Finding

ABOUT = "interface"
VARIABLES = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
NAMES = {"nccl": "NCCL", "gloo": "gloo"}
# What NCCL looks for in turn, in the form of its variable (ncclFindInterfaces in misc/socket.cc).
BY_DEFAULT = ("ib", "^docker,lo,virbr", "docker", "lo", "virbr")
# interfaces of containers and virtual machines, which lead to no other machine
OF_THIS_MACHINE = ("docker", "virbr", "veth", "br-", "cni", "lxc")


class Interface(NamedTuple):
    """A network interface.

    Attributes:
        name: of the interface.
        addresses: its IPv4 and IPv6 addresses.
        is_up: whether it is running.
    """

    name: str
    addresses: tuple[str, ...]
    is_up: bool


def list_interfaces() -> list[Interface]:
    """Return the network interfaces of this machine in the order of the kernel."""
    addresses = psutil.net_if_addrs()
    states = psutil.net_if_stats()
    families = (socket.AF_INET, socket.AF_INET6)
    numbers = {name: index for index, name in socket.if_nameindex()}
    return [
        Interface(
            name,
            tuple(each.address.partition("%")[0] for each in entries if each.family in families),
            name in states and states[name].isup,
        )
        for name, entries in sorted(
            addresses.items(), key=lambda item: numbers.get(item[0], len(numbers))
        )
    ]


def check_interface(backend: str, nodes: int, interfaces: list[Interface]) -> Finding:
    """Return a finding that names the interface that the backend will use.

    Args:
        backend: "nccl" or "gloo".
        nodes: number of machines of the launch.
        interfaces: of this machine.
    """
    variable = VARIABLES[backend]
    setting = os.environ.get(variable, "")
    usable = [each for each in interfaces if each.is_up and each.addresses]
    listed = ", ".join(map(describe, usable)) or "none"
    chosen = choose(backend, setting, usable)
    if chosen is None:
        cause = f"{variable}={setting}" if setting else f"{NAMES[backend]}'s own choice"
        return Finding(
            "warning",
            ABOUT,
            f"{cause}: matches no interface that is up and has an address, so the ranks cannot "
            f"connect. Those are: {listed}. {remedy(variable, setting, usable)}",
        )
    origin = f"by {variable}={setting}" if setting else "by default"
    if nodes > 1 and is_local(chosen):
        return Finding(
            "warning",
            ABOUT,
            f"{NAMES[backend]} will use {describe(chosen)} ({origin}), which no other machine "
            f"reaches. Usable here: {listed}. {remedy(variable, '', usable)}",
        )
    return Finding("ok", ABOUT, f"{NAMES[backend]} will use {describe(chosen)} ({origin})")


def remedy(variable: str, setting: str, usable: list[Interface]) -> str:
    """Return what to do, as a sentence without its full stop.

    Args:
        variable: which chooses the interface.
        setting: its value, if that is wrong; "" if it is not set or must be.
        usable: the interfaces that are up.
    """
    others = [each.name for each in usable if not is_local(each)]
    names = others or [each.name for each in usable]
    proposal = f"Set {variable}={names[0]}" if names else f"Bring an interface up for {variable}"
    return f"{proposal}, or unset it" if setting else f"{proposal} on this machine"


def choose(backend: str, setting: str, usable: list[Interface]) -> Interface | None:
    """Return the interface that the backend uses; None if it can use none.

    Args:
        backend: "nccl" or "gloo".
        setting: the value of the variable of the backend; "" if it is not set.
        usable: the interfaces that are up and have an address.
    """
    if backend == "nccl":
        patterns = [setting] if setting else list(BY_DEFAULT)
        return first(each for pattern in patterns for each in usable if matches(each.name, pattern))
    if setting:
        return first(each for name in setting.split(",") for each in usable if each.name == name)
    return of_addresses(addresses_of_host(), usable) or first(
        each for each in usable if is_loopback(each)
    )


def matches(name: str, pattern: str) -> bool:
    """Return whether NCCL's pattern matches the name of an interface.

    Args:
        name: of an interface.
        pattern: beginnings of names, separated by commas; after "=" names; after "^" those that are
            left out; after "^=" both.
    """
    without = pattern.removeprefix("^")
    names = without.removeprefix("=").split(",")
    if without.startswith("="):
        matched = name in names
    else:
        matched = any(name.startswith(each) for each in names)
    return matched != pattern.startswith("^")


def addresses_of_host() -> list[str]:
    """Return the addresses of this host's name, for which gloo asks; [] if it has none."""
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(address[0]) for *_, address in entries]


def of_addresses(addresses: Iterable[str], usable: list[Interface]) -> Interface | None:
    """Return the interface with the first of these addresses that an interface has.

    All of 127.0.0.0/8 belongs to the loopback.
    """
    for address in addresses:
        for each in usable:
            loops = is_loopback(each) and ipaddress.ip_address(address).is_loopback
            if loops or address in each.addresses:
                return each
    return None


def is_loopback(interface: Interface) -> bool:
    return any(ipaddress.ip_address(address).is_loopback for address in interface.addresses)


def is_local(interface: Interface) -> bool:
    """Return whether an interface leads to no other machine."""
    is_virtual = interface.name.startswith(OF_THIS_MACHINE)
    has_route = any(
        not ipaddress.ip_address(address).is_link_local for address in interface.addresses
    )
    return is_loopback(interface) or is_virtual or not has_route


def describe(interface: Interface) -> str:
    """Return the name of an interface with its first address."""
    return f"{interface.name} ({interface.addresses[0]})"


def first(interfaces: Iterable[Interface]) -> Interface | None:
    return next(iter(interfaces), None)
