"""What can make a step faster, on where it helps: one CUDA graph, torch.compile, channels_last."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

import torch

from ddp_lab.data.sharding import Loader
from ddp_lab.models.chain import Chain
from ddp_lab.observe.logger import log
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.speed.cuda_graph import GraphStep, compile_step, warm_up
from ddp_lab.training.speed.notice import working
from ddp_lab.training.speed.switches import compiling, cudnn_benchmark, eager_unless_compiled
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

CHOOSING = 2.0  # seconds for cuDNN's choices, where compiling takes many anyway


class PerformanceOptions(NamedTuple):
    """How a training step is executed."""

    cuda_graph: bool
    compile: bool | Literal["tuned"]
    channels_last: bool

    def supported(self, strategy: Strategy, loader: str) -> "PerformanceOptions":
        """Disables what is not supported, and logs why.

        Args:
            loader: which one the batches come from, "device" or "workers".
        """
        reasons = {name: why_not(name, strategy, loader) for name, value in self._asdict().items() if value}
        for name, reason in reasons.items():
            if reason:
                log.info(f"{name}={str(getattr(self, name)).lower()}: left off, because {reason}")
        return self._replace(**{name: False for name, reason in reasons.items() if reason})

    @contextmanager
    def switches(self, runtime: Runtime) -> Iterator[None]:
        """Hold torch's global switches that these options need. Enter it before `Strategy.setup`, leave it after training."""
        with ExitStack() as stack:
            if self.cuda_graph:
                stack.enter_context(runtime.side_stream())
            if self.cuda_graph or self.compile:
                stack.enter_context(cudnn_benchmark())
            if self.compile:
                stack.enter_context(eager_unless_compiled())
            yield

    def shape(self, model: Chain) -> Chain:
        """Before the strategy gets the model, within `switches`."""
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def settle(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Before the optimizer has a state. A graph wants Adam's step counters and the learning rate read on the GPU."""
        for group in optimizer.param_groups if self.cuda_graph else []:
            if "capturable" in group:
                group["capturable"] = True
            if "fused" in group and not self.compile:
                group["fused"] = True
        return optimizer

    def build(self, step: Step, loader: Loader) -> Step | GraphStep:
        """The step to train with, compiled and recorded. Collective."""
        notice = f"compiling the training step (compile={str(self.compile).lower()})"
        if self.compile:
            compile_step(step, loader if self.cuda_graph else None, self.compile == "tuned", self.channels_last)
        if self.cuda_graph:
            graph = GraphStep(step, loader)
            graph.record(CHOOSING if self.compile else 0, notice if self.compile else "warming up the training step")
            return graph
        if self.compile:
            loader.set_epoch(1)
            first = next(iter(loader))
            with working(notice), compiling():
                warm_up(step, [lambda: first], 2)
        return step


def why_not(name: str, strategy: Strategy, loader: str) -> str | None:
    """Why an option is not supported here; None: it is."""
    if name not in strategy.performance_options:
        return f"strategy={strategy.name} cannot"
    device = strategy.device.type
    if name == "cuda_graph" and device != "cuda":
        return "it needs an NVIDIA GPU" if device == "mps" else "there is no GPU"
    if name == "compile" and device == "mps":
        return "torch.compile for mps is a prototype"
    if name == "channels_last" and device == "mps":
        return "torch computes wrong gradients in that format on mps (github.com/pytorch/pytorch/issues/107214)"
    if name == "cuda_graph" and loader != "device":
        return f"data.loader={loader} has the batches on the host; data.loader=device has them on the GPU"
    if name == "cuda_graph" and strategy.batch_norm == "sync":
        return "strategy.batch_norm=sync sends statistics inside forward and backward, which was never recorded"
    return None
