"""How a training step is executed: a run's performance options, and their choice by facts."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from ddp_lab.data.dataset import Samples
from ddp_lab.observe.log import log
from ddp_lab.world.device import size
from ddp_lab.world.runtime import Runtime

AUTO = "auto"
# of the device's free memory; the rest is for the model, its gradients and its activations
DATA_SHARE = 0.5
# of that memory: a capture warms up with steps whose effects are undone, from copies of weights and
# momenta
MODEL_SHARE = 0.05
# why the form of the batches excludes options
OF_TREES = "it was never tested with inputs or targets that are a tuple or dict"
OF_STREAM = (
    "a CUDA graph gathers its batches from a dataset on the device, which a stream does not fill"
)
OF_ANY_LENGTH = (
    "data.collate_fn may return another shape in each batch; pad to a fixed length in the dataset, "
    "and leave data.collate_fn out"
)
KEYS = {  # the config keys, by the name of the option
    "loader": "data.loader",
    "cuda_graph": "cuda_graph",
    "channels_last": "channels_last",
    "fused": "optimizer.fused",
    "compile": "compile",
}


class Wanted(NamedTuple):
    """What the config says about performance.

    Attributes:
        speed: the key of this name.
        options: the value of each option.
        optimizer: class or function of the optimizer.
        optimizer_name: its name in the config.
    """

    speed: str
    options: Mapping[str, Any]
    optimizer: Any
    optimizer_name: str

    @property
    def is_plain(self) -> bool:
        """Whether no option is wanted that a strategy, a model or a device may not support."""
        return not any(
            self.options[name] is True for name in ("cuda_graph", "channels_last", "compile")
        )


class PerformanceOptions(NamedTuple):
    """How a training step is executed.

    Attributes:
        loader: the loader of the data, which are on the device or come from worker processes.
        cuda_graph: whether a step is captured as a CUDA graph.
        channels_last: whether images and convolutions use the channels-last memory format.
        fused: whether the optimizer uses torch's fused kernel; None leaves it to torch.
        compile: whether a step is compiled by torch.compile; "auto" is decided by `build_step`,
            which has measured a step.
        reasons: by name of an option that speed=auto has chosen, why it is off, or what an option
            that is on depended on. The others have the config's value, or that of speed=off.
        disabled: for the log, the options that the config requires and that are not supported.
    """

    loader: str = "device"
    cuda_graph: bool = False
    channels_last: bool = False
    fused: bool | None = None
    compile: bool | Literal["auto"] = False
    reasons: Mapping[str, str] = {}
    disabled: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether the step is taken as it is, in eager mode, and nothing is tried."""
        return not (self.cuda_graph or self.compile)

    @contextmanager
    def backend_flags(self, runtime: Runtime) -> Generator[None]:
        """Set torch's global flags for these options.

        Enter it before `Strategy.setup`, leave it after training.
        """
        with runtime.side_stream() if self.cuda_graph else nullcontext():
            try:
                yield
            finally:
                # which takes seconds to start, and most runs never compile
                if "torch._dynamo" in sys.modules:
                    torch.compiler.set_stance("default")

    def log_choices(self) -> None:
        """Log what speed=auto has chosen, if anything."""
        if not self.reasons:
            return
        log.info("speed=auto:")
        for name, key in KEYS.items():
            value = getattr(self, name)
            shown = {True: "on", False: "off", None: "off"}.get(value, value)
            log.info(f"  {key:15} {shown:7} {self.reasons.get(name, 'set in the config')}".rstrip())


def excluded_by(train: Samples) -> dict[str, str]:
    """Return why the form of the batches excludes performance options, by their names.

    Args:
        train: samples of the training set.
    """
    by_stream = {"cuda_graph": OF_STREAM} if train.is_endless else dict[str, str]()
    if train.is_tree:
        return by_stream | dict.fromkeys(("cuda_graph", "compile", "channels_last"), OF_TREES)
    if not train.has_fixed_shapes:
        return by_stream | dict.fromkeys(("cuda_graph", "compile"), OF_ANY_LENGTH)
    return by_stream


def plain_options(wanted: Wanted, in_memory: bool) -> PerformanceOptions:
    """Return the options of a run in which nothing is chosen, and nothing may be unsupported.

    Args:
        wanted: what the config says.
        in_memory: whether the dataset is in host memory, and samples are not read one by one.
    """
    chosen = {name: value for name, value in wanted.options.items() if value not in (AUTO, None)}
    if not in_memory:
        chosen.setdefault("loader", "workers")
    return PerformanceOptions(**chosen)


def choose(
    automatic: bool,
    wanted: Mapping[str, Any],
    unsupported: Mapping[str, str],
    data_bytes: int | None = None,
    model_bytes: int = 0,
    free_bytes: int = 0,
) -> PerformanceOptions:
    """Return the options of a run.

    Args:
        automatic: whether speed=auto chooses: on NVIDIA GPUs.
        wanted: by option the config's value; "auto" or None leaves the choice.
        unsupported: why an option is not supported, by name; no entry if it is.
        data_bytes: size of the dataset in host memory; None if its samples are read one by one.
        model_bytes: size of the unsharded model's parameters.
        free_bytes: free memory of a device, the smallest of all ranks.
    """
    chosen = {name: value for name, value in wanted.items() if value not in (AUTO, None)}
    reasons: dict[str, str] = {}
    if "loader" not in chosen and automatic:
        chosen["loader"] = "workers"
        reasons["loader"] = "the samples are read one by one"
        if data_bytes is not None:
            chosen["loader"] = "device" if data_bytes <= DATA_SHARE * free_bytes else "workers"
            reasons["loader"] = (
                f"the dataset has {size(data_bytes)}, {size(free_bytes)} are free on the device"
            )

    if chosen.get("loader") == "workers":
        needs = (
            "not supported by data.loader=workers, which prepares batches on the host; use "
            "data.loader=device"
        )
        unsupported = {"cuda_graph": needs} | dict(unsupported)

    disabled = [
        name
        for name in ("cuda_graph", "channels_last", "compile")
        if chosen.get(name) and name in unsupported
    ]
    lines = tuple(
        f"{name}={str(chosen[name]).lower()} is disabled: {unsupported[name]}" for name in disabled
    )
    chosen |= dict.fromkeys(disabled, False)

    if model_bytes > MODEL_SHARE * free_bytes:
        sizes = f"the weights have {size(model_bytes)}, {size(free_bytes)} are free on the device"
        unsupported = {"cuda_graph": sizes, "compile": sizes} | dict(unsupported)
    for name in KEYS if automatic else ():
        if name not in chosen:
            reasons[name] = unsupported.get(name, "")
            if not reasons[name]:
                chosen[name] = AUTO if name == "compile" else True
    return PerformanceOptions(**chosen, reasons=reasons, disabled=lines)
