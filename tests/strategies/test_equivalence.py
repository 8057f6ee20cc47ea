"""Every strategy produces the same weights as `single`, at every world size."""

import pytest
import torch
from case import Case
from cases import MATRIX, assert_averages_equal, assert_equal, tolerance_of
from small_networks import make_model
from training import SEED, Outcome, held_bytes, largest_difference, run_cases
from worlds import once, run_world

from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.fsdp import FSDP
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.scratch import Scratch


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
        return torch.stack(
            [parameter.grad.to_local().norm() for parameter in self.module.parameters()]
        ).norm()


class Decaying(Scratch):
    """Scratch that gives parameters a gradient of zeros if no rank has used them."""

    def reduce_gradients(self):
        super().reduce_gradients()
        for parameter in self.module.parameters():
            parameter.grad = (
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            )


WRONG = [
    Case("scratch", f"_target_={__name__}.Decaying find_unused_parameters=true", model="experts"),
    Case("scratch", f"_target_={__name__}.Forgetful"),
    Case("pipeline", f"_target_={__name__}.OwnNorm schedule=gpipe", settings="clipped"),
    Case("fsdp", f"_target_={__name__}.OwnShardNorm", settings="clipped"),
]
LOCAL = [
    Case("scratch", model="narrow"),
    Case("ddp", model="narrow"),
]  # BatchNorm normalises by the local batch
SINGLE = Case("single")
VIT = Case("single", model="vit")
DROPPING = Case("single", model="vit_drop")
DECAYED = Case("single", settings="optimizer.weight_decay=0.1")
UNDECAYED = Case("single", settings="undecayed")
# Each of these changes the weights.
CHANGES = [
    Case("single", settings="clipped"),
    Case("single", settings="augmented"),
    Case("single", settings="focal"),
    Case("single", settings="files"),
    Case("single", settings="mixup=0.4"),
    Case("single", settings="cutmix=1.0"),
    Case("single", settings="smoothed"),
    Case("single", settings="data.flip=true"),
    Case("single", settings="scheduler=multi_step scheduler.milestones=[1.6]"),
    DECAYED,
]
QUICK = [(case, size) for case in MATRIX for size in case.ranks]
SLOW = [(case, size) for case in MATRIX for size in case.slow]
EXTRA = [(case, size) for case in MATRIX for size in case.extra]
ALL = [*QUICK, *SLOW, *EXTRA]


SUITES = {"test": QUICK, "test-slow": SLOW, "test-extra": EXTRA}


def suite_of(case: Case, size: int) -> str:
    """Return the target of the Makefile that runs a case."""
    for name, pairs in SUITES.items():
        if (case, size) in pairs:
            return name
    return "test"  # cases of this file alone


@once
def world(size: int, suite: str) -> list[dict]:
    """Return the outcomes of the cases of a suite, for each rank."""
    cases = [case for case, ranks in SUITES[suite] if ranks == size]
    if size == 2 and suite == "test":
        cases += [*LOCAL, *WRONG]
    return run_world(size, run_cases, list(map(str, cases)), timeout=600)


@once
def references(suite: str) -> dict:
    cases = [case for case, _ in SUITES[suite]]
    if suite == "test":
        cases += [*LOCAL, *WRONG, SINGLE, VIT, DROPPING, UNDECAYED, *CHANGES]
    lines = dict.fromkeys(str(case.reference()) for case in cases)
    return run_world(1, run_cases, list(lines), timeout=300)[0]


def outcomes(case: Case, size: int) -> list[Outcome]:
    """Return the case's outcome on each of `size` ranks."""
    return [rank[str(case)] for rank in world(size, suite_of(case, size))]


def alone(case: Case, size: int = 1) -> Outcome:
    """Return what the case must equal, or must not: the outcome of `single`."""
    return references(suite_of(case, size))[str(case.reference())]


def params(pairs: list[tuple[Case, int]]) -> list:
    """Return the parameters (case, size) of a test; those that are not fast are marked."""
    marks = {"test": [], "test-slow": [pytest.mark.slow], "test-extra": [pytest.mark.extra]}
    return [
        pytest.param(case, size, id=f"{case} on {size}", marks=marks[suite_of(case, size)])
        for case, size in pairs
    ]


@pytest.mark.slow
def test_reference_trains_clips_and_augments():
    """A run in which nothing happens proves nothing."""
    trained = alone(SINGLE).weights
    assert largest_difference(trained, make_model("lenet", SEED).state_dict()) > 0.01
    for change in CHANGES:
        assert largest_difference(alone(change).weights, trained) > 1e-3, change
    vit = alone(VIT).weights
    dropping = alone(DROPPING).weights
    assert largest_difference(vit, dropping) > 1e-3
    start = make_model("vit", SEED).state_dict()
    assert all(
        largest_difference({key: vit[key]}, {key: start[key]}) > 1e-3
        for key in vit
        if "k.bias" not in key
    )
    assert largest_difference(alone(DECAYED).weights, alone(UNDECAYED).weights) > 1e-4


@pytest.mark.parametrize(("case", "size"), params(ALL))
def test_strategy_equals_single(case, size):
    """The weights and sums are those of `single`, the same on every rank.

    The initial weights are the same bit by bit.
    """
    reference = alone(case, size)
    (first, *others) = outcomes(case, size)
    tolerance = tolerance_of(str(case))
    assert_equal(first, reference, tolerance, relative=tolerance)
    assert first.initial == reference.initial
    assert bool(first.initial) == (case.config().model.init == "by_block")
    for outcome in others:
        assert outcome.sums == first.sums
        assert outcome.evaluations == first.evaluations
        if case.strategy in ("scratch", "ddp"):
            assert outcome.digest == first.digest, "the replicas drift apart"
    if case.model == "partly_frozen":
        # a stage, a bias and unused parameters stay as they are, and the optimizer has no state for
        # them
        start = make_model("partly_frozen", SEED).state_dict()
        moved = {
            name for name, value in start.items() if not torch.equal(value, first.weights[name])
        }
        assert moved == first.momentum.keys() == {"fc1.1.weight", "fc2.weight", "fc2.bias"}


def is_cut_or_sharded(case: Case) -> bool:
    """Return whether each rank has a part of the blocks or of every parameter.

    tp alone leaves embedding and head complete.
    """
    options = case.choices.options
    divides = case.strategy in ("fsdp", "pipeline", "ddp_pipeline")
    divides = divides or bool({"shard", "pp"} & options.keys())
    is_alone = options.get("pp") == "1"
    is_vit = bool({"vit", "vit_drop", "short"} & case.parts)
    return divides and is_vit and not is_alone and not case.in_float64


@pytest.mark.parametrize(
    ("case", "size"),
    params([(case, size) for case, size in ALL if size > 1 and is_cut_or_sharded(case)]),
)
def test_ranks_allocate_their_own_part_of_the_model_and_one_block(case, size):
    model = make_model("vit", SEED)
    full = held_bytes(model)
    largest = max(map(held_bytes, model))
    ranks = outcomes(case, size)
    assert all(0 < rank.peak <= rank.state_bytes + largest < full for rank in ranks)
    assert (
        max(rank.state_bytes for rank in ranks)
        < 0.6 * full
        <= 0.6 * sum(rank.state_bytes for rank in ranks)
    )


@pytest.mark.parametrize("case", WRONG, ids=str)
def test_wrong_strategy_differs_from_single(case):
    assert largest_difference(outcomes(case, 2)[0].weights, alone(case).weights) > 1e-4


def test_batch_norm_differs_only_by_its_local_statistics():
    """Each rank normalises by its local batch; scratch and ddp are equal.

    So a model with BatchNorm cannot equal `single`.
    """
    (scratch, other), (ddp, _) = (outcomes(case, 2) for case in LOCAL)
    reference = alone(LOCAL[0])
    assert scratch.digest == other.digest
    assert largest_difference(scratch.weights, ddp.weights) <= 1e-9
    assert_averages_equal(scratch, ddp, 1e-9)
    assert ddp.sums[0][0] == pytest.approx(reference.sums[0][0], rel=0.05)
    assert largest_difference(ddp.weights, reference.weights) > 1e-3, (
        "the weights are equal after all"
    )
