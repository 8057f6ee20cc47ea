"""How a strategy of scripts/bench.py lies on its devices, and why it may not fit them."""

import argparse
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

if TYPE_CHECKING:
    from omegaconf import DictConfig


class Layout(NamedTuple):
    """The sizes of the axes of a strategy, whose product is the number of devices.

    Attributes:
        pp: devices that share the model's blocks, in stages.
        replicate: copies of the (sharded) parameters.
        shard: devices that share one copy of the parameters.
        tp: devices that share each layer.
        schedule: of the pipeline; "" without one.
        num_microbatches: that a batch of the pipeline is divided into.
        sequence_parallel: whether the devices along tp share the tokens, too.
    """

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    schedule: str = ""
    num_microbatches: int = 1
    sequence_parallel: bool = False

    @property
    def copies_of_batch(self) -> int:
        """Number of devices that compute the same samples."""
        return self.pp * self.tp

    @property
    def stages_of_device(self) -> int:
        """Number of stages on each device of a pipeline."""
        return 2 if "interleaved" in self.schedule else 1

    @property
    def bubble(self) -> float:
        """The fraction of a step in which equally busy devices idle: (p-1) / (v m + p - 1).

        v is the number of stages on each device (Narayanan et al. 2021, arXiv:2104.04473, section
        2.2). Without a pipeline it is 0.
        """
        idle = self.pp - 1
        return idle / (self.stages_of_device * self.num_microbatches + idle)


def strategy_overrides(strategy: str) -> list[str]:
    """Return the overrides of a strategy as in `--strategies`, such as "ddp" or "mesh tp=2"."""
    first, *options = strategy.split()
    name, _, algorithm = first.partition("-")
    chosen = [f"strategy={name}", *(f"strategy.{option}" for option in options)]
    if algorithm:
        chosen.append(f"strategy.algorithm={algorithm}")
    return chosen


def config_of(strategy: str) -> "DictConfig":
    """Return the config of train.py with a strategy as in `--strategies`.

    Raises:
        ConfigError: there is no such strategy or option.
    """
    from ddp_lab.launchers.command_line import compose_config

    return compose_config(strategy_overrides(strategy), None)


def lay_out(cfg: "DictConfig", ranks: int, batch: int) -> Layout:
    """Return the layout of a strategy on so many devices, by the strategy's own axes.

    Args:
        cfg: from `config_of`; its batch size is set.
        ranks: number of devices.
        batch: samples on each device.

    Raises:
        ConfigError: the strategy, one of its axes or its micro-batches do not fit.
    """
    from ddp_lab.config.build import construct
    from ddp_lab.config.worlds import check_world
    from ddp_lab.world.planned import PlannedRuntime

    cfg.batch_size = batch * ranks
    check_world(cfg, ranks, 1)
    strategy = construct("strategy", cfg.strategy, PlannedRuntime(ranks, ranks, "bf16"))
    axes = strategy.axes
    pp = axes.get("pp", 1)
    tp = axes.get("tp", 1)
    dp = ranks // (pp * tp)
    shard = axes.get("shard", dp if strategy.name == "fsdp" else 1)
    keys = cfg.strategy
    return Layout(
        pp,
        dp // shard,
        shard,
        tp,
        keys.schedule if pp > 1 else "",
        keys.num_microbatches if pp > 1 else 1,
        bool(keys.get("sequence_parallel", False)),
    )


def misfit(layout: Layout, strategy: str, model: nn.Module) -> str | None:
    """Return why the blocks of a model do not fit a layout; None if they do, as far as is known.

    What it does not know, such as a number of heads that tp does not divide, ends the run.

    Args:
        layout: of the strategy.
        strategy: as in `--strategies`.
        model: on any device.
    """
    blocks = len(list(model.children()))
    stages = layout.pp * layout.stages_of_device
    if layout.pp > 1 and blocks < stages:
        return f"the model has {blocks} blocks, and this schedule needs {stages} stages"
    has_plan = any(hasattr(block, "tensor_parallel") for block in model.children())
    if layout.tp > 1 and strategy.split()[0] == "mesh" and not has_plan:
        return "the model's blocks have no plan for tensor parallelism"
    return None


def add_devices(parser: argparse.ArgumentParser, gpus: int) -> None:
    """Add the options that choose numbers of devices, on a machine with so many GPUs."""
    number = {"type": int, "metavar": "N"}
    parser.add_argument(
        "--gpus", nargs="+", default=[min(gpus, 1)], help="0: the CPU, with --ranks", **number
    )
    parser.add_argument(
        "--ranks", nargs="+", default=[1, 2], help="with --gpus 0; by default 1 and 2", **number
    )
