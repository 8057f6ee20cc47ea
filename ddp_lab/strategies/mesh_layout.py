"""The layout of ranks on a mesh: the sizes of its axes, and which ranks hold which stage."""

from collections.abc import Mapping

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.partition import Partition


def require_division(ranks: int, inner: Mapping[str, int]) -> None:
    """Check that the axes within a replica divide the ranks.

    Args:
        ranks: number of ranks.
        inner: sizes of the axes by name.

    Raises:
        ConfigError: the number of ranks is not divisible by one of the sizes.
    """
    for axis, size in inner.items():
        if ranks % size:
            raise ConfigError(
                f"strategy.{axis}={size}: cannot lay {count(ranks)} on a mesh of dp x {axis}, because {ranks} is not "
                f"divisible by {size}; use {divisors(ranks)}, or start a multiple of {size} ranks"
            )


def count(ranks: int) -> str:
    """Return a number of ranks, for a message."""
    return f"{ranks} rank{'s' * (ranks > 1)}"


def divisors(number: int) -> str:
    """Return the divisors of a number, for a message."""
    return " or ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def arrange(ranks: int, dp: int | None, shard: int | None, tp: int, pp: int) -> dict[str, int]:
    """Return the sizes of the axes pp, replicate, shard and tp, of which the last one varies fastest with the rank.

    Args:
        ranks: number of ranks.
        dp: size of replicate x shard; None: ranks / (pp x tp).
        shard: None: dp.

    Raises:
        ConfigError: the product of the sizes is not the number of ranks, or `shard` does not divide `dp`.
    """
    needed = pp * tp * (dp or 1)
    if ranks % needed or (dp and ranks > needed):
        axes = {"dp": dp, "pp": pp, "tp": tp}
        given = " ".join(f"strategy.{axis}={size}" for axis, size in axes.items() if size and (size > 1 or axis == "dp"))
        than, start = ("equal to", "") if dp else ("divisible by", "a multiple of ")
        raise ConfigError(
            f"{given}: cannot lay {count(ranks)} on a mesh of pp x dp x tp, because {ranks} is not {than} {needed}; use sizes "
            f"whose product divides {ranks}, or start {start}{count(needed)}"
        )
    dp = dp or ranks // needed
    shard = shard or dp
    if dp % shard:
        raise ConfigError(
            f"strategy.shard={shard}: must divide the {count(dp)} along dp; use {divisors(dp)}, or null for all of them"
        )
    return {"pp": pp, "replicate": dp // shard, "shard": shard, "tp": tp}


def describe_layout(axes: Mapping[str, int], parts: Partition) -> str:
    """Return the sizes of a mesh, and a line for each of its pp with the ranks and the blocks that they share.

    Args:
        axes: of `arrange`.
        parts: the blocks of each stage.
    """
    pp, replicate, shard, tp = axes.values()
    lines = [f"pp {pp} x dp {replicate * shard} x tp {tp}, dp = replicate {replicate} x shard {shard}"]
    each = replicate * shard * tp
    for stage in range(pp):
        ends = [(parts.names[part[0]], parts.names[part[-1]]) for part in parts.parts[stage::pp]]
        blocks = " and ".join(first if first == last else f"{first} .. {last}" for first, last in ends)
        lines.append(f"  pp {stage}  ranks {stage * each} to {(stage + 1) * each - 1}  {blocks}")
    return "\n".join(lines)
