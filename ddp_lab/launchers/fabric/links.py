"""The kind of link between two ranks: NVLink, PCIe, or the network."""

from pathlib import Path
from typing import NamedTuple

from ddp_lab.launchers.fabric.nvidia_smi import Table

SYS = Path("/sys")
# Of the legend of `nvidia-smi topo -m`.
PCIE = {
    "PIX": "PCIe, one switch (PIX)",
    "PXB": "PCIe, several switches (PXB)",
    "PHB": "PCIe via host (PHB)",
    "NODE": "PCIe via host, one NUMA node (NODE)",
    "SYS": "PCIe via host, two sockets (SYS)",
}


class Place(NamedTuple):
    """Where a rank is.

    Attributes:
        host: of its machine.
        node: index of its machine.
        gpu: number of its GPU for nvidia-smi; None on a CPU, or if nvidia-smi does not list it.
        address: of its GPU on the PCI bus, as in /sys/bus/pci/devices; "" on a CPU.
    """

    host: str
    node: int
    gpu: int | None
    address: str


def link_of(one: Place, other: Place, table: Table) -> str:
    """Return the kind of the link between two ranks.

    Args:
        one, other: the places of the ranks.
        table: of `nvidia-smi topo -m` on the machine of the first.
    """
    if one.node != other.node:
        return "network"
    if one.gpu is not None and other.gpu is not None:
        cell = table.get((one.gpu, other.gpu), "")
        if cell.startswith("NV"):
            return f"NVLink ({cell})"
        if cell in PCIE:
            return PCIE[cell]
    if one.address and other.address:
        return link_by_bridges(one.address, other.address)
    return "host memory"


def link_by_bridges(one: str, other: str) -> str:
    """Return the kind of the link between two GPUs by the PCI bridges above them in /sys.

    It is for a rank whose nvidia-smi shows only its own GPU. NVLink is not in /sys.
    """
    first = bridges_above(one)
    second = bridges_above(other)
    common = [a for a, b in zip(first, second, strict=False) if a == b]
    # the first is the host bridge, the second the port to which everything below is attached
    if len(common) > 1:
        return "PCIe, below one switch; NVLink unknown"
    return "PCIe via host; NVLink unknown"


def bridges_above(address: str) -> list[str]:
    """Return the PCI bridges from the host to a device, as names in /sys; [] if it is not there."""
    device = SYS / "bus/pci/devices" / address
    if not device.exists():
        return []
    names = device.resolve().parts
    root = next((i for i, name in enumerate(names) if name.startswith("pci")), len(names))
    return list(names[root:-1])
