"""Fault: GPUs of one machine cannot reach each other's memory through PCIe.

The IOMMU, or the access control services (ACS) of a PCI bridge, send such traffic through the CPU.
NCCL then hangs or is slow (NVIDIA, NCCL User Guide, "Troubleshooting", "PCI Access Control
Services"). NVLink is not affected.
"""

from pathlib import Path

from ddp_lab.launchers.fabric import links
from ddp_lab.launchers.fabric.nvidia_smi import Table
from ddp_lab.launchers.preflight import Finding

ABOUT = "peer access"
NVIDIA = "0x10de"
DISPLAY = "0x03"  # the class of graphics and 3D controllers
TRANSLATED = ("DMA", "DMA-FQ")  # types of an IOMMU group; the other one is identity
# Of the PCI Express Base Specification: extended capabilities begin here, their header has the id
# in 16 bits and the place of the next one in the upper 12, and ACS has its control register at 6.
FIRST_CAPABILITY = 0x100
ACS = 0x000D
ACS_CONTROL = 6
REDIRECTS = 0x04 | 0x08  # requests, and completions, between peers go to the root
REMEDY = (
    "If NCCL hangs or is slow, disable it: iommu=pt on the kernel's command line, or in the "
    "firmware; or set NCCL_P2P_DISABLE=1, which is slower than direct access"
)


def check_peer_access(table: Table, states: Table) -> Finding:
    """Return a finding about direct access between the GPUs of this machine.

    Args:
        table: of `nvidia-smi topo -m`.
        states: of `nvidia-smi topo -p2p r`.
    """
    gpus = pci_gpus()
    if len(gpus) < 2:
        return Finding("ok", ABOUT, "fewer than two GPUs on this machine")
    if table and all(cell.startswith("NV") for cell in table.values()):
        return Finding("ok", ABOUT, "all GPUs have NVLink")
    blocked = sorted(
        f"GPU{one}-GPU{other}: {state}"
        for (one, other), state in states.items()
        if one < other and state != "OK" and not table.get((one, other), "").startswith("NV")
    )
    causes: list[str] = []
    if blocked:
        causes.append(f"nvidia-smi topo -p2p r reports {', '.join(blocked)}")
    translated = [gpu.name for gpu in gpus if iommu_type(gpu) in TRANSLATED]
    if translated:
        causes.append(f"the IOMMU translates the addresses of {', '.join(translated)}")
    redirecting = sorted({bridge for gpu in gpus for bridge in redirecting_bridges(gpu)})
    if redirecting:
        causes.append(f"ACS redirects peer traffic at the bridges {', '.join(redirecting)}")
    if causes:
        return Finding("warning", ABOUT, f"{'; '.join(causes)}. {REMEDY}")
    return Finding("ok", ABOUT, "neither IOMMU nor ACS redirects traffic between GPUs")


def explain_relief(pair: tuple[int, int]) -> Finding:
    """Return a finding about two ranks that exchange without direct access only."""
    return Finding(
        "warning",
        f"pair {pair[0]}-{pair[1]} without peer access",
        "the ranks exchange with NCCL_P2P_DISABLE=1 only: direct access between their GPUs is "
        "blocked, most likely by ACS or the IOMMU. Disable these (iommu=pt on the kernel's "
        "command line, or in the firmware), or keep NCCL_P2P_DISABLE=1",
    )


def pci_gpus() -> list[Path]:
    """Return NVIDIA's GPUs in /sys/bus/pci/devices."""
    devices = links.SYS / "bus/pci/devices"
    return sorted(
        device
        for device in devices.glob("*")
        if read(device / "vendor") == NVIDIA and read(device / "class").startswith(DISPLAY)
    )


def iommu_type(gpu: Path) -> str:
    """Return the type of a device's IOMMU group; "" without one."""
    return read(gpu / "iommu_group/type")


def redirecting_bridges(gpu: Path) -> list[str]:
    """Return the bridges above a GPU whose ACS redirects traffic between peers.

    Only root can read their registers; without it the list is empty.
    """
    names = links.bridges_above(gpu.name)[1:]
    bridges = [links.SYS / "bus/pci/devices" / name for name in names]
    return [bridge.name for bridge in bridges if acs_control(bridge) & REDIRECTS]


def acs_control(bridge: Path) -> int:
    """Return the ACS control register of a bridge; 0 if it has none, or it cannot be read."""
    try:
        registers = (bridge / "config").read_bytes()
    except OSError:
        return 0
    place = FIRST_CAPABILITY
    visited: set[int] = set()
    while place and place not in visited and place + ACS_CONTROL + 2 <= len(registers):
        visited.add(place)
        header = int.from_bytes(registers[place : place + 4], "little")
        if header & 0xFFFF == ACS:
            control = place + ACS_CONTROL
            return int.from_bytes(registers[control : control + 2], "little")
        place = header >> 20
    return 0


def read(file: Path) -> str:
    """Return the text of a file in /sys; "" if it cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
