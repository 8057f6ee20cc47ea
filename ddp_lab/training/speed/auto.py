"""speed=auto: the performance options of a run where the config leaves the choice, as functions of plain facts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

AUTO = "auto"
DATA_SHARE = 0.5  # of the device's free memory; the rest is for the model, its gradients and its activations
MODEL_SHARE = 0.05  # of that memory: a capture warms up with steps whose effects are undone, from copies of weights and momenta
# Measured on one H200 with torch 2.11, Fashion-MNIST, 2026-11-23: `train.py cuda_graph=true channels_last=true epochs=1` with
# compile=true, and speed=auto, which did not compile. ResNet-18 at batch 64: an epoch takes 2.60 s captured and 2.13 s compiled
# in float32, 2.02 and 1.39 s in bf16. LeNet gains more. On other H200s compiling took 14 to 18 s for ResNet-18 and 8 to 10 s
# for LeNet at batch 256, from the cache 3 to 5 s and 2.5 s, and 5 s more where cuDNN first read its kernels from the disk.
GAINS = {"float32": 0.18, "bf16": 0.3}  # share of a step that compiling saves, by precision
COLD, EACH = 9.0, 0.2  # seconds that compiling takes, and more for each layer with parameters
WARM = 0.3  # share of that time if the kernels are in the cache
SWITCHED = ("cuda_graph", "channels_last", "optimizer.fused", "compile")  # the keys but data.loader


class Facts(NamedTuple):
    """What the choice depends on.

    Attributes:
        device: type of the device: cuda, cpu or mps.
        refusals: why the strategy, the model or the device does not support an option, by key; no entry if it is supported.
        data_bytes: size of the dataset in host memory; None if its images are read one by one.
        model_bytes: size of the unsharded model's parameters.
        free_bytes: free memory of a device, the smallest of all ranks.
    """

    device: str
    refusals: Mapping[str, str]
    data_bytes: int | None
    model_bytes: int
    free_bytes: int


class Choice(NamedTuple):
    """The value of a key, and why.

    Attributes:
        value: "auto" for `compile`, which is decided when the duration of a step is known (`earns_compiling`).
        reason: why an option is off; for an option that is on, what it depended on, or an empty text.
        automatic: whether speed=auto has chosen it; else it is the config's value, or that of speed=off.
    """

    value: Any
    reason: str = ""
    automatic: bool = True

    def __str__(self) -> str:
        value = {True: "on", False: "off", None: "off"}.get(self.value, self.value)
        return f"{value:7} {self.reason if self.automatic else 'set in the config'}".rstrip()


def choose(speed: str, wanted: Mapping[str, Any], facts: Facts) -> dict[str, Choice]:
    """Return the choice for each key of `wanted`.

    Args:
        speed: the config key `speed`, "auto" or "off".
        wanted: the values of data.loader and of the keys SWITCHED in the config; "auto", or null for optimizer.fused, leaves
            the choice.
        facts: of the run.
    """
    automatic = speed == AUTO and facts.device == "cuda"
    loader = _choose_loader(facts) if automatic else Choice("device", automatic=False)
    if wanted["data.loader"] != AUTO:
        loader = Choice(wanted["data.loader"], automatic=False)
    refusals = dict(facts.refusals)
    if loader.value != "device":
        refusals.setdefault("cuda_graph", needs_device_loader(loader.value))
    if facts.model_bytes > MODEL_SHARE * facts.free_bytes:
        sizes = f"the weights have {_size(facts.model_bytes)}, {_size(facts.free_bytes)} are free on the device"
        refusals = {"cuda_graph": sizes, "compile": sizes} | refusals
    choices = {"data.loader": loader}
    for key in SWITCHED:
        off, on = (None, True) if key == "optimizer.fused" else (False, AUTO if key == "compile" else True)
        if wanted[key] not in (AUTO, None):
            choices[key] = Choice(wanted[key], automatic=False)
        elif not automatic:
            choices[key] = Choice(off, automatic=False)
        else:
            choices[key] = Choice(off, refusals[key]) if key in refusals else Choice(on)
    return choices


def _choose_loader(facts: Facts) -> Choice:
    if facts.data_bytes is None:
        return Choice("workers", "the images are read one by one")
    sizes = f"the dataset has {_size(facts.data_bytes)}, {_size(facts.free_bytes)} are free on the device"
    return Choice("device" if facts.data_bytes <= DATA_SHARE * facts.free_bytes else "workers", sizes)


def _size(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def needs_device_loader(loader: str) -> str:
    """Return why `cuda_graph` is not supported by another loader."""
    return f"not supported by data.loader={loader}, which prepares batches on the host; use data.loader=device"


def compile_seconds(layers: int, cached: bool) -> float:
    """Return how long compiling a step takes, approximately.

    Args:
        layers: number of layers with parameters.
        cached: whether the same work was compiled before on this machine.
    """
    return (COLD + EACH * layers) * (WARM if cached else 1.0)


def earns_compiling(steps_left: int, step_seconds: float, seconds: float, precision: str) -> Choice:
    """Return whether the rest of the run is long enough to earn the time that compiling takes.

    Args:
        steps_left: steps until the end of the run.
        step_seconds: measured duration of a step that is not compiled.
        seconds: how long compiling takes.
        precision: the config key `precision`.
    """
    saved = GAINS[precision] * steps_left * step_seconds
    text = (
        f"{steps_left:,} steps of {1000 * step_seconds:.3g} ms are left: compiling saves about {saved:.0f} s of them and takes "
        f"about {seconds:.0f} s"
    )
    return Choice(saved > seconds, text)


def notice(choices: Mapping[str, Choice], precision: str) -> list[str]:
    """Return the lines of the notice about the choices, for the log.

    Args:
        choices: the choice for each key.
        precision: the config key `precision`, which is never chosen: it changes the numbers.
    """
    advice = "" if precision == "bf16" else "precision=bf16 halves the bytes of activations, but rounds to 3 digits"
    rows = {key: str(choice) for key, choice in choices.items()} | {"precision": f"{precision:7} {advice}".rstrip()}
    return ["speed=auto:", *(f"  {key:15} {row}" for key, row in rows.items())]
