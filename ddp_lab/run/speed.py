"""The performance of a run: the facts on which speed=auto depends, and the step that it chooses."""

from typing import cast

from torch import nn

from ddp_lab.data.dataset import Dataset, InMemory
from ddp_lab.models.chain import Chain
from ddp_lab.observe.log import log_if_slow
from ddp_lab.run.job import Job
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.optimizer import ELEMENTWISE
from ddp_lab.training.performance import AUTO, KEYS, PerformanceOptions, Wanted, choose
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import TrainStep
from ddp_lab.training.trainer import Trainer


def find_options(
    wanted: Wanted, strategy: Strategy, dataset: Dataset, model: nn.Module
) -> PerformanceOptions:
    """Return the performance options of a run. Collective with speed=auto on GPUs.

    Args:
        wanted: what the config says.
        strategy: after `Strategy.partition`.
        dataset: in host memory.
        model: the complete model.
    """
    reasons = unsupported_options(strategy, model)
    is_captured = getattr(wanted.optimizer, "supports_cuda_graph", False)
    if wanted.optimizer not in ELEMENTWISE and not is_captured:
        reasons.setdefault(
            "cuda_graph",
            "it supports the optimizers SGD, Adam and AdamW of torch, and Muon of ddp_lab, not "
            f"{wanted.optimizer_name}",
        )
    if wanted.speed != AUTO or strategy.device.type != "cuda":
        options = dict(wanted.options)
        if options["loader"] == AUTO and bytes_of(dataset) is None:
            options["loader"] = "workers"
        return choose(False, options, reasons)
    if not any(map(has_windows, model.modules())):
        reasons.setdefault("channels_last", "the model has no convolutions")
    if not (isinstance(wanted.optimizer, type) and issubclass(wanted.optimizer, ELEMENTWISE)):
        reasons.setdefault("fused", f"{wanted.optimizer_name} has no fused kernel for GPUs")

    weights = sum(parameter.nbytes for parameter in model.parameters())
    free = strategy.runtime.gather_and_decide("free memory", strategy.runtime.free_memory(), min)
    return choose(True, wanted.options, reasons, bytes_of(dataset), weights, free)


def has_windows(layer: nn.Module) -> bool:
    """Return whether a layer is a convolution whose windows overlap.

    One that cuts the image into patches, the first layer of a Vision Transformer, is a linear layer
    of patches, and gains nothing from another memory format.
    """
    if not isinstance(layer, nn.Conv2d):
        return False
    cuts_patches = layer.kernel_size == layer.stride and max(layer.kernel_size) > 1
    return not cuts_patches


def unsupported_options(strategy: Strategy, model: nn.Module) -> dict[str, str]:
    """Return why options are not supported by strategy, model or device, by name of the option.

    Args:
        strategy: after `Strategy.partition`.
        model: the complete model.
    """
    device = strategy.device.type
    reasons = dict(strategy.unsupported)
    if (strategy.compiled_by_block or strategy.bucket_sizes) and not isinstance(model, Chain):
        reasons["compile"] = (
            f"strategy={strategy.name} compiles a model in blocks, and this one is not a Chain"
        )

    if strategy.batch_norm == "sync":
        reasons["cuda_graph"] = (
            "not supported by strategy.batch_norm=sync: capturing collectives inside forward and "
            "backward was never tested"
        )
    if device == "mps":
        reasons["compile"] = "not supported on mps, where torch.compile is a prototype"
        reasons["channels_last"] = (
            "torch computes wrong gradients in that format on mps "
            "(github.com/pytorch/pytorch/issues/107214)"
        )

    if device != "cuda":
        if device == "mps":
            reasons["cuda_graph"] = "it needs an NVIDIA GPU"
        else:
            reasons["cuda_graph"] = "no GPU is available"
    by_strategy = f"not supported by strategy={strategy.name}"
    for name in KEYS:
        if name != "loader" and name not in strategy.supported_options:
            reasons[name] = strategy.unsupported.get(name, by_strategy)
    return reasons


def bytes_of(dataset: Dataset) -> int | None:
    """Return the size of all sets in host memory; None if samples are read one by one."""
    sets = [samples for samples in dataset.sets.values() if isinstance(samples, InMemory)]
    if len(sets) < len(dataset.sets):
        return None
    from ddp_lab.data.trees import number_of_bytes

    return sum(number_of_bytes((samples.inputs, samples.targets)) for samples in sets)


def make_fast_step(job: Job, trainer: Trainer, progress: Progress) -> TrainStep:
    """Return the step to train with, compiled and captured by the job's options. Collective.

    Args:
        job: of the run.
        trainer: of its model.
        progress: the position of the run, from which the steps that are left follow.
    """
    from ddp_lab.speed.fastest import build_step

    before = job.sizes.steps_before(progress)
    settings = job.fit_settings.continued(progress, before)
    steps_left = settings.steps_left(progress, before, job.sizes.steps_per_epoch)
    with log_if_slow("preparing the training step: capturing or warming it up"):
        built = build_step(
            job.options,
            trainer.eager_step,
            job.loaders["train"],
            steps_left,
            settings.seconds_left(progress),
        )
    # A GraphStep takes the batches of a DeviceLoader only; `options` disables cuda_graph for any
    # other loader.
    return cast("TrainStep", built)
