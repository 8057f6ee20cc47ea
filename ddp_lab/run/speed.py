"""The performance options of a run: the facts on which speed=auto depends."""

from typing import Any

from omegaconf import DictConfig, OmegaConf
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.data.dataset import Dataset, InMemory
from ddp_lab.models.vit import Patches
from ddp_lab.speed.options import AUTO, KEYS, Facts, PerformanceOptions, choose, refusals_of
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.optimizer import ELEMENTWISE


def find_options(cfg: DictConfig, strategy: Strategy, dataset: Dataset, model: nn.Module) -> PerformanceOptions:
    """Return the performance options of a run. Collective with speed=auto on GPUs.

    Args:
        cfg: the config.
        strategy: after `Strategy.partition`.
        dataset: in host memory.
        model: the complete model.
    """
    wanted: dict[str, Any] = {name: OmegaConf.select(cfg, key) for name, key in KEYS.items()}
    facts = Facts(strategy.device.type, refusals_of(strategy, model))
    if cfg.speed != AUTO or facts.device != "cuda":
        if wanted["loader"] == AUTO and bytes_of(dataset) is None:
            wanted["loader"] = "workers"
        return choose(cfg.speed, wanted, facts)  # nothing is chosen, so no more facts are needed
    reasons = dict(facts.refusals)
    if not any(isinstance(layer, nn.Conv2d) and not isinstance(layer, Patches) for layer in model.modules()):
        reasons.setdefault("channels_last", "the model has no convolutions")
    if not (isinstance(made := build(cfg.optimizer).func, type) and issubclass(made, ELEMENTWISE)):
        reasons.setdefault("fused", f"{cfg.optimizer._target_} has no fused kernel for GPUs")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    free = strategy.runtime.conclude("free memory", strategy.runtime.free_memory(), min)
    return choose(cfg.speed, wanted, Facts(facts.device, reasons, bytes_of(dataset), weights, free))


def bytes_of(dataset: Dataset) -> int | None:
    """Return the size of all sets in host memory; None if images are read one by one."""
    sets = [found for found in dataset.sets.values() if isinstance(found, InMemory)]
    if len(sets) < len(dataset.sets):
        return None
    return sum(found.inputs.nbytes + found.targets.nbytes for found in sets)
