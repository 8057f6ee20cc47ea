"""The diagnosis from numbers alone: made-up gradients whose error is known."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from ddp_lab.proof.alone import Alone, rows_needed
from ddp_lab.proof.batches import rows_text, select, size_of
from ddp_lab.proof.diagnosis import diagnose
from ddp_lab.proof.evidence import Evidence
from ddp_lab.proof.report import Difference, Report, Row, factor_text

ROWS = 8


def tensors(seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"first": (8, 4), "bias": (8,), "last": (3, 8)}
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }


def times(factor: float, values: dict, names=("first", "bias", "last")) -> dict:
    return {name: value * (factor if name in names else 1) for name, value in values.items()}


def total(weights, results) -> dict:
    """Return the sum of results, each times its weight."""
    pairs = list(zip(weights, results, strict=True))
    return {name: sum(weight * one[name] for weight, one in pairs) for name in results[0]}


def alone_of(rows: list[dict], sizes=(2,)) -> Alone:
    """Return what one rank computes for parts of a batch, if it is the mean over the rows."""
    needed = rows_needed(len(rows), sizes)
    results = {
        each: total([1 / len(each)] * len(each), [rows[row] for row in each]) for each in needed
    }
    return Alone(len(rows), results)


def diagnosed(expected, ranks, rows=None, **options) -> Difference:
    known = Evidence(ranks=ranks)
    if rows is not None:
        known = alone_of(rows, (len(ranks),)).evidence(ranks)
    difference = diagnose(expected, ranks[0], len(ranks), evidence=replace(known, **options))
    assert difference is not None
    return difference


def samples() -> tuple[list[dict], dict]:
    """Return the gradients of the rows of a batch, and their mean."""
    rows = [tensors(seed) for seed in range(1, ROWS + 1)]
    return rows, total([1 / ROWS] * ROWS, rows)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_of_each_dtype_is_equal_and_a_little_more_is_not(dtype):
    allowed = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    expected = tensors(dtype=dtype)
    largest = expected["first"].abs().max()
    for size, is_equal in ((0.8, True), (1.5, False)):
        actual = {name: value.double().clone() for name, value in expected.items()}
        actual["first"][0, 0] += size * allowed * largest
        assert (diagnose(expected, actual, 2) is None) == is_equal
        assert (diagnose(expected, actual, 2, tolerance=2 * allowed) is None) is True


def test_tensor_that_is_mathematically_zero_may_be_rounding_of_the_others():
    expected = tensors(dtype=torch.float32)
    expected["bias"] = torch.full((8,), 1e-7)
    assert diagnose(expected, expected | {"bias": -expected["bias"]}, 2) is None
    assert diagnose(expected, expected | {"bias": expected["bias"] * 1e4}, 2) is not None


def test_first_difference_is_the_first_in_the_order_of_the_expected_tensors():
    expected = tensors()
    actual = dict(reversed(times(2, expected, ("last", "bias")).items()))
    assert diagnose(expected, actual, 4).name == "bias"


@pytest.mark.parametrize(
    ("factor", "size", "names", "others", "says"),
    [
        (2, 2, None, {}, "x2 is the number of ranks: a sum over the ranks where the mean"),
        (4, 4, None, {2: 2.0, 4: 4.0}, "x4 is the number of ranks: a sum over the ranks"),
        (4, 4, None, {2: 4.0, 4: 4.0}, "x4 on 2 and on 4 ranks, so it is not the number of ranks"),
        (4, 2, None, {}, "x4 is not the number of ranks, 2: the loss is multiplied by"),
        (1 / 2, 2, None, {}, "x1/2 is one over the number of ranks: the mean over the"),
        (
            1 / 8,
            2,
            None,
            {},
            "x1/8 is not the number of ranks, 2: the loss is divided",
        ),
        (2, 2, ("bias",), {}, "each rank has the complete gradient of this replicated parameter"),
        (
            1 / 2,
            2,
            ("bias",),
            {},
            "this gradient exists on one rank only and was averaged",
        ),
        (0, 2, None, {}, "It is zero: nothing was added to it, or it was cleared"),
        (-1, 2, None, {}, "The sign is reversed"),
        (0.73, 2, None, {}, "All gradients have the factor x0.73: the loss is scaled"),
        (0.73, 2, ("last",), {}, "Only these tensors have the factor x0.73"),
    ],
)
def test_constant_factor_names_its_cause(factor, size, names, others, says):
    expected = tensors()
    actual = times(factor, expected, names or tuple(expected))
    difference = diagnosed(expected, [actual] * size, other_factors=others)
    assert difference.factor == pytest.approx(factor, abs=1e-9)
    assert says in difference.cause
    count = len(names or expected)
    assert ("all 3" if count == 3 else f"{count} of 3") in difference.where


def test_tensors_clipped_one_by_one_have_equal_norms():
    expected = tensors()
    actual = {name: value / value.norm() for name, value in expected.items()}
    assert "each was clipped by its own norm" in diagnosed(expected, [actual] * 2).cause


def test_parts_of_all_samples_differ_from_a_mean_that_is_reduced_partly():
    rows, expected = samples()
    never = [total([1 / 4] * 4, rows[:4]), total([1 / 4] * 4, rows[4:])]
    assert "each is that of the rank's own samples" in diagnosed(expected, never, rows).cause
    last = [
        total([1 / 8, 1 / 8, 1 / 4, 1 / 4, 1 / 8, 1 / 8], [*rows[:4], *rows[4:6]]),
        total([1 / 8, 1 / 8, 1 / 8, 1 / 8, 1 / 4, 1 / 4], [*rows[:2], *rows[4:]]),
    ]
    cause = diagnosed(expected, last, rows).cause
    assert "The value of rank 0 does not contain rows 6-7" in cause
    assert "Rows 0-1, 4-5 were summed" in cause


def test_missing_sum_of_one_tensor_and_of_all():
    expected = tensors()
    parts = tensors(5)
    one = [
        expected | {"bias": parts["bias"]},
        expected | {"bias": expected["bias"] - parts["bias"]},
    ]
    assert "tied weights" in diagnosed(expected, one).cause
    rest = {name: expected[name] - parts[name] for name in expected}
    assert "a sum is missing. All-reduce the gradients" in diagnosed(expected, [parts, rest]).cause


def test_ranks_with_a_factor_of_their_own():
    expected = tensors()
    cause = diagnosed(expected, [times(0.5, expected), times(0.7, expected)]).cause
    assert "Each rank has its own factor (0.5, 0.7)" in cause


def test_value_of_one_rank_is_drawn_or_was_not_broadcast():
    expected = tensors()
    drawn = diagnosed(expected, [expected, tensors(5), tensors(6)])
    assert "it is drawn on each rank" in drawn.cause
    assert "on ranks 1, 2 only" in drawn.where
    loaded = diagnosed(expected, [expected, tensors(5), tensors(5)])
    assert "it is loaded or updated on one rank only" in loaded.cause


def test_sum_on_one_rank_only_is_a_reduce():
    rows, expected = samples()
    second = total([1 / 8] * 4, rows[4:])
    cause = diagnosed(expected, [expected, second], rows).cause
    assert "Rank 0 has the expected value, and the other ranks those of their own samples" in cause


def test_shards_in_another_order_and_missing_ones():
    expected = tensors()
    shards = expected["first"].chunk(4)
    swapped = expected | {"first": torch.cat([shards[n] for n in (0, 2, 1, 3)])}
    assert "are in the order [0, 2, 1, 3]" in diagnosed(expected, [swapped] * 4).cause
    empty = expected | {"first": torch.cat([shards[0], torch.zeros(6, 4)])}
    assert "have the factors x1, 0, 0, 0: shards are not gathered" in (
        diagnosed(expected, [empty] * 4).cause
    )
    columns = expected["last"].chunk(2, 1)
    twice = expected | {"last": torch.cat([columns[0], 2 * columns[1]], 1)}
    cause = diagnosed(expected, [twice] * 2).cause
    assert "The 2 shards of dimension 1 have the factors x1, x2: a shard is summed" in cause


def test_transposed_tensor_and_tensor_of_one_shard():
    square = {"weight": torch.randn(4, 4), "bias": torch.ones(4)}
    transposed = diagnosed(square, [square | {"weight": square["weight"].T}] * 2)
    assert transposed.cause == "The tensor is transposed."
    expected = tensors()
    shard = diagnosed(expected, [expected | {"first": expected["first"][:4]}] * 2)
    assert "[4, 4], expected [8, 4]: it is the shard of one rank" in shard.cause
    assert shard.relative == math.inf


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bias": torch.full((8,), math.nan)}, "It is not finite"),
        ({"first": torch.zeros(3)}, "Its shape is [3], expected [8, 4]."),
    ],
)
def test_tensors_that_cannot_be_compared(change, says):
    expected = tensors()
    assert says in diagnosed(expected, [expected | change] * 2).cause


def test_missing_tensor_is_named():
    expected = tensors()
    lacking = {name: value for name, value in expected.items() if name != "bias"}
    difference = diagnosed(expected, [lacking] * 2)
    assert (difference.name, difference.relative) == ("bias", 1.0)
    assert "No rank returns it" in difference.cause


def test_gradients_of_one_rank_alone_and_mean_of_means():
    rows, _ = samples()
    weights = [1, 5, 2, 2, 1, 1, 3, 1]
    expected = total([weight / 16 for weight in weights], rows)
    shares = [sum(weights[:4]), sum(weights[4:])]
    means = [
        total([weight / shares[0] for weight in weights[:4]], rows[:4]),
        total([weight / shares[1] for weight in weights[4:]], rows[4:]),
    ]
    alone = alone_of(rows)
    results = dict(alone.results) | {(0, 1, 2, 3): means[0], (4, 5, 6, 7): means[1]}
    lost = [means[0]] * 2
    evidence = replace(alone, results=results).evidence(lost)
    assert (
        "that of rank 0's samples alone" in diagnose(expected, lost[0], 2, evidence=evidence).cause
    )
    both = [total([1 / 2, 1 / 2], means)] * 2
    evidence = replace(alone, results=results).evidence(both)
    assert "a mean of means" in diagnose(expected, both[0], 2, evidence=evidence).cause


def test_only_some_clipped_local_gradients_are_still_clipping():
    rows, _ = samples()
    limit = 1.0

    def clipped(values):
        norm = torch.stack([value.norm() for value in values.values()]).norm()
        return times(min(1.0, float(limit / norm)), values)

    small = [times(0.01, row) for row in rows[:4]] + rows[4:]
    alone = alone_of(small)
    results = {each: clipped(values) for each, values in alone.results.items()}
    expected = clipped(total([1 / ROWS] * ROWS, small))
    ranks = [total([1 / 2, 1 / 2], [results[0, 1, 2, 3], results[4, 5, 6, 7]])] * 2
    evidence = replace(alone, results=results).evidence(ranks)
    assert "clips by the norm of its local gradient" in (
        diagnose(expected, ranks[0], 2, evidence=evidence).cause
    )


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([2, 1, 1, 1, 1, 1, 1, 1], "Row 0 counts more than once"),
        ([1, 1, 1, 1, 1, 1, 3, 3], "Rows 6-7 count more than once"),
        ([0, 0, 2, 2, 0, 0, 2, 2], "Rows 0-1, 4-5 of the batch do not count, but the last samples"),
        ([0, 0, 0, 0, 0, 0, 4, 4], "Rows 0-5 of the batch do not count, but the last samples"),
        ([0, 0, 0, 0, 1, 1, 1, 1], "The value is that of rank 1's samples alone"),
        ([1, 1, 1, 0, 1, 1, 1, 1], "Row 3 of the batch do not count: no rank has used"),
        ([3, 3, 3, 3, 1, 1, 1, 1], "All samples of a rank have the same weight, but those of"),
        ([5, 2, 3, 1, 1, 4, 1, 1], "The samples have other weights than on one rank"),
    ],
)
def test_samples_that_count_too_often_or_not_at_all(weights, says):
    rows, expected = samples()
    ranks = [total([weight / sum(weights) for weight in weights], rows)] * 2
    difference = diagnosed(expected, ranks, rows)
    assert difference.factor is None
    assert says in difference.cause


def test_rank_whose_gradients_are_lost_in_a_mean_is_named():
    rows, expected = samples()
    ranks = [total([0, 0, 0, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 8], rows)] * 2
    cause = diagnosed(expected, ranks, rows).cause
    assert "Rows 0-3 of the batch do not count: the gradients of rank 0 are lost" in cause


def test_padding_to_equal_numbers_of_samples_is_named():
    rows = [tensors(seed) for seed in range(1, 8)]
    expected = total([1 / 7] * 7, rows)
    ranks = [total([2 / 8] + [1 / 8] * 6, rows)] * 2
    cause = diagnosed(expected, ranks, rows).cause
    assert "Row 0 counts twice: the partial last batch is filled up" in cause


def test_weights_of_updates_are_explained_by_the_change_of_the_step():
    before = tensors()
    change = tensors(5)

    def after(factors) -> dict:
        steps = {f"step 0/{name}": value for name, value in before.items()}
        values = dict(before)
        for number, factor in enumerate(factors, 1):
            values = {name: value - factor * change[name] for name, value in values.items()}
            steps |= {f"step {number}/{name}": value for name, value in values.items()}
        return steps

    expected = after([0.1, 0.1])
    doubled = diagnosed(expected, [after([0.2, 0.2])] * 2)
    assert (doubled.name, doubled.factor) == ("step 1/first", pytest.approx(2))
    assert "in step 1, the number of ranks. The learning rate is multiplied by it" in doubled.cause
    later = diagnosed(expected, [after([0.1, 0.05])] * 2)
    assert (later.name, later.factor) == ("step 2/first", pytest.approx(0.5))
    assert "the earlier steps are right: the learning rate differs from there on" in later.cause
    assert "from step 2 on" in later.where


def test_step_that_differs_for_an_unknown_reason_names_what_changes_between_steps():
    first = {f"step 1/{name}": value for name, value in tensors().items()}
    expected = first | {f"step 2/{name}": value for name, value in tensors(1).items()}
    actual = first | {f"step 2/{name}": value for name, value in tensors(2).items()}
    assert "All tensors before step 2 are right" in diagnosed(expected, [actual] * 2).cause


def test_average_that_is_updated_twice_or_not_in_every_step():
    weights = [tensors(seed) for seed in range(3)]

    def averages(decay: float, times_a_step: int) -> dict:
        average = dict(weights[0])
        steps = {}
        for number, values in enumerate(weights[1:], 1):
            for name in average:
                share = decay**times_a_step
                average[name] = share * average[name] + (1 - share) * values[name]
            steps |= {f"step {number}/{name}": value for name, value in values.items()}
            steps |= {f"step {number}/ema.{name}": value for name, value in average.items()}
        return steps

    expected = averages(0.8, 1)
    twice = diagnosed(expected, [averages(0.8, 2)] * 2)
    assert twice.name == "step 1/ema.first"
    assert "the decay, 0.8, is applied twice in a step. Update these averages once" in twice.cause
    other = diagnosed(expected, [averages(0.8, 3)] * 2)
    assert "it is updated more than once in a step (EMA)" in other.cause
    slower = diagnosed(expected, [averages(0.9, 1)] * 2)
    assert "its decay is larger (EMA)" in slower.cause


def test_unknown_difference_claims_no_cause():
    rows, expected = samples()
    difference = diagnosed(expected, [tensors(50)] * 2, rows)
    assert difference.factor is None
    assert difference.cause.startswith("No constant ratio, and no sum of the ranks' parts,")
    assert "on the other samples of its batch" in difference.cause


def test_report_is_a_table_and_json():
    difference = Difference("bias", 0.5, "The mean. Of what?", math.inf, "1 of 3 tensors")
    rows = [
        Row("ddp", "equal"),
        Row("fsdp, 4 ranks", "different", "", difference),
        Row("tp", "refused", "too few heads"),
    ]
    report = Report(rows)
    assert str(report).splitlines() == [
        "ddp            equal",
        "fsdp, 4 ranks  different",
        "    bias is x1/2 the expected tensor (1 of 3 tensors).",
        "    The mean. Of what?",
        "tp             refused    too few heads",
    ]
    assert not report.ok
    written = json.loads(json.dumps(report.as_json(), allow_nan=False))
    assert written["ok"] is False
    assert written["rows"][1]["difference"]["relative"] == "inf"
    assert written["rows"][1]["difference"]["factor"] == 0.5
    assert written["rows"][2] == {
        "name": "tp",
        "outcome": "refused",
        "reason": "too few heads",
        "difference": None,
    }


@pytest.mark.parametrize(
    ("outcomes", "ok"),
    [
        (["equal", "refused"], True),
        (["equal", "failed"], False),
        (["equal", "different"], False),
        (["refused"], False),
        ([], False),
    ],
)
def test_report_is_ok_if_something_is_equal_and_nothing_differs(outcomes, ok):
    assert Report([Row("name", outcome) for outcome in outcomes]).ok == ok


@pytest.mark.parametrize(
    ("factor", "text"), [(2.0, "x2"), (0.25, "x1/4"), (-2.0, "x-2"), (0.7071, "x0.7071"), (0, "x0")]
)
def test_factors_are_multiples_or_fractions(factor, text):
    assert factor_text(factor) == text


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6),
        (torch.arange(6), torch.zeros(6, 2)),
        {"a": torch.arange(6), "b": torch.zeros(6, 2)},
        [10, 20, 30, 40, 50, 60],
        torch.utils.data.TensorDataset(torch.arange(6)),
    ],
)
def test_rows_of_any_batch_are_selected(batch):
    assert size_of(batch) == 6
    part = select(batch, [1, 4])
    assert size_of(part) == 2
    text = str(part.indices if isinstance(part, torch.utils.data.Subset) else part)
    assert re.search(r"1\D+4|20, 50", text)


@pytest.mark.parametrize(
    "batch",
    [None, 3, torch.tensor(1), (torch.zeros(2), torch.zeros(3)), {"a": 1}, "text", iter([])],
)
def test_batches_without_rows_have_no_size(batch):
    assert size_of(batch) is None


def test_numbers_of_rows_are_ranges():
    assert rows_text([3]) == "row 3"
    assert rows_text([7, 0, 1, 2]) == "rows 0-2, 7"
