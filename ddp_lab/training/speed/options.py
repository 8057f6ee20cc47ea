"""The performance options of a training step: CUDA graph, torch.compile, channels_last."""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

import torch
from torch import nn

from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.on_shards import can_be_fused, has_shards
from ddp_lab.training.speed.auto import AUTO, needs_device_loader
from ddp_lab.training.speed.cache import kept_kernels
from ddp_lab.training.speed.cuda_graph import GraphStep, compile_step
from ddp_lab.training.speed.notice import working
from ddp_lab.training.speed.switches import compiling, cudnn_benchmark, eager_unless_compiled, end_choosing, stance_restored
from ddp_lab.training.speed.warm_up import warm_up
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

FEW = 1_000_000  # elements


class PerformanceOptions(NamedTuple):
    """The performance options of a run: how a training step is executed.

    Attributes:
        cuda_graph: whether a step is captured as a CUDA graph.
        compile: whether a step is compiled by torch.compile; "tuned" also times more kernels, which takes minutes; "auto" is
            decided by `build_step`, which has measured a step.
        channels_last: whether images and convolutions use the channels-last memory format.
    """

    cuda_graph: bool
    compile: bool | Literal["tuned", "auto"]
    channels_last: bool

    def supported(self, strategy: Strategy, loader: str, model: nn.Module) -> tuple["PerformanceOptions", list[str]]:
        """Return the options that are supported, and lines for the log about the others.

        Args:
            strategy: the strategy of the run.
            loader: the config's `data.loader`, "device" or "workers".
            model: the model of the run.
        """
        reasons = {name: why_not(name, strategy, loader, model) for name, value in self._asdict().items() if value}
        refused = {name: reason for name, reason in reasons.items() if reason}
        notes = [f"{name}={str(getattr(self, name)).lower()} is disabled: {why}" for name, why in refused.items()]
        return self._replace(**dict.fromkeys(refused, False)), notes

    @contextmanager
    def switches(self, runtime: Runtime) -> Generator[None]:
        """Set torch's global switches for these options. Enter it before `Strategy.setup`, leave it after training."""
        with ExitStack() as stack:
            if self.cuda_graph:
                stack.enter_context(runtime.side_stream())
            if self.compile != AUTO and (self.cuda_graph or self.compile):
                stack.enter_context(cudnn_benchmark())
            if self.compile == AUTO:  # cuDNN's benchmark takes as long as it saves in 20,000 steps of ResNet-18
                stack.enter_context(kept_kernels())
                stack.enter_context(stance_restored())  # `build_step` sets it if it compiles
            elif self.compile:
                stack.enter_context(eager_unless_compiled())
            yield

    def shape(self, model: nn.Module) -> nn.Module:
        """Set the memory format of the model and return it. Called before `Strategy.setup`, within `switches`."""
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def settle(
        self, optimizer: torch.optim.Optimizer, device: torch.device, fused: bool = False, elements: int | None = None
    ) -> torch.optim.Optimizer:
        """Set the optimizer's options that are left to this launch, and return it. Called before the optimizer has a state.

        A CUDA graph requires that it reads its learning rate and step counters on the GPU. AdamW is fused in runs on GPUs:
        torch's default, foreach, needs temporary memory of the size of all parameters, and is slow on the host (offload.py).

        Args:
            optimizer: of the strategy's parameters.
            device: the device of this rank.
            fused: whether to fuse another optimizer, too; a graph has a fused one unless it has a compiled one.
            elements: number of the parameters' elements, if not that of the optimizer's.
        """
        compiled = self.cuda_graph and self.compile in (True, "tuned") and compiles_optimizer(optimizer, elements)
        if isinstance(optimizer, torch.optim.AdamW) and device.type == "cuda" and not compiled:
            for group in optimizer.param_groups:
                if group["fused"] is None and group["foreach"] is None:  # tp sets foreach
                    group["fused"] = True
        for group in optimizer.param_groups:
            if self.cuda_graph and "capturable" in group:
                group["capturable"] = True
            if can_be_fused(optimizer) and (self.cuda_graph or fused) and not compiled:
                group["fused"] = True
        return optimizer

    def build(self, step: Step, loader: Loader, checked: bool = False) -> Step | GraphStep:
        """Return the step to train with, compiled and captured according to these options. Collective.

        Args:
            step: the step in eager mode.
            loader: of the training set.
            checked: whether a step that would wait for the GPU raises an error before its capture begins.
        """
        device_loader = loader if isinstance(loader, DeviceLoader) else None
        assert device_loader is not None or not self.cuda_graph, "cuda_graph needs data.loader=device (see `supported`)"
        notice = "warming up the training step"
        if self.compile:
            captured = device_loader if self.cuda_graph else None
            what = compile_step(step, captured, self.compile == "tuned", self.channels_last)
            notice = f"compiling the training step (compile={str(self.compile).lower()}): {what}"
        if self.cuda_graph and device_loader is not None:
            graph = GraphStep(step, device_loader)
            graph.capture(bool(self.compile), notice, checked)
            return graph
        if self.compile:
            loader.set_epoch(1)
            first = next(iter(loader))
            with working(notice), compiling():
                warm_up(step, [lambda: first], 2)
            end_choosing()
        return step


def compiles_optimizer(optimizer: torch.optim.Optimizer, elements: int | None = None) -> bool:
    """Return whether a step that is captured and compiled compiles its optimizer, too, in place of torch's fused kernel.

    A fused kernel of few elements does not fill a GPU: LeNet's 129,068 take 20 us in place of 2. With ResNet-18's 11 million a
    compiled optimizer saves 0.5 % of a step, but compiling it takes 5 s, from the cache 1 s (an H200, docs/log/benchmarks.md).

    Args:
        optimizer: of this rank's parameters.
        elements: number of their elements, if not that of the optimizer's.
    """
    if elements is None:
        elements = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
    return not has_shards(optimizer) and (elements < FEW or not can_be_fused(optimizer))


def why_not(name: str, strategy: Strategy, loader: str, model: nn.Module) -> str | None:
    """Return why an option is not supported here, or None if it is."""
    if name not in strategy.performance_options:
        return f"not supported by strategy={strategy.name}"
    if name == "compile" and (reason := strategy.why_not_compile(model)):
        return reason
    if name == "cuda_graph" and (reason := strategy.why_not_capture()):
        return reason
    device = strategy.device.type
    if name == "cuda_graph" and device != "cuda":
        return "it needs an NVIDIA GPU" if device == "mps" else "no GPU is available"
    if name == "compile" and device == "mps":
        return "not supported on mps, where torch.compile is a prototype"
    if name == "channels_last" and device == "mps":
        return "torch computes wrong gradients in that format on mps (github.com/pytorch/pytorch/issues/107214)"
    if name == "cuda_graph" and loader != "device":
        return needs_device_loader(loader)
    if name == "cuda_graph" and strategy.batch_norm == "sync":
        return "not supported by strategy.batch_norm=sync: capturing collectives inside forward and backward was never tested"
    return None
