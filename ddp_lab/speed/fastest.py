"""The fastest step that works: what speed=auto has chosen is tried, measured, and given up if it fails."""

import gc
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch

from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.speed.compile import compile_step, compiling
from ddp_lab.speed.cuda_graph import GraphStep, unchanged, warm_up
from ddp_lab.speed.options import AUTO, PerformanceOptions, configure_optimizer
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

T = TypeVar("T")
TIMED = 5  # steps
# Measured on one H200 with torch 2.11, Fashion-MNIST, 2026-11-23: `train.py cuda_graph=true channels_last=true epochs=1` with
# compile=true, and speed=auto, which did not compile. ResNet-18 at batch 64: an epoch takes 2.60 s captured and 2.13 s compiled
# in float32, 2.02 and 1.39 s in bf16. LeNet gains more. On other H200s compiling took 14 to 18 s for ResNet-18 and 8 to 10 s
# for LeNet at batch 256, with 2 to 3 s in which cuDNN times its kernels for ResNet-18.
GAINS = {"float32": 0.18, "bf16": 0.3}  # share of a step that compiling saves, by precision
COLD, EACH = 9.0, 0.2  # seconds that compiling takes, and more for each layer with parameters


def build_step(options: PerformanceOptions, step: Step, loader: Loader, steps_left: int) -> Step | GraphStep:
    """Return the step to train with, compiled and captured according to the options, and log what was chosen. Collective.

    Args:
        options: what speed=auto has chosen is off if it fails; what the config has set must not fail.
        step: the step in eager mode.
        loader: of the training set.
        steps_left: steps until the end of the run.
    """
    decide = options.compile == AUTO
    options = options._replace(compile=False) if decide else options
    options, built = build_what_works(options, step, loader, benchmark=not decide)
    if decide:
        pays, why = compile_pays_off(step, measure(step, built, loader), steps_left)
        options = options._replace(compile=pays, reasons={**options.reasons, "compile": why})
        if pays:
            del built  # frees the memory of its graphs
            reset(step, options)
            options, built = build_what_works(options, step, loader, benchmark=False)
    options.log_choices()
    return built


def build_what_works(
    options: PerformanceOptions, step: Step, loader: Loader, benchmark: bool
) -> tuple[PerformanceOptions, Step | GraphStep]:
    """Return the step, and the options without those that speed=auto has chosen and that fail. Collective.

    The arguments are those of `build`.
    """
    for name, failed in (("compile", "compiled"), ("cuda_graph", "captured")):
        if getattr(options, name) and name in options.reasons:
            built, problem = attempt(step.strategy.runtime, partial(build, options, step, loader, benchmark))
            if built is not None:
                return options, built
            why = {**options.reasons, name: f"the step cannot be {failed}: {problem}"}
            options = options._replace(**{name: False}, reasons=why)
            reset(step, options)
            if name == "compile":
                torch.compiler.set_stance("force_eager")  # parts of the step are compiled
    return options, build(options, step, loader, benchmark)


def build(options: PerformanceOptions, step: Step, loader: Loader, benchmark: bool) -> Step | GraphStep:
    """Return the step, compiled and captured according to the options. Collective.

    Args:
        options: `compile` is not "auto".
        step: the step in eager mode.
        loader: of the training set.
        benchmark: whether cuDNN times its kernels for each convolution, in the first steps, which takes up to 3 s and saves
            about 2 % of a step of ResNet-18 in bf16. Otherwise it uses its first guess, unless the step is compiled.
    """
    captured = loader if options.cuda_graph and isinstance(loader, DeviceLoader) else None
    with ExitStack() as first_steps:
        if benchmark or options.compile:
            first_steps.enter_context(cudnn_benchmark())
        if options.compile:
            what = compile_step(step, captured, options.channels_last)
            first_steps.enter_context(compiling(what))
        if captured is not None:
            graph = GraphStep(step, captured)
            graph.capture(first_steps)
            return graph
        if options.compile:
            loader.set_epoch(1)
            first = next(iter(loader))
            warm_up(step, lambda: first, 2)
    return step


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


def reset(step: Step, options: PerformanceOptions) -> None:
    """Free what an earlier attempt has left, and configure the optimizer for these options."""
    step.optimizer.zero_grad()
    for group in step.optimizer.param_groups:
        group |= {"fused": None} if "fused" in group and "fused" in options.reasons else {}
    configure_optimizer(step.optimizer, options, step.strategy.device)
    gc.collect()
    if step.strategy.device.type == "cuda":
        torch.cuda.empty_cache()


def compile_pays_off(step: Step, seconds: float, steps_left: int) -> tuple[bool, str]:
    """Return whether the rest of the run is long enough to earn the time that compiling takes, and why. Collective.

    Rank 0 decides: the stages of a pipeline have different layers.

    Args:
        step: the step in eager mode.
        seconds: duration of a step that is not compiled.
        steps_left: steps until the end of the run.
    """
    runtime = step.strategy.runtime
    layers = sum(any(True for _ in layer.parameters(recurse=False)) for layer in step.strategy.module.modules())
    takes, saves = COLD + EACH * layers, GAINS[runtime.precision] * steps_left * seconds
    why = f"{steps_left:,} steps of {1000 * seconds:.3g} ms are left: compiling saves about {saves:.0f} s of them and takes"
    return runtime.agree("compile", lambda: saves > takes), f"{why} about {takes:.0f} s"


def measure(step: Step, built: Step | GraphStep, loader: Loader) -> float:
    """Return the duration of a step, in seconds, without the loading of its batch. Collective.

    Args:
        step: the step in eager mode.
        built: the step that would be taken without compiling.
        loader: of the training set.
    """
    device, wait = step.strategy.device, step.running_sums.totals.tolist
    loader.set_epoch(1)
    batches: list[Any] = [next(iter(built.batches(loader)))] * TIMED
    seconds = 0.0
    with torch.random.fork_rng([device] if device.type == "cuda" else []), unchanged(step):
        for _ in range(2):  # the first round warms up
            if isinstance(built, GraphStep):
                batches = list(islice(built.batches(loader), TIMED))  # they are gathered by the replays
            wait()
            start = time.perf_counter()
            for batch in batches:
                built.compute(batch)
            wait()
            seconds = time.perf_counter() - start
    return seconds / len(batches)


@contextmanager
def cudnn_benchmark() -> Generator[None]:
    """Let cuDNN time all its kernels for every new convolution and use the fastest."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    cudnn.benchmark, cudnn.benchmark_limit = True, 0
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
