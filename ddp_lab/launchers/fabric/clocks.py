"""Fault: a GPU whose clocks are apart from the others, which makes all ranks wait for it."""

from statistics import median

from ddp_lab.launchers.fabric.nvidia_smi import Gpu, list_gpus, slow_reasons
from ddp_lab.launchers.preflight import Finding

ABOUT = "clocks"
BUSY_SECONDS = 2.5  # for which the ranks keep their GPUs busy
WAIT = 1.2  # seconds until clocks and load are read; nvidia-smi averages the load over up to 1 s
LOADED = 50.0  # the least load, in percent: an idle GPU lowers its clocks
APART = 0.9  # of the median of the others; below that a GPU is named


def check_clocks() -> Finding:
    """Return a finding about the clocks of the GPUs that are busy now."""
    gpus = [gpu for gpu in list_gpus() if gpu.load >= LOADED]
    if len(gpus) < 2:
        return Finding("ok", ABOUT, "fewer than two GPUs are busy, so none is compared")
    slow = [gpu for gpu in gpus if gpu.clock < APART * usual_clock(gpu, gpus)]
    if slow:
        texts = [describe(gpu, gpus) for gpu in slow]
        return Finding(
            "warning",
            ABOUT,
            f"{'; '.join(texts)}. All ranks wait for the slowest. Check its cooling and power "
            "(nvidia-smi -q -d PERFORMANCE,POWER), or reset its clocks: nvidia-smi -rgc -i N",
        )
    lowest = min(gpu.clock for gpu in gpus)
    highest = max(gpu.clock for gpu in gpus)
    return Finding("ok", ABOUT, f"{len(gpus)} busy GPUs run at {lowest:.0f} to {highest:.0f} MHz")


def usual_clock(gpu: Gpu, gpus: list[Gpu]) -> float:
    """Return the median clock, in MHz, of the other GPUs of the same model; 0 if there is none."""
    others = [each.clock for each in gpus if each != gpu and each.name == gpu.name]
    return median(others) if others else 0.0


def describe(gpu: Gpu, gpus: list[Gpu]) -> str:
    """Return what is wrong with the clocks of a GPU."""
    reasons = slow_reasons(gpu.number)
    because = f", lowered by {', '.join(reasons)}" if reasons else ""
    return (
        f"GPU {gpu.number} runs at {gpu.clock:.0f} MHz, the others at "
        f"{usual_clock(gpu, gpus):.0f} MHz{because}"
    )
