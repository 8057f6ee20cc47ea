"""Every strategy produces the same weights as `single`, at every world size."""

from collections.abc import Iterable

import pytest
import torch
from cases import (
    AUGMENTED,
    CLIPPED,
    DROPPING,
    FILES,
    FOCAL,
    MATRIX,
    NARROW,
    PARTLY_FROZEN,
    RECIPE,
    REFERENCE,
    UNDECAYED,
    VIT,
    assert_averages_equal,
    assert_equal,
    ddp,
    fsdp,
    name,
    pipeline,
    scratch,
)
from training import SEED, Case, Outcome, held_bytes, largest_difference, make_model, run_cases
from worlds import once, run_world

from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.scratch import Scratch
from ddp_lab.strategies.single import Single


class Forgetful(Scratch):
    """Scratch that does not sum the gradients."""

    def reduce_gradients(self):
        pass


class OwnNorm(Pipeline):
    """A pipeline that clips by the norm of this rank's stage only."""

    gradient_norm = Strategy.gradient_norm


class OwnShardNorm(FSDP):
    """FSDP that clips by the norm of this rank's shards only."""

    def gradient_norm(self):
        return torch.stack([parameter.grad.to_local().norm() for parameter in self.module.parameters()]).norm()


WRONG = [
    Case(Forgetful, scratch().options),
    Case(OwnNorm, pipeline("gpipe").options, **CLIPPED),
    Case(OwnShardNorm, fsdp().options, **CLIPPED),
]
LOCAL = [scratch(**NARROW), ddp(**NARROW)]  # BatchNorm normalises by the local batch
DECAYED = Case(Single, weight_decay=UNDECAYED["weight_decay"])
EACH_OF_RECIPE = [
    *(Case(Single, **{key: value}) for key, value in RECIPE.items() if key not in UNDECAYED),
    DECAYED,
]
QUICK = [(row.case, int(size)) for row in MATRIX for size in row.quick]
SLOW = [(row.case, int(size)) for row in MATRIX for size in row.slow]


@once
def world(size: int, slow: bool) -> list[dict]:
    """Return the outcomes of the cases of `make test` or of `make test-slow`, for each rank, and those of references."""
    cases = [case for case, ranks in (SLOW if slow else QUICK) if ranks == size]
    if size == 2 and not slow:
        cases += [*LOCAL, *WRONG, *PARTLY_FROZEN]
    return run_world(size, run_cases, cases, timeout=600)


@once
def references(slow: bool) -> dict:
    cases = [case for case, _ in SLOW] if slow else [*(case for case, _ in QUICK), *LOCAL, *WRONG, *PARTLY_FROZEN]
    others = [] if slow else [*EACH_OF_RECIPE, Case(Single, **UNDECAYED), Case(Single, **AUGMENTED)]
    return run_world(1, run_cases, list(dict.fromkeys(case.reference() for case in [*cases, *others])), timeout=300)[0]


def outcomes(case: Case, size: int) -> list[Outcome]:
    """Return the case's outcome on each of `size` ranks."""
    return [rank[case] for rank in world(size, (case, size) in SLOW)]


def reference_of(case: Case, size: int) -> Outcome:
    """Return what the case must equal, or must not: the outcome of `single`."""
    return references((case, size) in SLOW)[case.reference()]


def params(pairs: Iterable[tuple[Case, int]]) -> list:
    """Return the parameters (case, size) of a test; slow ones are marked."""
    return [
        pytest.param(case, size, id=f"{name(case)} on {size}", marks=[pytest.mark.slow] * ((case, size) in SLOW))
        for case, size in pairs
    ]


def test_reference_trains_clips_and_augments():
    """A run in which nothing happens proves nothing."""
    alone = references(False)
    trained = alone[REFERENCE].weights
    assert largest_difference(trained, make_model("lenet", SEED).state_dict()) > 0.01
    changed = [Case(Single, **CLIPPED), Case(Single, **AUGMENTED), Case(Single, **FOCAL), ddp(**FILES).reference()]
    for other in [*changed, *EACH_OF_RECIPE]:
        assert largest_difference(alone[other].weights, trained) > 1e-3, name(other)
    vit, dropping = (alone[Case(Single, **case)].weights for case in (VIT, DROPPING))
    assert largest_difference(vit, dropping) > 1e-3
    start = make_model("vit", SEED).state_dict()
    assert all(largest_difference({key: vit[key]}, {key: start[key]}) > 1e-3 for key in vit if "k.bias" not in key)
    assert largest_difference(alone[DECAYED].weights, alone[Case(Single, **UNDECAYED)].weights) > 1e-4


@pytest.mark.parametrize(("case", "size"), params(QUICK + SLOW))
def test_strategy_equals_single(case, size):
    """The weights and sums are those of `single`, the same on every rank, from the same initial weights bit by bit."""
    reference, (first, *others) = reference_of(case, size), outcomes(case, size)
    if case.model == "narrow" and case.dtype == torch.float64:  # momentum is not kept
        assert_close(first, reference)
    else:
        assert_equal(first, reference)
    assert first.initial == reference.initial
    assert bool(first.initial) == (case.init == "by_block")
    for outcome in others:
        assert outcome.sums == first.sums
        assert outcome.evaluation == first.evaluation
        assert outcome.digest == first.digest or case.strategy not in (Scratch, DDP), "the replicas drift apart"


def assert_close(outcome: Outcome, reference: Outcome) -> None:
    assert largest_difference(outcome.weights, reference.weights) <= 1e-9
    assert_averages_equal(outcome, reference, 1e-9)
    assert outcome.evaluation == pytest.approx(reference.evaluation, rel=1e-9)


def is_cut_or_sharded(case: Case) -> bool:
    """Return whether each rank has a part of the blocks or of every parameter. tp alone leaves embedding and head complete."""
    options = dict(case.options)
    cut = issubclass(case.strategy, FSDP | Pipeline | Mesh)
    cut &= case.strategy is not Mesh or options["shard"] != 1 or options["pp"] > 1
    return cut and case.init == "by_block" and case.model.startswith("vit") and case.dtype == torch.float32


@pytest.mark.parametrize(
    ("case", "size"), params((case, size) for case, size in QUICK + SLOW if size > 1 and is_cut_or_sharded(case))
)
def test_ranks_allocate_their_own_part_of_the_model_and_one_block(case, size):
    model = make_model(case.model, SEED)
    full, largest = held_bytes(model), max(map(held_bytes, model))
    ranks = outcomes(case, size)
    assert all(0 < rank.peak <= rank.held + largest < full for rank in ranks)
    assert max(rank.held for rank in ranks) < 0.6 * full <= 0.6 * sum(rank.held for rank in ranks)


@pytest.mark.parametrize("case", PARTLY_FROZEN, ids=name)
def test_partly_frozen_model_equals_single(case):
    """A stage, a bias and unused parameters stay as they are, and the optimizer has no state for them."""
    outcome, start = outcomes(case, 2)[0], make_model("partly_frozen", SEED)
    assert_equal(outcome, reference_of(case, 2))
    assert outcome.momentum.keys() == {"fc1.1.weight", "fc2.weight", "fc2.bias"}
    moved = {name for name, value in start.state_dict().items() if not torch.equal(value, outcome.weights[name])}
    assert moved == outcome.momentum.keys()


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case.strategy.__name__)
def test_wrong_strategy_differs_from_single(case):
    assert largest_difference(outcomes(case, 2)[0].weights, reference_of(case, 2).weights) > 1e-4


def test_batch_norm_differs_only_by_its_local_statistics():
    """Each rank normalises by its local batch, so a model with BatchNorm cannot equal `single`; scratch and ddp are equal."""
    (scratch, other), (ddp, _) = (outcomes(case, 2) for case in LOCAL)
    reference = reference_of(LOCAL[0], 2)
    assert scratch.digest == other.digest
    assert largest_difference(scratch.weights, ddp.weights) <= 1e-9
    assert_averages_equal(scratch, ddp, 1e-9)
    assert ddp.sums[0][0] == pytest.approx(reference.sums[0][0], rel=0.05)
    assert largest_difference(ddp.weights, reference.weights) > 1e-3, "the weights are equal after all"


def test_results_repeat():
    again = run_world(1, run_cases, [REFERENCE])[0][REFERENCE]
    assert largest_difference(again.weights, references(False)[REFERENCE].weights) == 0
