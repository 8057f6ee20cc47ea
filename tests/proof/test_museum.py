"""Each wrong program of the museum is found, with its factor or cause, and none of the mended ones.

The diagnosis knows nothing of these programs: it gets numbers only.
"""

import ast
import functools

import pytest
from launches import ROOT
from proofs import reports
from slow_rows import slow_but

from ddp_lab.exercises.mends import MENDS, source_of

MUSEUM = ROOT / "ddp_lab/exercises/museum"
SIZES = (2, 4)
# By program: the factor on 2 and on 4 ranks, the first tensor, and words of the cause.
CAUSES = {
    "mean_of_means": (None, None, "0.weight", ["mean of means"]),
    "clip_by_local_norm": (None, None, "0.weight", ["clips by the norm of its local gradient"]),
    "pipeline_loss_scale": (8, 8, "0.weight", ["micro-batches", "not the number of ranks"]),
    "replicated_bias": (2, 4, "bias", ["replicated parameter", "were summed"]),
    "tied_weights": (None, None, "table", ["a sum is missing", "tied weights on two stages"]),
    "last_micro_batch": (
        None,
        None,
        "0.weight",
        ["all-reduce is missing in some accumulation steps, such as the last"],
    ),
    "sum_for_mean": (2, 4, "0.weight", ["a sum over the ranks where the mean was meant"]),
    "mean_for_sum": (1 / 2, 1 / 4, "0.weight", ["the mean over the ranks where the sum was meant"]),
    "zero_grad_inside": (None, None, "0.weight", ["zero_grad", "between them"]),
    "schedule_by_ranks": (
        0.5**0.5,
        0.5**1.5,
        "step 2/0.weight",
        ["learning rate", "schedule", "once for every rank"],
    ),
    "running_statistics": (None, None, "mean", ["(the last)", "BatchNorm's running statistics"]),
    "adapters_per_rank": (None, None, "down", ["drawn on each rank", "adapter"]),
    "order_of_epochs": (None, None, "epoch 2/0.weight", ["sampler.set_epoch"]),
    "padded_last_batch": (None, None, "0.weight", ["twice: the partial last batch"]),
    "average_of_shards": (None, None, "step 1/ema.weight", ["0.9, is applied twice"]),
    "norm_of_shards": (None, None, "0.weight", ["clips by the norm of its own shard"]),
}
DETAILS = {
    "padded_last_batch": ["Row 0 counts", "Rows 0-2 count"],
    "zero_grad_inside": ["Rows 0-3, 8-11 of", "Rows 0-1, 4-5, 8-9, 12-13 of"],
    "running_statistics": ["rank 1's samples alone", "rank 3's samples alone"],
    "last_micro_batch": ["rows 9, 11, 13, 15,", "rows 9-11, 13-15,"],
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return a function of the size: the rows of all programs, as they are and mended."""
    folder = tmp_path_factory.mktemp("mended")
    programs = {}
    for name, mend in MENDS.items():
        mended = folder / f"{name}.py"
        mended.write_text(source_of(name).replace(mend.wrong, mend.right))
        programs[name] = MUSEUM / f"{name}.py"
        programs[f"{name} mended"] = mended
    return functools.cache(lambda size: reports(programs, (size,)))


@pytest.fixture(scope="module")
def rows_of_float32(tmp_path_factory):
    """Return the rows of the reports of the wrong programs that compute in float32."""
    folder = tmp_path_factory.mktemp("float32")
    programs = {}
    for name in MENDS:
        programs[name] = folder / f"{name}.py"
        source = source_of(name)
        assert "torch.float64" in source or ".double()" in source
        source = source.replace("torch.float64", "torch.float32").replace(".double()", ".float()")
        programs[name].write_text(source)
    return reports(programs, SIZES)


def test_museum_has_a_cause_and_a_mend_for_every_program():
    names = {path.stem for path in MUSEUM.glob("[a-z]*.py")}
    assert len(names) == 16
    assert names == set(CAUSES) == set(MENDS)
    for name, mend in MENDS.items():
        assert source_of(name).count(mend.wrong) == 1, name
        assert len(source_of(name).splitlines()) <= 75, name
        ast.parse(source_of(name).replace(mend.wrong, mend.right))


@pytest.mark.parametrize("size", slow_but([2], SIZES))
@pytest.mark.parametrize("name", CAUSES)
def test_wrong_program_is_reported_with_its_factor_and_cause(name, size, rows):
    require_cause(name, size, rows(size)[name][size], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CAUSES)
def test_wrong_program_in_float32_is_reported_with_the_same_cause(name, size, rows_of_float32):
    require_cause(name, size, rows_of_float32[name][size], 1e-4)


def require_cause(name, size, row, tolerance):
    """Check the factor, within a relative tolerance, and the cause that a row reports."""
    *factors, first, words = CAUSES[name]
    factor = factors[SIZES.index(size)]
    assert row.outcome == "different", row
    assert row.difference.name == first
    assert not [word for word in words if word not in row.difference.cause], row.difference.cause
    if factor is None:
        assert row.difference.factor is None
    else:
        assert row.difference.factor == pytest.approx(factor, rel=tolerance)
    details = DETAILS.get(name, [""] * len(SIZES))
    assert details[SIZES.index(size)] in row.difference.cause


@pytest.mark.parametrize("size", slow_but([2], SIZES))
@pytest.mark.parametrize("name", CAUSES)
def test_mended_program_gives_no_alarm(name, size, rows):
    row = rows(size)[f"{name} mended"][size]
    assert (row.outcome, row.reason, row.difference) == ("equal", "", None), row.difference
