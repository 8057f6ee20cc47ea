"""The fastest step that works: what speed=auto has chosen is tried, measured, and given up if it fails."""

import gc
import hashlib
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddp_lab.data.loader import DeviceLoader, Loader
from ddp_lab.speed.compile import compile_step, compiling
from ddp_lab.speed.cuda_graph import GraphStep, unchanged, warm_up
from ddp_lab.speed.options import AUTO, PerformanceOptions, compiles_optimizer, set_fused
from ddp_lab.training.step import Step
from ddp_lab.world.runtime import Runtime

T = TypeVar("T")
TIMED = 5  # steps
# cuDNN times all its kernels for each convolution, or LIMITED ones in shorter runs. To time all of them takes 2 to 3 s more for
# ResNet-18, and saves about 2 % of a step in bf16 and nothing in float32 (an H200, torch 2.11, 2026-11-23).
ALL, LIMITED, LONG = 0, 10, 600.0  # kernels, kernels, seconds
# Measured on one H200 with torch 2.11, Fashion-MNIST, 2026-11-23: `train.py cuda_graph=true channels_last=true epochs=1` with
# compile=true, and speed=auto, which did not compile. ResNet-18 at batch 64: an epoch takes 2.60 s captured and 2.13 s compiled
# in float32, 2.02 and 1.39 s in bf16. LeNet gains more. On other H200s compiling took 14 to 18 s for ResNet-18 and 8 to 10 s
# for LeNet at batch 256, from the cache 3 to 5 s and 2.5 s, and 5 s more where cuDNN first read its kernels from the disk.
GAINS = {"float32": 0.18, "bf16": 0.3}  # share of a step that compiling saves, by precision
COLD, EACH = 9.0, 0.2  # seconds that compiling takes, and more for each layer with parameters
WARM = 0.3  # share of that time if the kernels are in the cache
CODE = 3  # raised when other code is compiled for the same work, whose kernels are not in the cache then


def build_step(options: PerformanceOptions, step: Step, loader: Loader, steps_left: int) -> Step | GraphStep:
    """Return the step to train with, compiled and captured according to the options, and log what was chosen. Collective.

    Args:
        options: what speed=auto has chosen is off if it fails; what the config has set must not fail.
        step: the step in eager mode.
        loader: of the training set.
        steps_left: steps until the end of the run.
    """
    runtime = step.strategy.runtime
    if options.compile != AUTO:
        options, built = build_captured(options, step, loader, ALL)
        options.log_choices(runtime.precision)
        return built
    options, built, mark = options._replace(compile=False), None, mark_of(step, loader)
    seconds = runtime.agree("step before", lambda: read_mark(mark))
    cached = seconds is not None
    if seconds is None:
        options, built = build_captured(options, step, loader, None)
        measured = measure(step, built, loader)
        seconds = runtime.agree("step", lambda: measured)
    pays, why = compile_pays_off(step, seconds, steps_left, cached)
    if pays:
        built = None  # frees the memory of its graphs
        reset(step)
        built, problem = try_to_compile(options, step, loader, ALL if seconds * steps_left >= LONG else LIMITED)
        if built is None:
            pays, why = False, f"the step cannot be compiled: {problem}"
        else:
            with suppress(OSError):  # the directory may be read-only
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.write_text(repr(seconds))
    if built is None:
        options, built = build_captured(options, step, loader, None)
    options._replace(compile=pays, reasons={**options.reasons, "compile": why}).log_choices(runtime.precision)
    return built


def build_captured(
    options: PerformanceOptions, step: Step, loader: Loader, kernels: int | None
) -> tuple[PerformanceOptions, Step | GraphStep]:
    """Return the options that work, without `cuda_graph` if speed=auto has chosen it and it fails, and the step. Collective."""
    if options.cuda_graph and "cuda_graph" in options.reasons:
        built, problem = attempt(step.strategy.runtime, lambda: build(options, step, loader, kernels))
        if built is not None:
            return options, built
        reset(step)
        why = {**options.reasons, "cuda_graph": f"the step cannot be captured: {problem}"}
        options = options._replace(cuda_graph=False, reasons=why)
    return options, build(options, step, loader, kernels)


def build(options: PerformanceOptions, step: Step, loader: Loader, kernels: int | None) -> Step | GraphStep:
    """Return the step, compiled and captured according to the options. Collective.

    Args:
        options: `compile` is not "auto".
        step: the step in eager mode.
        loader: of the training set.
        kernels: how many kernels cuDNN times for each convolution; 0: all; None: it uses its first guess.
    """
    captured = loader if options.cuda_graph and isinstance(loader, DeviceLoader) else None
    with ExitStack() as first_steps:
        first_steps.enter_context(cudnn_benchmark(kernels))
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


def try_to_compile(
    options: PerformanceOptions, step: Step, loader: Loader, kernels: int
) -> tuple[Step | GraphStep | None, str]:
    """Return the step compiled or, if it cannot be compiled, None and the reason. The arguments are those of `build`."""
    automatic, compiled = "fused" in options.reasons, options._replace(compile=True)
    if options.cuda_graph and automatic and compiles_optimizer(step.optimizer):
        set_fused(step.optimizer, None)
    built, problem = attempt(step.strategy.runtime, lambda: build(compiled, step, loader, kernels))
    if built is None:
        reset(step)
        if automatic:
            set_fused(step.optimizer, options.fused)
        torch.compiler.set_stance("force_eager")  # parts of the step are compiled
    return built, problem


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
    gc.collect()
    if step.strategy.device.type == "cuda":
        torch.cuda.empty_cache()


def compile_pays_off(step: Step, seconds: float, steps_left: int, cached: bool) -> tuple[bool, str]:
    """Return whether the rest of the run is long enough to earn the time that compiling takes, and why. Collective.

    Rank 0 decides: the stages of a pipeline have different layers.

    Args:
        step: the step in eager mode.
        seconds: duration of a step that is not compiled.
        steps_left: steps until the end of the run.
        cached: whether its kernels are in the cache.
    """
    runtime = step.strategy.runtime
    layers = sum(any(True for _ in layer.parameters(recurse=False)) for layer in step.strategy.module.modules())
    takes = (COLD + EACH * layers) * (WARM if cached else 1.0)
    saves = GAINS[runtime.precision] * steps_left * seconds
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


def mark_of(step: Step, loader: Loader) -> Path:
    """Return the file in torch's cache that exists if the compiled kernels of this step are there.

    It has the duration of a step that is not compiled, in seconds.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes long to import before an optimizer exists

    device, strategy = step.strategy.device, step.strategy
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    work = [CODE, torch.__version__, name, strategy.name, strategy.axes, strategy.runtime.precision, step.options.accumulate]
    work += [torch.get_float32_matmul_precision(), type(loader).__name__, loader.local_batch_size]
    work += [type(step.optimizer).__name__, step.ema is None, step.options.mix is None, strategy.module]
    return Path(cache_dir()) / "ddp_lab" / hashlib.sha256(repr(work).encode()).hexdigest()[:16]


def read_mark(mark: Path) -> float | None:
    """Return the duration in a mark; None if there is no mark, or none that can be read."""
    try:
        return float(mark.read_text())
    except (OSError, ValueError):
        return None


@contextmanager
def cudnn_benchmark(kernels: int | None) -> Generator[None]:
    """Let cuDNN time kernels for every new convolution and use the fastest.

    Args:
        kernels: number of kernels that are timed for each convolution; 0: all; None: none, so that it uses its first guess.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.benchmark_limit
    if kernels is not None:
        cudnn.benchmark, cudnn.benchmark_limit = True, kernels
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.benchmark_limit = before
