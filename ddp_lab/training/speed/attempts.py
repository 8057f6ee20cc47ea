"""The fastest step that works: what speed=auto has chosen is tried, measured, and given up if it fails."""

import gc
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from ddp_lab.data.sharding import Loader
from ddp_lab.observe.logger import log
from ddp_lab.training.on_shards import has_shards
from ddp_lab.training.speed.auto import AUTO, Choice, compile_seconds, earns_compiling, notice
from ddp_lab.training.speed.cache import leave_mark, mark_of
from ddp_lab.training.speed.cuda_graph import GraphStep
from ddp_lab.training.speed.notice import working
from ddp_lab.training.speed.options import PerformanceOptions
from ddp_lab.training.speed.switches import cudnn_benchmark, fresh_compiler
from ddp_lab.training.speed.warm_up import unchanged, warm_up
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

T = TypeVar("T")
TIMED = 10  # steps


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
    plain = options._replace(compile=False) if options.compile == AUTO else options
    built = None
    if plain.cuda_graph and choices["cuda_graph"].automatic:
        built, problem = attempt(runtime, lambda: plain.build(step, loader, checked=True))
        if built is None:
            reset(step)
            plain = plain._replace(cuda_graph=False)
            choices["cuda_graph"] = Choice(False, f"the step cannot be captured: {problem}")
    built = built or plain.build(step, loader)
    if options.compile == AUTO:
        choices["compile"] = decide(step, built, loader, steps_left)
    if any(choice.automatic for choice in choices.values()):
        for line in notice(choices, runtime.precision):
            log.info(line)
    if options.compile != AUTO or not choices["compile"].value:
        return built
    del built  # the memory of its graphs
    return compile_or_not(plain, choices, step, loader)


def compile_or_not(plain: PerformanceOptions, choices: Mapping[str, Choice], step: Step, loader: Loader) -> Step | GraphStep:
    """Return the step with `plain` options and compiled or, if it cannot be compiled, without that. Collective."""
    reset(step)
    mark, fused = mark_of(step, loader), choices["optimizer.fused"]
    if plain.cuda_graph and fused.automatic and not has_shards(step.optimizer):
        set_fused(step, None)  # the optimizer is compiled, too
    compiled, checked = plain._replace(compile=True), choices["cuda_graph"].automatic
    torch.compiler.set_stance("eager_on_recompile")  # until `PerformanceOptions.switches` ends
    with fresh_compiler(), cudnn_benchmark():
        built, problem = attempt(step.strategy.runtime, lambda: compiled.build(step, loader, checked))
    if built is not None:
        leave_mark(mark)
        return built
    log.info(f"compile: off, because the step cannot be compiled: {problem}")
    reset(step)
    if fused.automatic:
        set_fused(step, fused.value)
    torch.compiler.set_stance("force_eager")  # parts of the step are compiled
    return plain.build(step, loader)


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


def decide(step: Step, built: Step | GraphStep, loader: Loader, steps_left: int) -> Choice:
    """Return whether to compile the step, by rank 0's measurement of a step that is not compiled. Collective.

    Args:
        step: the step in eager mode.
        built: the step that would be taken without compiling.
        loader: of the training set.
        steps_left: steps until the end of the run.
    """
    device, module = step.strategy.device, step.strategy.module
    with working("timing the training step"), torch.random.fork_rng([device] if device.type == "cuda" else []):
        seconds = built.seconds(TIMED) if isinstance(built, GraphStep) else time_eager(step, loader)
    layers = sum(any(True for _ in layer.parameters(recurse=False)) for layer in module.modules())
    cached = mark_of(step, loader).exists()
    found = earns_compiling(steps_left, seconds, compile_seconds(layers, cached), step.strategy.runtime.precision)
    value = step.strategy.runtime.agree("compile", lambda: "yes" if found.value else "no")
    return found._replace(value=value == "yes")


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
