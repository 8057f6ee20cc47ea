"""The facts of a run on which speed=auto depends, and its choices."""

from omegaconf import DictConfig
from torch import nn

from ddp_lab.config.build import build
from ddp_lab.data.dataset import Dataset, LabelledImages
from ddp_lab.models.vit_layers import Patches
from ddp_lab.strategies.base import Strategy
from ddp_lab.training.on_shards import ELEMENTWISE
from ddp_lab.training.speed.auto import AUTO, SWITCHED, Choice, Facts, choose
from ddp_lab.training.speed.options import why_not
from ddp_lab.world.runtime import Runtime


def find_choices(cfg: DictConfig, strategy: Strategy, dataset: Dataset, model: nn.Module) -> dict[str, Choice]:
    """Return the choice of data.loader and of each performance option, by config key. Collective with speed=auto on GPUs.

    Args:
        cfg: the config.
        strategy: before `Strategy.setup`.
        dataset: in host memory.
        model: the complete model.
    """
    wanted = {"data.loader": cfg.data.loader, "optimizer.fused": cfg.optimizer.get("fused")}
    wanted |= {key: cfg[key] for key in SWITCHED if key in cfg}
    device = strategy.device.type
    if cfg.speed != AUTO or device != "cuda":
        return choose(cfg.speed, wanted, Facts(device, {}, None, 0, 0))  # nothing is chosen, so no fact is needed
    weights = sum(parameter.nbytes for parameter in model.parameters())
    facts = Facts(device, find_refusals(cfg, strategy, model), bytes_of(dataset), weights, free_bytes(strategy.runtime))
    return choose(cfg.speed, wanted, facts)


def find_refusals(cfg: DictConfig, strategy: Strategy, model: nn.Module) -> dict[str, str]:
    """Return why an option is not supported by the strategy, the model or the optimizer; no entry if it is supported."""
    reasons = {key: why_not(key, strategy, "device", model) for key in ("cuda_graph", "compile", "channels_last")}
    if (hook := cfg.strategy.get("comm_hook", "none")) != "none":
        reasons["cuda_graph"] = f"strategy.comm_hook={hook} was never captured"
    if not any(isinstance(layer, nn.Conv2d) and not isinstance(layer, Patches) for layer in model.modules()):
        reasons["channels_last"] = reasons["channels_last"] or "the model has no convolutions"
    if "fused" not in strategy.performance_options:
        reasons["optimizer.fused"] = f"not with strategy={strategy.name}, except for AdamW"
    elif not (isinstance(made := build(cfg.optimizer).func, type) and issubclass(made, ELEMENTWISE)):
        reasons["optimizer.fused"] = f"{cfg.optimizer._target_} has no fused kernel for GPUs"
    return {key: reason for key, reason in reasons.items() if reason}


def bytes_of(dataset: Dataset) -> int | None:
    """Return the size of all sets in host memory; None if images are read one by one."""
    sets = [found for found in dataset.sets.values() if isinstance(found, LabelledImages)]
    if len(sets) < len(dataset.sets):
        return None
    return sum(found.images.nbytes + found.targets.nbytes for found in sets)


def free_bytes(runtime: Runtime) -> int:
    """Return the free memory of a rank's GPU, the smallest of all ranks. Collective."""
    everyone = runtime.collect("free memory", str(runtime.free_memory()))
    return int(runtime.agree("free memory", lambda: str(min(map(int, everyone or [])))))
