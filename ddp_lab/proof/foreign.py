"""`verify`: whether a user's own step computes on several ranks what it computes on one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ddp_lab.config.errors import ConfigError
from ddp_lab.proof.alone import Alone, rows_needed
from ddp_lab.proof.batches import select, size_of
from ddp_lab.proof.diagnosis import diagnose
from ddp_lab.proof.evidence import Evidence, Tensors, merge
from ddp_lab.proof.foreign_server import Server, StepError, pickled_batches
from ddp_lab.proof.names import with_names_of
from ddp_lab.proof.report import Report, Row

Step = Callable[[int, int, Any], Mapping[str, Tensor]]
# of all results for parts of the batch together, at most 2 GB in float64
MOST_ELEMENTS = 2**28


def verify(
    step: Step,
    batch: Any = None,
    nproc: Sequence[int] = (1, 2, 4),
    *,
    tolerance: float | None = None,
    timeout: float = 60.0,
) -> Report:
    """Compare what a step computes on several ranks with what it computes on one.

    The step is your own code: plain torch, DDP, FSDP, Accelerate, Fabric, or what else runs on the
    CPU with gloo. Each rank is a fresh process with one thread and no GPU. If a tensor differs, the
    step is also run on one rank for parts of the batch, from which the cause is computed.

    Args:
        step: `step(rank, world_size, batch)` returns tensors by name, such as gradients, or weights
            after an update. It must be importable: a function at the top level of a file. With
            world_size > 1 a process group is open. It seeds what it draws. Names of several steps
            begin with "step 1/", "step 2/", ...; "step 0/" is before the first. A rank may return
            some of the names only, as a stage of a pipeline does.
        batch: the global batch, which each rank gets complete and divides itself: a tensor, a
            mapping or a tuple of tensors with the same first dimension, a list of samples, or a
            dataset. None: the step makes its own, and causes that lie in the samples cannot be
            found.
        nproc: numbers of ranks. The first row of the report is always 1, the reference.
        tolerance: the largest difference that is rounding, as a fraction of the largest element of
            a tensor; None: 1e-9 in float64, 1e-4 in float32, 0.03 in half precision.
        timeout: seconds for each number of ranks.

    Returns:
        A row for each number of ranks: `print(report)` shows them, `report.ok` is whether all are
        equal. An exception of the step is a row "failed" with its file and line.

    Raises:
        ConfigError: an argument is not allowed, or fresh processes cannot load the step.
    """
    sizes = checked_sizes(nproc)
    check_numbers(tolerance, timeout)
    pickled_batches([batch])  # refused before a process starts
    with Server(step) as server:
        return compare(server, batch, sizes, tolerance, timeout)


def compare(
    server: Server, batch: Any, sizes: Sequence[int], tolerance: float | None, timeout: float
) -> Report:
    """Return the report of numbers of ranks above 1; the arguments are those of `verify`."""
    try:
        (expected,) = server.results(1, batch, timeout)
    except StepError as error:
        return Report([Row(name_of(1), "failed", str(error))])
    if not expected:
        raise ConfigError("verify: step returned no tensors; return gradients or weights by name")

    plural = "s" if len(expected) > 1 else ""
    rows = {1: Row(name_of(1), "equal", f"the reference: {len(expected)} tensor{plural}")}
    results = dict[int, list[Tensors]]()
    for size in sizes:
        try:
            ranks = server.results(size, batch, timeout)
        except StepError as error:
            rows[size] = Row(name_of(size), "failed", str(error))
            continue
        results[size] = [with_names_of(expected, tensors) for tensors in ranks]
        rows[size] = judge(expected, results[size], tolerance, Evidence(ranks=results[size]))
    different = [size for size, row in rows.items() if row.outcome == "different"]
    if different:
        elements = sum(tensor.numel() for tensor in expected.values())
        most = MOST_ELEMENTS // max(1, elements)
        alone = results_alone(server, batch, different, most, timeout)
        rows |= explain(expected, results, different, tolerance, alone)
    return Report(list(rows.values()))


def explain(
    expected: Tensors,
    results: Mapping[int, Sequence[Tensors]],
    different: Sequence[int],
    tolerance: float | None,
    alone: Alone,
) -> dict[int, Row]:
    """Return the rows of the numbers of ranks whose tensors differ, with their causes.

    Args:
        expected: of one rank.
        results: by number of ranks, the result of each rank.
        different: the numbers of ranks that differ.
        tolerance: see `verify`.
        alone: what one rank computes for parts of the batch.
    """
    known = {size: alone.evidence(results[size]) for size in different}
    rows = {size: judge(expected, results[size], tolerance, known[size]) for size in different}
    factors = {
        size: row.difference.factor if row.difference else None for size, row in rows.items()
    }
    return {
        size: judge(expected, results[size], tolerance, replace(known[size], other_factors=factors))
        for size in different
    }


def judge(
    expected: Tensors, ranks: Sequence[Tensors], tolerance: float | None, evidence: Evidence
) -> Row:
    """Return the row of some ranks that have returned these tensors."""
    difference = diagnose(
        expected, merge(ranks), len(ranks), tolerance=tolerance, evidence=evidence
    )
    if difference:
        return Row(name_of(len(ranks)), "different", "", difference)
    return Row(name_of(len(ranks)), "equal", unexpected(expected, ranks))


def results_alone(
    server: Server, batch: Any, sizes: Sequence[int], most: int, timeout: float
) -> Alone:
    """Return what one rank computes for parts of the batch, as far as it can and time allows.

    Args:
        server: with the step.
        batch: the global one.
        sizes: numbers of ranks, whose parts of the batch are computed.
        most: number of results that memory allows; the parts of few ranks come first.
        timeout: seconds for all.
    """
    size = size_of(batch)
    if not size:
        return Alone()
    needed = rows_needed(size, sizes)[:most]
    answers = server.answers(1, [select(batch, rows) for rows in needed], timeout)
    results = {
        rows: answer.tensors
        for rows, (answer,) in zip(needed, answers, strict=False)
        if answer.tensors is not None
    }
    return Alone(size, results)


def unexpected(expected: Tensors, ranks: Sequence[Tensors]) -> str:
    """Return a remark about tensors that one rank does not return, or ""."""
    more = [name for name in merge(ranks) if name not in expected]
    return f"not compared, because one rank does not return it: {', '.join(more)}" if more else ""


def checked_sizes(nproc: Sequence[int]) -> list[int]:
    """Return the numbers of ranks but 1, each once.

    Raises:
        ConfigError: one is not allowed.
    """
    sizes: Any = nproc
    allowed = isinstance(sizes, (list, tuple, range)) and all(is_size(size) for size in sizes)
    if not allowed or not set(sizes) - {1}:
        raise ConfigError(
            f"verify: nproc={nproc!r}: must be numbers of ranks, at least one of them above 1, for "
            "example (1, 2, 4)"
        )
    return [size for size in dict.fromkeys(sizes) if size > 1]


def is_size(value: Any) -> bool:
    """Whether a value is a number of ranks."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def check_numbers(tolerance: Any, timeout: Any) -> None:
    """Raise a ConfigError if a number of `verify` is not allowed."""
    if tolerance is not None and not (is_number(tolerance) and 0 <= tolerance < 1):
        raise ConfigError(
            f"verify: tolerance={tolerance!r}: must be a number from 0 to 1, or None for that of "
            "the dtype"
        )
    if not (is_number(timeout) and 0 < timeout < float("inf")):
        raise ConfigError(f"verify: timeout={timeout!r}: must be a number of seconds above 0")


def is_number(value: Any) -> bool:
    """Whether a value is a number, and no truth value."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def name_of(size: int) -> str:
    """Return the name of the row of some ranks."""
    return f"{size} rank{'s' if size > 1 else ''}"
