"""What the number of ranks must fit: the strategy and its axes, the batch, the micro-batches.

Each check is called where the parts of a run are made, on the ranks. `check_world` calls those that
need no rank before the ranks are started, without importing torch, which takes seconds.
"""

import math
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from ddp_lab.config.errors import ConfigError, count, divisors, multiples

PACKAGE = "ddp_lab.strategies."
ONE_PROCESS = {
    f"{PACKAGE}{name}": name.partition(".")[0] for name in ("single.Single", "split.Split", "dp.DP")
}
# of the config group strategy: the keys with the sizes of the axes within a replica, by class
AXES = {
    f"{PACKAGE}scratch.Scratch": (),
    f"{PACKAGE}ddp.DDP": (),
    f"{PACKAGE}fsdp.FSDP": (),
    f"{PACKAGE}tp.TP": ("tp",),
    f"{PACKAGE}ddp_pipeline.DDPPipeline": ("pp",),
    f"{PACKAGE}mesh.Mesh": ("pp", "tp"),
}


def check_world(cfg: DictConfig, nproc: int, nnodes: int) -> None:
    """Check that a launch of so many ranks fits the config, as far as no rank is needed for it.

    Values that are not allowed by themselves are left to `check`.

    Args:
        cfg: The composed config.
        nproc: Number of ranks on each machine.
        nnodes: Number of machines.

    Raises:
        ConfigError: The strategy, one of its axes or the batch does not fit the number of ranks.
    """
    ranks = nproc * nnodes
    node = cfg.strategy
    target = node.get("_target_")
    if target in ONE_PROCESS:
        require_one_process(ONE_PROCESS[target], ranks)
        return
    if target == f"{PACKAGE}pipeline.Pipeline":
        _check_batch(cfg, 1, ranks)
        return
    if target not in AXES:
        return

    axes = {axis: node.get(axis) for axis in AXES[target]}
    if target.endswith(".TP"):
        axes = {"tp": axes["tp"] or ranks}
    if not all(_is_count(size) for size in axes.values()):
        return
    require_division(ranks, axes)
    replicas = ranks // math.prod(axes.values())
    shard = node.get("shard")
    if _is_count(shard):
        require_shards(shard, replicas)
    _check_batch(cfg, replicas, axes.get("pp", 1))


def _check_batch(cfg: DictConfig, replicas: int, stages: int) -> None:
    """Check the batch of replicas, which pipelines of so many ranks divide into micro-batches."""
    size = cfg.get("batch_size")
    if not _is_count(size) or cfg.get("scaling") not in ("strong", "weak"):
        return
    if cfg.scaling == "weak":
        size *= replicas
    require_replicas(size, replicas)
    keys = cfg.strategy
    number = keys.get("num_microbatches")
    accumulate = cfg.get("accumulate")
    is_pipeline = "schedule" in keys and ("pp" not in keys or keys.pp > 1)
    if is_pipeline and _is_count(number) and _is_count(accumulate):
        samples = math.ceil(size / replicas / accumulate)
        require_microbatches(str(keys.schedule), number, stages, samples)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def require_one_process(name: str, ranks: int) -> None:
    """Check that a strategy that drives all devices from one process has one.

    Raises:
        ConfigError: There are several ranks.
    """
    if ranks > 1:
        raise ConfigError(
            f"strategy={name}: runs in one process, and not on {ranks} ranks. Start `ddp-lab train "
            f"strategy={name}`, or use a strategy for several processes, for example ddp"
        )


def require_division(ranks: int, mesh_axes: Mapping[str, int]) -> None:
    """Check that the axes within a replica divide the ranks.

    Args:
        ranks: Number of ranks.
        mesh_axes: Sizes of the axes by name.

    Raises:
        ConfigError: The number of ranks is not divisible by the product of the sizes.
    """
    size = math.prod(mesh_axes.values())
    if ranks % size:
        options = " ".join(
            f"strategy.{axis}={length}" for axis, length in mesh_axes.items() if length > 1
        )
        product = "sizes whose product is " if len(mesh_axes) > 1 else ""
        raise ConfigError(
            f"{options}: cannot lay {count(ranks, 'rank')} on a mesh of dp x "
            f"{' x '.join(mesh_axes)}, because {ranks} is not divisible by {size}; use "
            f"{product}{divisors(ranks)}, or start a multiple of {size} ranks"
        )


def require_shards(shard: int, dp: int) -> None:
    """Check that the ranks that share a copy of the parameters divide those along dp.

    Raises:
        ConfigError: They do not.
    """
    if dp % shard:
        raise ConfigError(
            f"strategy.shard={shard}: must divide the {count(dp, 'rank')} along dp; use "
            f"{divisors(dp)}, or null for all of them"
        )


def require_replicas(batch_size: int, replicas: int) -> None:
    """Check that the replicas divide the global batch.

    Raises:
        ConfigError: They do not.
    """
    if batch_size % replicas:
        raise ConfigError(
            f"batch_size={batch_size}: is the global batch and must be divisible by the "
            f"{replicas} replicas that share it; use {multiples(batch_size, replicas)}, or "
            f"scaling=weak to give every replica {batch_size}"
        )


def has_one_stage(schedule: str) -> bool:
    """Return whether a pipeline's schedule supports exactly one stage per rank."""
    return schedule in ("gpipe", "1f1b")


def require_microbatches(schedule: str, number: int, ranks: int, samples: int) -> None:
    """Check that a schedule supports this number of micro-batches and ranks.

    Raises:
        ConfigError: It does not.
    """
    rounds = max(1, number // ranks)
    if ranks == 1 and not has_one_stage(schedule):
        raise ConfigError(
            f"strategy.schedule={schedule}: needs at least 2 ranks in a pipeline, because torch "
            "cannot evaluate with consecutive stages on one rank; use gpipe or 1f1b for a "
            "pipeline of 1 rank"
        )

    if schedule == "1f1b" and number < ranks:
        raise ConfigError(
            f"strategy.num_microbatches={number}: strategy.schedule=1f1b needs at least one for "
            f"each of the {ranks} ranks in a pipeline; use {ranks} or more, or "
            "strategy.schedule=gpipe"
        )

    if "interleaved" in schedule and number % rounds:
        raise ConfigError(
            f"strategy.num_microbatches={number}: strategy.schedule={schedule} on {ranks} ranks "
            f"needs a multiple of {rounds}, to make {rounds} equal rounds; use {rounds * ranks} or "
            f"{(rounds + 1) * ranks}"
        )

    if number > samples:
        raise ConfigError(
            f"strategy.num_microbatches={number}: must not exceed the {count(samples, 'sample')} "
            "that a "
            f"pipeline gets at once (local batch size / accumulate); use at most {samples}"
        )
