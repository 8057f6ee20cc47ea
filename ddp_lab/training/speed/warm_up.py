"""Steps whose effects are undone: they compile, tune and allocate what later steps use."""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import torch

from ddp_lab.data.batch import Batch
from ddp_lab.training.step import Step


def warm_up(step: Step, batches: list[Callable[[], Batch]], times: int) -> None:
    """Run steps that compile, tune and allocate everything, and restore the state after them. Collective.

    Args:
        batches: one function for each batch size, which returns a batch.
        times: number of steps for each batch size, after one `try_out`.
    """
    with unchanged(step):
        for batch in batches:
            try_out(step, batch())
            for _ in range(times):
                step.compute(batch())


def try_out(step: Step, batch: Batch) -> None:
    """Run forward and backward of one micro-batch, in which kernels are timed and chosen, without summing gradients.

    A collective occupies a part of the GPU until the slowest rank arrives, so kernels timed meanwhile would appear too slow.
    """
    inputs, targets, count = step.mixed(batch)
    with step.strategy.no_sync():
        first = inputs.chunk(step.accumulate)[0], targets.chunk(step.accumulate)[0]
        step.strategy.add_gradient(*first, step.strategy.divisor(count))
    step.optimizer.zero_grad()


@contextmanager
def unchanged(step: Step) -> Generator[None]:
    """Restore weights, buffers, their averages, the optimizer's state and the tally, in place, when the body ends.

    Optimizer state that the body created is set to zero, the initial state of SGD and Adam.
    """
    module, optimizer = step.strategy.module, step.optimizer
    averages = step.ema.averages.values() if step.ema else ()
    held = [*module.parameters(), *module.buffers(), *averages, *step.tally.state]
    before = [tensor.detach().clone() for tensor in held]
    moments = {(parameter, key): value.clone() for parameter, key, value in state_of(optimizer)}
    try:
        yield
    finally:  # an option that speed=auto has chosen may fail in the body
        with torch.no_grad():
            for tensor, old in zip(held, before, strict=True):
                tensor.copy_(old)
            for parameter, key, value in state_of(optimizer):
                old = moments.get((parameter, key))
                value.zero_() if old is None else value.copy_(old)


@contextmanager
def refusing_to_wait() -> Generator[None]:
    """Raise an error where the host waits for the GPU, which a graph cannot capture.

    A capture would fail there, too, but with a message about the capture, and it would leave torch's generators in it.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Yield the parameter, the name and the value of each tensor of the optimizer's state."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield parameter, key, value


def match_strides(optimizer: torch.optim.Optimizer) -> None:
    """Give the optimizer's state the strides of its parameters, which fused kernels require.

    A checkpoint of a run in another memory format has other strides: channels_last is an option of a launch.
    """
    for parameter, key, value in list(state_of(optimizer)):
        if value.shape == parameter.shape and value.stride() != parameter.stride():
            optimizer.state[parameter][key] = torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
