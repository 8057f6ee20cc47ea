"""The performance options of a run: what the config sets, and what speed=auto chooses, as a function of plain facts."""

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ddp_lab.observe.log import log
from ddp_lab.speed.compile import why_not_compile
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.optimizer import can_be_fused, has_shards
from ddp_lab.world.runtime import Runtime

AUTO = "auto"
DATA_SHARE = 0.5  # of the device's free memory; the rest is for the model, its gradients and its activations
MODEL_SHARE = 0.05  # of that memory: a capture warms up with steps whose effects are undone, from copies of weights and momenta
FEW = 1_000_000  # elements of an optimizer
KEYS = {  # the config keys, by the name of the option
    "loader": "data.loader",
    "cuda_graph": "cuda_graph",
    "channels_last": "channels_last",
    "fused": "optimizer.fused",
    "compile": "compile",
}


class PerformanceOptions(NamedTuple):
    """How a training step is executed.

    Attributes:
        loader: the loader of the data, which are on the device or come from worker processes.
        cuda_graph: whether a step is captured as a CUDA graph.
        channels_last: whether images and convolutions use the channels-last memory format.
        fused: whether the optimizer uses torch's fused kernel; None leaves it to torch.
        compile: whether a step is compiled by torch.compile; "auto" is decided by `build_step`, which has measured a step.
        reasons: by name of an option that speed=auto has chosen, why it is off, or what an option that is on depended on. The
            others have the config's value, or that of speed=off.
        disabled: for the log, the options that the config requires and that are not supported.
    """

    loader: str = "device"
    cuda_graph: bool = False
    channels_last: bool = False
    fused: bool | None = None
    compile: bool | Literal["auto"] = False
    reasons: Mapping[str, str] = {}
    disabled: tuple[str, ...] = ()

    def apply_memory_format(self, model: nn.Module) -> nn.Module:
        """Set the memory format of the model and return it. Called before `Strategy.setup`, within `backend_flags`.

        The weights of convolutions with one input channel stay contiguous, as cuDNN's gradients of them are. Their strides as
        channels last differ, and DDP would copy the gradients into its buckets and warn (H100, torch 2.11, 2026-11-24). Those
        of grouped convolutions, with one input channel each, are channels last.
        """
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
            for layer in model.modules():
                if isinstance(layer, nn.Conv2d) and layer.in_channels == 1:
                    layer.weight.data = layer.weight.data.clone(memory_format=torch.contiguous_format)
        return model

    @contextmanager
    def backend_flags(self, runtime: Runtime) -> Generator[None]:
        """Set torch's global flags for these options. Enter it before `Strategy.setup`, leave it after training."""
        with runtime.side_stream() if self.cuda_graph else nullcontext():
            try:
                yield
            finally:
                if "torch._dynamo" in sys.modules:  # which takes seconds to start, and most runs never compile
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


class Facts(NamedTuple):
    """What the choice depends on.

    Attributes:
        device: type of the device: cuda, cpu or mps.
        refusals: why an option is not supported, by name; no entry if it is.
        data_bytes: size of the dataset in host memory; None if its images are read one by one.
        model_bytes: size of the unsharded model's parameters.
        free_bytes: free memory of a device, the smallest of all ranks.
    """

    device: str
    refusals: Mapping[str, str]
    data_bytes: int | None = None
    model_bytes: int = 0
    free_bytes: int = 0


def choose(speed: str, wanted: Mapping[str, Any], facts: Facts) -> PerformanceOptions:
    """Return the options of a run.

    Args:
        speed: the config key `speed`, "auto" or "off".
        wanted: by option the config's value; "auto" or None leaves the choice.
        facts: of the run.
    """
    automatic = speed == AUTO and facts.device == "cuda"
    chosen: dict[str, Any] = {name: value for name, value in wanted.items() if value not in (AUTO, None)}
    reasons: dict[str, str] = {}
    if "loader" not in chosen and automatic:
        chosen["loader"], reasons["loader"] = "workers", "the images are read one by one"
        if facts.data_bytes is not None:
            chosen["loader"] = "device" if facts.data_bytes <= DATA_SHARE * facts.free_bytes else "workers"
            reasons["loader"] = f"the dataset has {size(facts.data_bytes)}, {size(facts.free_bytes)} are free on the device"
    refusals = dict(facts.refusals)
    if chosen.get("loader") == "workers":
        refusals.setdefault(
            "cuda_graph", "not supported by data.loader=workers, which prepares batches on the host; use data.loader=device"
        )
    disabled = [name for name in ("cuda_graph", "channels_last", "compile") if chosen.get(name) and name in refusals]
    lines = tuple(f"{name}={str(chosen[name]).lower()} is disabled: {refusals[name]}" for name in disabled)
    chosen |= dict.fromkeys(disabled, False)
    if facts.model_bytes > MODEL_SHARE * facts.free_bytes:
        sizes = f"the weights have {size(facts.model_bytes)}, {size(facts.free_bytes)} are free on the device"
        refusals = {"cuda_graph": sizes, "compile": sizes} | refusals
    for name in KEYS if automatic else ():
        if name not in chosen:
            reasons[name] = refusals.get(name, "")
            if not reasons[name]:
                chosen[name] = AUTO if name == "compile" else True
    return PerformanceOptions(**chosen, reasons=reasons, disabled=lines)


def size(count: int) -> str:
    """Return a number of bytes for people."""
    return f"{count / 2**30:,.1f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def refusals_of(strategy: Strategy, model: nn.Module) -> dict[str, str]:
    """Return why an option is not supported by the strategy, the model or the device, by name; no entry if it is.

    Args:
        strategy: after `Strategy.partition`.
        model: the complete model.
    """
    device, reasons = strategy.device.type, dict(strategy.refusals)
    if reason := why_not_compile(strategy, model):
        reasons["compile"] = reason
    if strategy.batch_norm == "sync":
        reasons["cuda_graph"] = (
            "not supported by strategy.batch_norm=sync: capturing collectives inside forward and backward was never tested"
        )
    if device == "mps":
        reasons["compile"] = "not supported on mps, where torch.compile is a prototype"
        reasons["channels_last"] = (
            "torch computes wrong gradients in that format on mps (github.com/pytorch/pytorch/issues/107214)"
        )
    if device != "cuda":
        reasons["cuda_graph"] = "it needs an NVIDIA GPU" if device == "mps" else "no GPU is available"
    missing = [name for name in KEYS if name != "loader" and name not in strategy.performance_options]
    return reasons | dict.fromkeys(missing, f"not supported by strategy={strategy.name}")


def configure_optimizer(
    optimizer: torch.optim.Optimizer, options: PerformanceOptions, device: torch.device
) -> torch.optim.Optimizer:
    """Set the optimizer's options that are left to this launch, and return it. Called before the optimizer has a state.

    A CUDA graph requires that it reads its learning rate and step counters on the GPU. AdamW is fused in all runs on GPUs:
    torch's default, foreach, needs temporary memory of the size of all parameters.

    Args:
        optimizer: of the strategy's parameters.
        options: of the run. The optimizer of a captured step is fused, too, unless it is compiled.
        device: the device of this rank.
    """
    compiled = options.cuda_graph and options.compile is True and compiles_optimizer(optimizer)
    wanted = (options.cuda_graph or options.fused) and can_be_fused(optimizer)
    adamw = isinstance(optimizer, torch.optim.AdamW) and device.type == "cuda"
    for group in optimizer.param_groups:
        if options.cuda_graph and "capturable" in group:
            group["capturable"] = True
        left = adamw and group["fused"] is None and group["foreach"] is None  # tp sets foreach
        if not compiled and (wanted or left):
            group["fused"] = True
    return optimizer


def compiles_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a step that is captured and compiled compiles its optimizer, too, in place of torch's fused kernel.

    A fused kernel of few elements does not fill a GPU: LeNet's 129,068 take 20 us in place of 2. With ResNet-18's 11 million a
    compiled optimizer saves 0.5 % of a step, but compiling it takes 5 s, from the cache 1 s (an H200, docs/log/benchmarks.md).
    """
    elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    return not has_shards(optimizer) and (elements < FEW or not can_be_fused(optimizer))
