"""What can make a step faster, on where it helps: one CUDA graph, torch.compile, channels_last."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Literal, NamedTuple

import torch
from omegaconf import DictConfig

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


class Levers(NamedTuple):
    """Which are on, of those the config asks for."""

    cuda_graph: bool
    compile: bool | Literal["tuned"]
    channels_last: bool

    @classmethod
    def choose(cls, cfg: DictConfig, strategy: Strategy) -> "Levers":
        """Leaves off what would not work, and says why."""
        return cls(**{name: cfg[name] if cfg[name] and not refused(name, cfg, strategy) else False for name in cls._fields})

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

    def shape(self, model: Chain, runtime: Runtime) -> Chain:
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


def refused(name: str, cfg: DictConfig, strategy: Strategy) -> bool:
    reason = None
    if name not in strategy.levers:
        reason = f"strategy={strategy.name} cannot"
    elif name == "cuda_graph" and strategy.device.type != "cuda":
        reason = "it needs an NVIDIA GPU" if strategy.device.type == "mps" else "there is no GPU"
    elif name == "compile" and strategy.device.type == "mps":
        reason = "torch.compile for mps is a prototype"
    elif name == "channels_last" and strategy.device.type == "mps":
        reason = "torch computes wrong gradients in that format on mps (github.com/pytorch/pytorch/issues/107214)"
    elif name == "cuda_graph" and cfg.data.loader != "device":
        reason = f"data.loader={cfg.data.loader} has the batches on the host; data.loader=device has them on the GPU"
    elif name == "cuda_graph" and strategy.batch_norm == "sync":
        reason = "strategy.batch_norm=sync sends statistics inside forward and backward, which was never recorded"
    if reason:
        log.info(f"{name}={str(cfg[name]).lower()}: left off, because {reason}")
    return reason is not None
