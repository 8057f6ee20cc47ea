"""What `nvidia-smi` knows of the GPUs of this machine."""

import re
import shutil
import subprocess
from typing import NamedTuple

LIMIT = 10.0  # seconds; without the persistence daemon it initializes every GPU first
FIELDS = "index,name,uuid,clocks.sm,utilization.gpu"
GPU = re.compile(r"GPU(\d+)")
STYLE = re.compile("\x1b" + r"\[\d*m")  # the head of the table is underlined
# Of clocks_event_reasons.active (nvidia-smi --help-query-gpu), those that lower clocks under load.
REASONS = {
    0x04: "the power limit",
    0x08: "a hardware slowdown",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power brake of the supply",
}

Table = dict[tuple[int, int], str]


class Gpu(NamedTuple):
    """A GPU.

    Attributes:
        number: for nvidia-smi, which CUDA_VISIBLE_DEVICES does not change.
        name: of the model.
        uuid: as GPU-...
        clock: of its multiprocessors now, in MHz.
        load: percentage of the last moments during which a kernel ran.
    """

    number: int
    name: str
    uuid: str
    clock: float
    load: float


def ask(*arguments: str) -> str:
    """Return what nvidia-smi prints; "" without it, or if it fails or takes too long."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        ended = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout if ended.returncode == 0 else ""


def list_gpus() -> list[Gpu]:
    """Return the GPUs of this machine; those that do not report a number are left out."""
    gpus: list[Gpu] = []
    for line in ask(f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits").splitlines():
        fields = [field.strip() for field in line.split(",")]
        try:
            number, name, uuid, clock, load = fields
            gpus.append(Gpu(int(number), name, uuid, float(clock), float(load)))
        except ValueError:  # [N/A], [Not Supported]
            continue
    return gpus


def slow_reasons(number: int) -> list[str]:
    """Return why the driver has lowered the clocks of a GPU, as far as it says so."""
    for field in ("clocks_event_reasons.active", "clocks_throttle_reasons.active"):  # older name
        text = ask(f"--query-gpu={field}", "--format=csv,noheader", f"--id={number}").strip()
        if text.startswith("0x"):
            active = int(text, 16)
            return [reason for bit, reason in REASONS.items() if active & bit]
    return []


def links() -> Table:
    """Return how GPUs are connected, by their numbers: NV18, PIX, PXB, PHB, NODE or SYS."""
    return parse_table(ask("topo", "-m"))


def peer_states() -> Table:
    """Return whether GPUs can read each other's memory, by their numbers: OK, CNS, ...

    The states are explained below the table of `nvidia-smi topo -p2p r`.
    """
    return parse_table(ask("topo", "-p2p", "r"))


def parse_table(text: str) -> Table:
    """Return the cells of a table of `nvidia-smi topo`, by the numbers of two GPUs.

    Args:
        text: A table whose first line and first column name GPUs, and then other devices.
    """
    lines = [STYLE.sub("", line).split() for line in text.splitlines()]
    named = [words for words in lines if words and GPU.fullmatch(words[0])]
    if not named:
        return {}
    head, *rows = named
    columns = [int(match[1]) for word in head if (match := GPU.fullmatch(word))]
    cells: Table = {}
    for first, *values in rows:
        row = int(first.removeprefix("GPU"))
        for column, value in zip(columns, values, strict=False):
            if column != row:
                cells[row, column] = value
    return cells
