"""The fastest step that works: what speed=auto has chosen is tried, measured, and given up if it fails."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from ddp_lab.data.loader import Loader
from ddp_lab.observe.logger import log
from ddp_lab.training.speed.auto import AUTO, Choice, compile_seconds, earns_compiling, notice
from ddp_lab.training.speed.cache import leave_mark, mark_of, read_mark
from ddp_lab.training.speed.cuda_graph import GraphStep
from ddp_lab.training.speed.notice import working
from ddp_lab.training.speed.options import PerformanceOptions, compiles_optimizer
from ddp_lab.training.speed.switches import cudnn_benchmark, fresh_compiler
from ddp_lab.training.speed.warm_up import unchanged, warm_up
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

T = TypeVar("T")
TIMED = 10  # steps
# In shorter runs cuDNN times LIMITED kernels for each convolution. To time all of them takes 2 to 3 s more for
# ResNet-18, and saves about 2 % of a step in bf16 and nothing in float32 (an H200, torch 2.11, 2026-11-23).
LONG, LIMITED = 600.0, 10  # seconds, kernels


def build_step(
    options: PerformanceOptions, choices: Mapping[str, Choice], step: Step, loader: Loader, steps_left: int
) -> Step | GraphStep:
    """Return the step to train with, compiled and captured according to the options, and log the choices. Collective.

    Args:
        options: the supported ones; `compile` may be "auto".
        choices: by config key. What speed=auto has chosen is off if it fails; what the config has set must not fail.
        step: the step in eager mode.
        loader: of the training set.
        steps_left: steps until the end of the run.
    """
    runtime, choices = step.strategy.runtime, dict(choices)
    if options.compile != AUTO:
        _, built = build_plain(options, choices, step, loader)
        announce(choices, runtime.precision)
        return built
    plain, built, mark = options._replace(compile=False), None, mark_of(step, loader)
    seconds = runtime.agree("step before", lambda: read_mark(mark))
    cached = seconds is not None
    if seconds is None:
        plain, built = build_plain(plain, choices, step, loader)
        measured = measure(step, built, loader)
        seconds = runtime.agree("step", lambda: measured)
    choices["compile"] = decide(step, seconds, steps_left, cached)
    if built is None and not choices["compile"].value:
        plain, built = build_plain(plain, choices, step, loader)
    announce(choices, runtime.precision)
    if built is not None and not choices["compile"].value:
        return built
    del built  # the memory of its graphs
    reset(step)
    compiled = try_to_compile(plain, choices, step, loader, seconds * steps_left >= LONG)
    if compiled is None:
        return build_plain(plain, choices, step, loader)[1]
    leave_mark(mark, seconds)
    return compiled


def announce(choices: Mapping[str, Choice], precision: str) -> None:
    """Log the choices, if speed=auto has made any."""
    if any(choice.automatic for choice in choices.values()):
        for line in notice(choices, precision):
            log.info(line)


def build_plain(
    options: PerformanceOptions, choices: dict[str, Choice], step: Step, loader: Loader
) -> tuple[PerformanceOptions, Step | GraphStep]:
    """Return the options that work, and the step. A choice of speed=auto that fails is changed in `choices`. Collective."""
    if options.cuda_graph and choices["cuda_graph"].automatic:
        built, problem = attempt(step.strategy.runtime, lambda: options.build(step, loader, checked=True))
        if built is not None:
            return options, built
        reset(step)
        options = options._replace(cuda_graph=False)
        choices["cuda_graph"] = Choice(False, f"the step cannot be captured: {problem}")
    return options, options.build(step, loader)


def try_to_compile(
    options: PerformanceOptions, choices: Mapping[str, Choice], step: Step, loader: Loader, thorough: bool
) -> Step | GraphStep | None:
    """Return the step with these options and compiled or, if it cannot be compiled, None. Collective.

    Args:
        options: without `compile`.
        choices: by config key.
        step: the step in eager mode.
        loader: of the training set.
        thorough: whether cuDNN times all its kernels.
    """
    fused = choices["optimizer.fused"]
    if options.cuda_graph and fused.automatic and compiles_optimizer(step.optimizer):
        set_fused(step, None)
    compiled, checked = options._replace(compile=True), choices["cuda_graph"].automatic
    torch.compiler.set_stance("eager_on_recompile")  # until `PerformanceOptions.switches` ends
    with fresh_compiler(), cudnn_benchmark(0 if thorough else LIMITED):
        built, problem = attempt(step.strategy.runtime, lambda: compiled.build(step, loader, checked))
    if built is not None:
        return built
    log.info(f"compile: off, because the step cannot be compiled: {problem}")
    reset(step)
    if fused.automatic:
        set_fused(step, fused.value)
    torch.compiler.set_stance("force_eager")  # parts of the step are compiled
    return None


def attempt(runtime: Runtime, build: Callable[[], T]) -> tuple[T | None, str]:
    """Return what `build` returns; or None and the first line of an error, if it failed on any rank. Collective."""
    built, problem = None, ""
    try:
        built = build()
    except Exception as error:  # of torch, of a compiler, or of the user's model, which has to run in eager mode then
        problem = (str(error).strip() or type(error).__name__).splitlines()[0]
    problems = runtime.collect("attempt", problem)
    problem = runtime.agree("attempt", lambda: next(filter(None, problems or []), ""))
    return (None, problem) if problem else (built, "")


def reset(step: Step) -> None:
    """Free what a failed attempt has left, and let the step run in eager mode."""
    step.optimizer.zero_grad()
    step.tally.in_graph = False
    gc.collect()
    if step.strategy.device.type == "cuda":
        torch.cuda.empty_cache()


def set_fused(step: Step, fused: bool | None) -> None:
    """Select the fused kernel of the optimizer; None leaves the choice to torch."""
    for group in step.optimizer.param_groups:
        if "fused" in group:
            group["fused"] = fused


def decide(step: Step, seconds: float, steps_left: int, cached: bool) -> Choice:
    """Return whether to compile the step, as rank 0 decides: the stages of a pipeline have different layers. Collective.

    Args:
        step: the step in eager mode.
        seconds: duration of a step that is not compiled.
        steps_left: steps until the end of the run.
        cached: whether its kernels are in the cache.
    """
    runtime = step.strategy.runtime
    layers = sum(any(True for _ in layer.parameters(recurse=False)) for layer in step.strategy.module.modules())
    found = earns_compiling(steps_left, seconds, compile_seconds(layers, cached), runtime.precision)
    return found._replace(value=runtime.agree("compile", lambda: "yes" if found.value else "no") == "yes")


def measure(step: Step, built: Step | GraphStep, loader: Loader) -> float:
    """Return the duration of a step, in seconds. Collective.

    Args:
        step: the step in eager mode.
        built: the step that would be taken without compiling.
        loader: of the training set.
    """
    device = step.strategy.device
    with working("timing the training step"), torch.random.fork_rng([device] if device.type == "cuda" else []):
        return built.seconds(TIMED) if isinstance(built, GraphStep) else time_eager(step, loader)


def time_eager(step: Step, loader: Loader) -> float:
    """Return the duration of a step in eager mode, without the loading of its batch. Collective."""
    loader.set_epoch(1)
    batch = next(iter(loader))
    warm_up(step, [lambda: batch], 2)
    with unchanged(step):
        wait(step.strategy.device)
        start = time.perf_counter()
        for _ in range(TIMED):
            step.compute(batch)
        wait(step.strategy.device)
        return (time.perf_counter() - start) / TIMED


def wait(device: torch.device) -> None:
    """Wait for all work that is queued on a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
