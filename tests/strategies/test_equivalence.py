"""Every strategy produces the same weights as `single`, at every world size."""

import pytest
import torch
from case import Case, config_of, reference_of
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
    f"scratch _target_={__name__}.Decaying find_unused_parameters=true experts",
    f"scratch _target_={__name__}.Forgetful",
    f"pipeline schedule=gpipe _target_={__name__}.OwnNorm clipped",
    f"fsdp _target_={__name__}.OwnShardNorm clipped",
]
LOCAL = ["scratch narrow", "ddp narrow"]  # BatchNorm normalises by the local batch
# Each of these presets and keys changes the weights.
CHANGES = [
    "clipped",
    "augmented",
    "focal",
    "files",
    "mixup=0.4",
    "cutmix=1.0",
    "smoothed",
    "optimizer.weight_decay=0.1",
]
CHANGES += ["data.flip=true", "scheduler=multi_step scheduler.milestones=[1.6]"]
DECAYED = "single optimizer.weight_decay=0.1"
UNDECAYED = "single undecayed"
QUICK = [(case, int(size)) for case, sizes, _ in MATRIX for size in sizes]
SLOW = [(case, int(size)) for case, _, sizes in MATRIX for size in sizes]


@once
def world(size: int, slow: bool) -> list[dict]:
    """Return the outcomes of the cases of `make test` or of `make test-slow`, for each rank."""
    cases = [case for case, ranks in (SLOW if slow else QUICK) if ranks == size]
    if size == 2 and not slow:
        cases += [*LOCAL, *WRONG]
    return run_world(size, run_cases, cases, timeout=600)


@once
def references(slow: bool) -> dict:
    cases = [case for case, _ in (SLOW if slow else QUICK)]
    others = (
        []
        if slow
        else [*LOCAL, *WRONG, "single", UNDECAYED, *(f"single {change}" for change in CHANGES)]
    )
    return run_world(
        1, run_cases, list(dict.fromkeys(map(reference_of, cases + others))), timeout=300
    )[0]


def outcomes(case: str, size: int) -> list[Outcome]:
    """Return the case's outcome on each of `size` ranks."""
    return [rank[case] for rank in world(size, (case, size) in SLOW)]


def alone(case: str, size: int = 1) -> Outcome:
    """Return what the case must equal, or must not: the outcome of `single`."""
    return references((case, size) in SLOW)[reference_of(case)]


def params(pairs: list[tuple[str, int]]) -> list:
    """Return the parameters (case, size) of a test; slow ones are marked."""
    return [
        pytest.param(
            case, size, id=f"{case} on {size}", marks=[pytest.mark.slow] * ((case, size) in SLOW)
        )
        for case, size in pairs
    ]


def test_reference_trains_clips_and_augments():
    """A run in which nothing happens proves nothing."""
    trained = alone("single").weights
    assert largest_difference(trained, make_model("lenet", SEED).state_dict()) > 0.01
    for change in CHANGES:
        assert largest_difference(alone(f"single {change}").weights, trained) > 1e-3, change
    vit, dropping = (alone(f"single {model}").weights for model in ("vit", "vit_drop"))
    assert largest_difference(vit, dropping) > 1e-3
    start = make_model("vit", SEED).state_dict()
    assert all(
        largest_difference({key: vit[key]}, {key: start[key]}) > 1e-3
        for key in vit
        if "k.bias" not in key
    )
    assert largest_difference(alone(DECAYED).weights, alone(UNDECAYED).weights) > 1e-4


@pytest.mark.parametrize(("case", "size"), params(QUICK + SLOW))
def test_strategy_equals_single(case, size):
    """The weights and sums are those of `single`, the same on every rank.

    The initial weights are the same bit by bit.
    """
    reference = alone(case, size)
    (first, *others) = outcomes(case, size)
    assert_equal(first, reference, tolerance_of(case), relative=tolerance_of(case))
    assert first.initial == reference.initial
    assert bool(first.initial) == (config_of(case).model.init == "by_block")
    for outcome in others:
        assert outcome.sums == first.sums
        assert outcome.evaluations == first.evaluations
        assert outcome.digest == first.digest or Case.of(case).strategy not in ("scratch", "ddp"), (
            "the replicas drift apart"
        )
    if "partly_frozen" in case:
        # a stage, a bias and unused parameters stay as they are, and the optimizer has no state for
        # them
        start = make_model("partly_frozen", SEED).state_dict()
        moved = {
            name for name, value in start.items() if not torch.equal(value, first.weights[name])
        }
        assert moved == first.momentum.keys() == {"fc1.1.weight", "fc2.weight", "fc2.bias"}


def is_cut_or_sharded(case: str) -> bool:
    """Return whether each rank has a part of the blocks or of every parameter.

    tp alone leaves embedding and head complete.
    """
    described = Case.of(case)
    divides = described.strategy in ("fsdp", "pipeline", "ddp_pipeline")
    divides = divides or bool({"shard", "pp"} & described.options.keys())
    is_alone = described.options.get("pp") == "1"
    is_vit = bool({"vit", "vit_drop", "short"} & described.parts)
    return divides and is_vit and not is_alone and not described.in_float64


@pytest.mark.parametrize(
    ("case", "size"),
    params([(case, size) for case, size in QUICK + SLOW if size > 1 and is_cut_or_sharded(case)]),
)
def test_ranks_allocate_their_own_part_of_the_model_and_one_block(case, size):
    model = make_model("vit", SEED)
    full = held_bytes(model)
    largest = max(map(held_bytes, model))
    ranks = outcomes(case, size)
    assert all(0 < rank.peak <= rank.held + largest < full for rank in ranks)
    assert max(rank.held for rank in ranks) < 0.6 * full <= 0.6 * sum(rank.held for rank in ranks)


@pytest.mark.parametrize("case", WRONG)
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
