"""Steps whose effects are undone: they compile, choose kernels and allocate what later steps use."""

from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from ddp_lab.data.batch import Batch
from ddp_lab.training.optimizer import state_tensors
from ddp_lab.training.step import Step


def warm_up(step: Step, batches: list[Callable[[], Batch]], times: int) -> None:
    """Run steps that compile, choose kernels and allocate everything, and restore the state after them. Collective.

    Args:
        batches: one function for each batch size, which returns a batch.
        times: number of steps for each batch size.
    """
    with unchanged(step):
        for batch in batches:
            # Kernels are timed in one micro-batch without collectives, which would occupy a part of the GPU meanwhile.
            inputs, targets, count = step.mixed(batch())
            accumulate = step.options.accumulate
            with step.strategy.no_sync():
                first = inputs.chunk(accumulate)[0], targets.chunk(accumulate)[0]
                step.strategy.add_gradient(*first, count)
            step.optimizer.zero_grad()
            for _ in range(times):
                step.compute(batch())


@contextmanager
def unchanged(step: Step) -> Generator[None]:
    """Restore weights, buffers, their averages, the optimizer's state and the running sums, in place, when the body ends.

    Optimizer state that the body created is set to zero, the initial state of SGD and Adam.
    """
    module, optimizer = step.strategy.module, step.optimizer
    averages = step.ema.averages.values() if step.ema else ()
    held = [*module.parameters(), *module.buffers(), *averages, *step.running_sums.state]
    before = [tensor.detach().clone() for tensor in held]
    moments = {(parameter, key): value.clone() for parameter, key, value in state_tensors(optimizer)}
    try:
        yield
    finally:  # an option that speed=auto has chosen may fail in the body
        with torch.no_grad():
            for tensor, old in zip(held, before, strict=True):
                tensor.copy_(old)
            for parameter, key, value in state_tensors(optimizer):
                old = moments.get((parameter, key))
                value.zero_() if old is None else value.copy_(old)
