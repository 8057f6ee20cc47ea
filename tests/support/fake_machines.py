"""Machines with GPUs that do not exist: a tree as /sys, and an nvidia-smi for the PATH.

They stand for faults that only hardware shows. What they contain was copied from machines or is in
the manuals that the code names; that real hardware reports the same is not tested here.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

# of two GPUs below one PCIe switch
SWITCH = "0000:00:01.0/0000:01:00.0"
GPUS = ("0000:02:00.0", "0000:03:00.0")
ACS_REDIRECTS = 0x1D  # SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, as `lspci -vvv` shows it

TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47,96-143\t0\t\tN/A
GPU1\tNV18\t X \tPIX\tSYS\t0-47,96-143\t0\t\tN/A
GPU2\tSYS\tPIX\t X \tSYS\t48-95,144-191\t1\t\tN/A
NIC0\tPIX\tSYS\tSYS\t X \t\t\t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks
"""
PEERS = """\
 \tGPU0\tGPU1\tGPU2\t
 GPU0\tX\tOK\tOK\t
 GPU1\tOK\tX\tCNS\t
 GPU2\tOK\tCNS\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def clocks(*megahertz: int, load: int = 100) -> str:
    """Return what the query of the clocks prints."""
    return "".join(
        f"{index}, NVIDIA H100 80GB HBM3, GPU-{index}, {clock}, {load}\n"
        for index, clock in enumerate(megahertz)
    )


def write_nvidia_smi(folder: Path, answers: dict[str, str]) -> Path:
    """Write a program nvidia-smi, and return its folder, for the PATH.

    Args:
        folder: is created.
        answers: what it prints, by what its first argument or its first two begin with. To other
            arguments it answers with an error.
    """
    folder.mkdir(parents=True)
    cases = [
        f"{shlex.quote(start)}*) printf %s {shlex.quote(text)}; exit 0;;"
        for start, text in answers.items()
    ]
    program = folder / "nvidia-smi"
    program.write_text("\n".join(["#!/bin/sh", 'case "$*" in', *cases, "esac", "exit 6", ""]))
    program.chmod(0o755)
    return folder


def write_sys(root: Path, iommu: str, acs: int, gpus: Sequence[str] = GPUS) -> Path:
    """Write a tree as /sys with GPUs below one PCIe switch, and return it.

    Args:
        root: is created.
        iommu: type of the IOMMU group of each GPU.
        acs: the ACS control register of the switch.
        gpus: their addresses.
    """
    listed = root / "bus/pci/devices"
    listed.mkdir(parents=True)
    host = root / "devices/pci0000:00"
    for bridge in (host / "0000:00:01.0", host / SWITCH):
        bridge.mkdir(parents=True)
        (bridge / "config").write_bytes(registers(acs))
        (listed / bridge.name).symlink_to(bridge)
    for address in gpus:
        device = host / SWITCH / address
        group = root / "kernel/iommu_groups" / address
        for folder in (device, group):
            folder.mkdir(parents=True)
        (group / "type").write_text(f"{iommu}\n")
        (device / "iommu_group").symlink_to(group)
        (device / "vendor").write_text("0x10de\n")
        (device / "class").write_text("0x030200\n")
        (listed / address).symlink_to(device)
    return root


def registers(acs: int) -> bytes:
    """Return the configuration space of a bridge: an empty capability, and then ACS."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 0x150 << 20).to_bytes(4, "little")  # the next one is at 0x150
    space[0x150:0x154] = (0x000D).to_bytes(4, "little")
    space[0x156:0x158] = acs.to_bytes(2, "little")
    return bytes(space)
