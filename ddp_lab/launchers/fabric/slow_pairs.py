"""Fault: a pair of ranks that hangs, fails, or is much slower than the others."""

from statistics import median
from typing import NamedTuple

from ddp_lab.launchers.preflight import Finding

ABOUT = "pairs"
SLOW = 0.5  # of the median of the other pairs with the same kind of link
CHECK = (
    "Check the cable, the switch or the slot between them (nvidia-smi topo -m, nvidia-smi nvlink "
    "-e), and what else runs there"
)


class Result(NamedTuple):
    """What a pair of ranks has come to.

    Attributes:
        pair: the ranks.
        link: the kind of their link.
        rate: GB/s of each direction, both at the same time; None if they did not finish.
        problem: why they did not finish; "" if they did.
        hung: whether they took too long.
    """

    pair: tuple[int, int]
    link: str
    rate: float | None
    problem: str = ""
    hung: bool = False

    @property
    def name(self) -> str:
        return f"{self.pair[0]}-{self.pair[1]}"


def describe(result: Result, results: list[Result]) -> Finding:
    """Return the line of a pair."""
    about = f"pair {result.name}"
    if result.rate is None:
        return Finding("warning", about, f"{result.problem}, {result.link}")
    text = f"{result.rate:.3g} GB/s, {result.link}"
    usual = usual_rate(result, results)
    if result.rate < SLOW * usual:
        return Finding("warning", about, f"{text}; pairs like it reach {usual:.3g} GB/s")
    return Finding("ok", about, text)


def usual_rate(result: Result, results: list[Result]) -> float:
    """Return the median GB/s of the other pairs with the same kind of link; 0 without any."""
    others = [
        each.rate
        for each in results
        if each.pair != result.pair and each.link == result.link and each.rate is not None
    ]
    return median(others) if others else 0.0


def check_pairs(results: list[Result], hosts: list[str]) -> Finding:
    """Return a finding that names the pairs that fail or are slow.

    Args:
        results: of all pairs.
        hosts: of the ranks.
    """
    if not results:
        return Finding("ok", ABOUT, "one rank, so no pair is measured")
    failed = [result for result in results if result.rate is None]
    slow = [
        result
        for result in results
        if result.rate is not None and result.rate < SLOW * usual_rate(result, results)
    ]
    rates = [result.rate for result in results if result.rate is not None]
    if not failed and not slow:
        return Finding("ok", ABOUT, f"all exchange at {min(rates):.3g} to {max(rates):.3g} GB/s")
    texts = [f"{place(result, hosts)} {result.problem}" for result in failed]
    texts += [
        f"{place(result, hosts)} reach {result.rate:.3g} GB/s, pairs like it "
        f"{usual_rate(result, results):.3g}"
        for result in slow
    ]
    common = common_rank([result.pair for result in failed + slow], len(hosts))
    hint = "" if common is None else f" All of them have rank {common} on {hosts[common]}."
    return Finding("warning", ABOUT, f"{'; '.join(texts)}.{hint} {CHECK}")


def place(result: Result, hosts: list[str]) -> str:
    """Return the ranks of a pair with their hosts."""
    one, other = result.pair
    return f"ranks {one} and {other} ({hosts[one]}, {hosts[other]})"


def common_rank(pairs: list[tuple[int, int]], ranks: int) -> int | None:
    """Return the rank that all these pairs have in common; None if there is not exactly one."""
    shared = [rank for rank in range(ranks) if all(rank in pair for pair in pairs)]
    return shared[0] if len(shared) == 1 else None
