"""The fastest step that works.

The options that speed=auto has chosen are tried and measured, and what fails is given up.
"""

import gc
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch

from ddp_lab.config.errors import count, is_or_are
from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.models.blocks import kind
from ddp_lab.speed.compile import compiling, repeats
from ddp_lab.speed.cuda_graph import GraphStep, unchanged, warm_up
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.optimizer import configure_optimizer
from ddp_lab.training.performance import AUTO, PerformanceOptions
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

T = TypeVar("T")
TIMED = 5  # steps
# Seconds that the rest of a run must take without compiling, and more for each layer for which code
# is generated. Rounded up from where compiling paid on an H200: other cards may profit earlier, and
# lose some seconds of a minute or more at worst.
WORTH_FROM = 60.0
WORTH_EACH = 1.0


def build_step(
    options: PerformanceOptions,
    step: Step,
    loader: Loader,
    steps_left: float,
    seconds_left: float = math.inf,
) -> Step | GraphStep:
    """Return the step to train with, compiled and captured by the options, and log what was chosen.

    Collective.

    Args:
        options: what speed=auto has chosen is off if it fails; what the config has set must not
            fail.
        step: the step in eager mode.
        loader: of the training set.
        steps_left: steps until the end of the run; inf if only the time limits it.
        seconds_left: seconds of training until the end of a run that the time limits; else inf.
    """
    decide = options.compile == AUTO
    options, built = build_what_works(
        options._replace(compile=False) if decide else options, step, loader
    )
    if decide:
        seconds = measure(step, built, loader)
        steps_left = min(steps_left, seconds_left / seconds)
        pays, why = compile_pays_off(step, seconds, steps_left)
        options = options._replace(compile=pays, reasons={**options.reasons, "compile": why})
        if pays:
            del built  # frees the memory of its graphs
            reset(step, options)
            options, built = build_what_works(options, step, loader)
    options.log_choices()
    return built


def build_what_works(
    options: PerformanceOptions, step: Step, loader: Loader
) -> tuple[PerformanceOptions, Step | GraphStep]:
    """Return the step, and the options without those that speed=auto has chosen and that fail.

    Collective.
    """
    for name, failed in (("compile", "compiled"), ("cuda_graph", "captured")):
        if getattr(options, name) and name in options.reasons:
            built, problem = attempt(step.strategy.runtime, partial(build, options, step, loader))
            if built is not None:
                return options, built
            why = {**options.reasons, name: f"the step cannot be {failed}: {problem}"}
            options = options._replace(**{name: False}, reasons=why)
            reset(step, options)
            if name == "compile":
                torch.compiler.set_stance("force_eager")  # parts of the step are compiled
    return options, build(options, step, loader)


def build(options: PerformanceOptions, step: Step, loader: Loader) -> Step | GraphStep:
    """Return the step, compiled and captured by options of which `compile` is not "auto".

    Collective.
    """
    captured = loader if options.cuda_graph and isinstance(loader, DeviceLoader) else None
    if options.compile:
        first_steps = compiling(step, captured, options.channels_last)
    else:
        first_steps = nullcontext()
    if captured is not None:
        graph = GraphStep(step, captured)
        graph.capture(first_steps)
        return graph

    if options.compile:
        loader.set_epoch(1)
        first = next(iter(loader))
        with first_steps:
            warm_up(step, lambda: first, 2)
    return step


def attempt(runtime: Runtime, build: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `build` returns; or None and the first line of an error if it failed on any rank.

    Collective.
    """
    built = None
    problem = ""
    try:
        built = build()
    # of torch, of a compiler, or of the user's model, which has to run in eager mode then
    except Exception as error:
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    problem = runtime.gather_and_decide(
        "attempt", problem, lambda problems: next(filter(None, problems), "")
    )
    return (None, problem) if problem else (built, "")


def reset(step: Step, options: PerformanceOptions) -> None:
    """Free what an earlier attempt has left, and configure the optimizer for these options."""
    step.zero_grad()
    for group in step.optimizer.param_groups:
        if "fused" in group and "fused" in options.reasons:
            group["fused"] = None
    device = step.strategy.device
    configure_optimizer(
        step.optimizer,
        device,
        options.fused,
        options.cuda_graph,
        options.compile is True,
        skips=step.strategy.loss_scale is not None,
    )
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compile_pays_off(step: Step, seconds: float, steps_left: float) -> tuple[bool, str]:
    """Return whether the rest of the run is long enough to repay the time of compiling, and why.

    Collective.

    Rank 0 decides: the stages of a pipeline have different layers.

    Args:
        step: the step in eager mode.
        seconds: duration of a step that is not compiled.
        steps_left: steps until the end of the run; inf if it has none.
    """
    layers = layers_to_compile(step.strategy)
    left = steps_left * seconds
    needed = WORTH_FROM + WORTH_EACH * layers
    pays = step.strategy.runtime.broadcast_from_rank0("compile", lambda: left > needed)
    duration = f"{1000 * seconds:.3g} ms"
    if math.isinf(steps_left):
        steps = f"steps of {duration} are left without an end"
    else:
        number = round(steps_left)
        steps = f"{count(number, 'step')} of {duration} {is_or_are(number)} left, {left:.0f} s"
    return (
        pays,
        f"{steps}: compiling {count(layers, 'different layer')} pays from about {needed:.0f} s on",
    )


def layers_to_compile(strategy: Strategy) -> int:
    """Return how many layers with parameters get code of their own: equal blocks count once."""
    blocks = [strategy.module]
    if strategy.compiled_by_block or repeats(strategy.module):
        blocks = list({kind(block): block for block in strategy.module.children()}.values())
    layers = [layer for block in blocks for layer in block.modules()]
    return sum(any(True for _ in layer.parameters(recurse=False)) for layer in layers)


def measure(step: Step, built: Step | GraphStep, loader: Loader) -> float:
    """Return the duration of a step, in seconds, without the loading of its batch. Collective.

    Args:
        step: the step in eager mode.
        built: the step that would be taken without compiling.
        loader: of the training set.
    """
    device = step.strategy.device
    wait = step.running_sums.totals.tolist
    loader.set_epoch(1)
    batches: list[Any] = [next(iter(built.batches(loader)))] * TIMED
    seconds = 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []), unchanged(step):
        for _ in range(2):  # the first round warms up
            if isinstance(built, GraphStep):
                # they are gathered by the replays
                batches = list(islice(built.batches(loader), TIMED))
            wait()
            start = time.perf_counter()
            for batch in batches:
                built.compute(batch)
            wait()
            seconds = time.perf_counter() - start
    return seconds / len(batches)
