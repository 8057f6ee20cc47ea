"""The layout of ranks on a mesh: the sizes of its axes, and the picture of the strategy `mesh` in the log."""

from collections.abc import Mapping
from typing import NamedTuple

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.partition import Partition

MOST_LINES = 8  # of a stage, and ranks on a line, that the picture shows


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
    axes = {"dp": dp, "pp": pp, "tp": tp}
    given = " ".join(f"strategy.{axis}={size}" for axis, size in axes.items() if size and (size > 1 or axis == "dp"))
    if dp is None and ranks % (pp * tp):
        size = f"{pp} x {tp} = {pp * tp}" if min(pp, tp) > 1 else pp * tp
        raise ConfigError(
            f"{given}: cannot lay {count(ranks)} on a mesh of pp x dp x tp, because {ranks} is not divisible by {size}; use "
            f"sizes whose product divides {ranks}, or start a multiple of {pp * tp} ranks"
        )
    dp = dp or ranks // (pp * tp)
    if pp * dp * tp != ranks:
        raise ConfigError(
            f"{given}: are {pp} x {dp} x {tp} = {count(pp * dp * tp)}, but {ranks} were started; start {pp * dp * tp}, or use "
            f"sizes whose product is {ranks}, or strategy.dp=null for all ranks that pp and tp leave"
        )
    shard = shard or dp
    if dp % shard:
        raise ConfigError(
            f"strategy.shard={shard}: must divide the {count(dp)} along dp; use {divisors(dp)}, or null for all of them"
        )
    return {"pp": pp, "replicate": dp // shard, "shard": shard, "tp": tp}


class OtherSizes(NamedTuple):
    """The sizes of tp with which a number of ranks can be laid on a mesh.

    Attributes:
        ranks: their number, for a message.
        sizes: in ascending order.
        also: what else has to be changed, for a message.
    """

    ranks: str
    sizes: list[int]
    also: str


def other_sizes(ranks: int, dp: int | None, shard: int | None, pp: int) -> OtherSizes:
    """Return the sizes of tp that a mesh allows. The arguments are those of `arrange`, which allows one of them."""
    along = ranks // pp
    sizes = [tp for tp in range(1, along + 1) if along % tp == 0 and along // tp % (shard or 1) == 0]
    return OtherSizes(count(ranks), sizes, "" if dp is None else " and strategy.dp=null")


def picture(axes: dict[str, int], parts: Partition, sizes: list[int], held: list[int]) -> str:
    """Return a picture of the mesh: which rank is where and what it holds.

    Args:
        axes: of `arrange`.
        parts: the blocks of each stage.
        sizes: number of parameters of each block.
        held: bytes of the parameters on each rank.
    """
    pp, tp = axes["pp"], axes["tp"]
    dp = axes["replicate"] * axes["shard"]
    lines = [f"pp {pp} x dp {dp} x tp {tp}{copies(axes)}"]
    for stage in range(pp):
        blocks = [[parts.names[i] for i in part] for part in parts.parts[stage::pp]]
        total = sum(sizes[i] for part in parts.parts[stage::pp] for i in part)
        first = stage * dp * tp
        most = max(held[first : first + dp * tp])
        named = " and ".join(names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}" for names in blocks)
        holds = f"{named}: {total:,} parameters, {most / 2**20:,.2f} MiB of them on each rank"
        rows = [row(axes, first, index) for index in range(dp)]
        if dp > MOST_LINES:
            rows[MOST_LINES - 2 : -1] = ["..."]
        width = max(map(len, rows))
        lines += [f"  pp {stage}  {rows[0]:{width}}  {holds}", *(f"        {line}" for line in rows[1:])]
    return "\n".join(lines)


def copies(axes: dict[str, int]) -> str:
    """Return how the ranks along dp store the parameters, as the end of the picture's first line."""
    replicate, shard = axes["replicate"], axes["shard"]
    if shard == 1:
        return f": {replicate} replicas" if replicate > 1 else ""
    return f": {shard} shards" + (f" in each of {replicate} replicas" if replicate > 1 else "")


def row(axes: dict[str, int], first: int, index: int) -> str:
    """Return the ranks of a stage with the same samples, for example "dp 1  replica 0  shard 1  rank 2  rank 3".

    Ranks with the same shard hold the same parameters; those of a replica hold all parameters of the stage together.

    Args:
        first: first rank of the stage.
        index: position along dp.
    """
    tp = axes["tp"]
    ranks = [f"rank {first + index * tp + i}" for i in range(tp)]
    if tp > MOST_LINES:
        ranks[1:-1] = [".."]
    columns = [f"dp {index:<2}"]
    if axes["shard"] > 1:
        replica, shard = divmod(index, axes["shard"])
        columns += [f"replica {replica:<2}"] * (axes["replicate"] > 1) + [f"shard {shard:<2}"]
    return "  ".join([*columns, *(f"{rank:7}" for rank in ranks)]).rstrip()
