"""Inputs of other shapes, dtypes and numbers than the example give the numbers of `single`."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from slow_rows import extra, slow
from torch import nn
from torch.utils.data import TensorDataset
from training import full_weights, largest_difference
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.strategies.executor import unwrapped

BATCH = 8
TOLERANCE = 1e-12
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def embedding() -> nn.Sequential:
    """Return logits of 5 classes for each of any number of tokens."""
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def tokens(*shape: int, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (BATCH, *shape)).to(dtype), torch.randint(5, (BATCH, *shape))


def convolutional() -> nn.Sequential:
    """Return logits of 5 classes for each pixel of images of any size."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(6, 6, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 5, 1),
        Rearranged(lambda outputs: outputs.movedim(1, -1)),
    )


def images(height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(BATCH, 3, height, width), torch.randint(5, (BATCH, height, width))


class Rearranged(nn.Module):
    """A module of a function without parameters."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


def recast() -> nn.Sequential:
    """Return logits for vectors of any floating dtype.

    Its activations have two dtypes; before block 4 they are in float32.
    """
    to_float64 = torch.Tensor.double
    to_float32 = torch.Tensor.float
    first = Rearranged(to_float64), nn.Linear(6, 8), nn.Tanh(), Rearranged(to_float32)
    return nn.Sequential(*first, Rearranged(to_float64), nn.Linear(8, 5))


def vectors(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(BATCH, 6).to(dtype), torch.randint(5, (BATCH,))


def flattened() -> nn.Sequential:
    """Return logits for each token of a model with batch and tokens in one dimension in between."""
    rows = Rearranged(lambda outputs: outputs.unflatten(0, (-1, 3)))
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Flatten(0, 1), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5), rows
    )


# A model, and its batches in turn. The first one is the example.
MODELS = {
    "lengths": (embedding, [partial(tokens, length) for length in (6, 4, 7, 6)]),
    "dims": (embedding, [partial(tokens, *shape) for shape in ((6,), (2, 3), (), (6,))]),
    "integers": (
        embedding,
        [partial(tokens, 6, dtype=dtype) for dtype in (torch.int64, torch.int32, torch.int64)],
    ),
    "sizes": (convolutional, [partial(images, *size) for size in ((6, 6), (4, 8), (9, 5), (6, 6))]),
    "floats": (
        recast,
        [partial(vectors, dtype) for dtype in (torch.float32, torch.float64, torch.float32)],
    ),
    "flattened": (flattened, [partial(tokens, 3)] * 2),
}
QUICK = ("lengths", "sizes")
CASES = [  # (strategy, its options, the model), on two ranks or in one process
    *(("split", {"num_microbatches": 3}, model) for model in MODELS),
    ("dp", {}, "lengths"),
    *(("pipeline", {"num_microbatches": 2}, model) for model in QUICK),
]
FURTHER = [  # slow
    *(("pipeline", {"num_microbatches": 2}, model) for model in MODELS if model not in QUICK),
    ("pipeline", {"schedule": "interleavedzerobubble", "num_microbatches": 2}, "sizes"),
    ("mesh", {"pp": 2, "num_microbatches": 2}, "lengths"),
    ("tp", {}, "lengths"),
]
COMBINED = [  # extra
    ("pipeline", {"num_microbatches": 2, "cut": ["4"]}, "floats"),
    ("pipeline", {"schedule": "gpipe", "num_microbatches": 3}, "lengths"),
    ("pipeline", {"schedule": "interleaved1f1b", "num_microbatches": 2}, "lengths"),
    ("ddp_pipeline", {"pp": 1, "num_microbatches": 2}, "lengths"),
    ("ddp_pipeline", {"pp": 2, "num_microbatches": 2}, "sizes"),
    ("mesh", {"pp": 2, "schedule": "interleaved1f1b", "num_microbatches": 2}, "sizes"),
    ("tp", {}, "sizes"),
]
REFUSED = {
    "unsupported": "the model does not support a batch of inputs [2, 9] (int64): 2 fails for [2, "
    "72] (float64): RuntimeError:",
    "too many": "got inputs of 17 shapes, the last one [17] (int64) for a sample: a pipeline needs "
    "a schedule for each, which torch keeps in memory, so at most 16 are supported. "
    "Pad the inputs to multiples",
    "ranks differ": "predict: rank 1 got inputs of [4, 5] (int64), but rank 0, which shares a "
    "model with it, got [4, 6]",
    "no gradient": "strategy.cut: the model cannot be cut before 1, because it gets [4, 6] "
    "(int64), which has no gradient",
}


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none").reshape(
        targets.shape
    )


def train(strategy: str, options: dict, name: str) -> dict:
    """Train, predict and evaluate alternately, and return what they give."""
    make, batches = MODELS[name]
    results: dict = {"losses": [], "outputs": [], "evaluated": []}
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        example = batches[0]()[0][0]
        trainer = lab.trainer(make(), loss, SGD, batch_size=BATCH, accumulate=2, example=example)
        for number, batch in enumerate(batches * 2):
            torch.manual_seed(number)
            inputs, targets = batch()
            local_rows = slice(trainer.strategy.dp_rank, None, trainer.strategy.dp_size)
            results["losses"].append(trainer.step(inputs[local_rows], targets[local_rows]).item())
            results["outputs"] += [
                trainer.predict(inputs[:samples]) for samples in (3, 1, 8, number + 1)
            ]
            results["evaluated"].append(
                trainer.evaluate(TensorDataset(inputs[:5], targets[:5]))["loss"]
            )
        return results | {"weights": full_weights(trainer.strategy)}


def refuse() -> dict[str, str]:
    """Return the messages about inputs that a pipeline refuses."""
    results = {}
    with Lab("pipeline", device="cpu", timeout=30, num_microbatches=2) as lab:
        model = nn.Sequential(nn.Embedding(11, 8), nn.Flatten(), nn.Linear(48, 5))
        trainer = lab.trainer(
            model, F.cross_entropy, SGD, batch_size=BATCH, example=torch.zeros(6, dtype=torch.int64)
        )
        with pytest.raises(ConfigError) as error:
            trainer.predict(torch.zeros(4, 9, dtype=torch.int64))
        results["unsupported"] = str(error.value)
        with pytest.raises(ConfigError) as error:
            trainer.predict(torch.zeros(4, 6 - lab.rank, dtype=torch.int64))
        results["ranks differ"] = str(error.value)
        assert trainer.predict(torch.zeros(4, 6, dtype=torch.int64)).isfinite().all()
        trainer = lab.trainer(
            embedding(), loss, SGD, batch_size=BATCH, example=torch.zeros(6, dtype=torch.int64)
        )
        for length in range(1, 17):
            trainer.predict(torch.zeros(4, length, dtype=torch.int64))
        for samples in range(1, 51):
            trainer.predict(torch.zeros(samples, 6, dtype=torch.int64))
        assert len(trainer.strategy.executor._schedules) < 16 + 4 + 6, (
            "a schedule for each number of samples"
        )
        with pytest.raises(ConfigError) as error:
            trainer.predict(torch.zeros(4, 17, dtype=torch.int64))
        results["too many"] = str(error.value)
    with Lab("pipeline", device="cpu", timeout=30, num_microbatches=2, cut=["1"]) as lab:
        model = nn.Sequential(nn.Identity(), *embedding())
        with pytest.raises(ConfigError) as error:
            lab.trainer(
                model, loss, SGD, batch_size=BATCH, example=torch.zeros(6, dtype=torch.int64)
            )
        results["no gradient"] = str(error.value)
    return results


def all_cases(size: int) -> dict:
    torch.set_default_dtype(torch.float64)
    chosen = [("single", {}, model) for model in MODELS]
    if size == 2:
        chosen = [case for case in CASES if case[0] not in ("split", "dp")]
    else:
        chosen += [case for case in CASES if case[0] in ("split", "dp")]
    results: dict = {str(case): train(*case) for case in chosen}
    return results if size == 1 else results | {"refused": refuse()}


def further_cases(cases: list) -> dict:
    torch.set_default_dtype(torch.float64)
    return {str(case): train(*case) for case in cases}


@once
def outcomes(size: int) -> list[dict]:
    return run_world(size, all_cases, size, timeout=240)


@once
def further_outcomes(are_combined: bool) -> list[dict]:
    return run_world(2, further_cases, COMBINED if are_combined else FURTHER, timeout=240)


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *slow((case,) for case in FURTHER),
        *extra((case,) for case in COMBINED),
    ],
    ids=str,
)
def test_batches_of_several_shapes_give_the_numbers_of_single(case):
    expected = outcomes(1)[0][str(("single", {}, case[2]))]
    if case in (*FURTHER, *COMBINED):
        ranks = further_outcomes(case in COMBINED)
    else:
        ranks = outcomes(1 if case[0] in ("split", "dp") else 2)
    for rank in ranks:
        results = rank[str(case)]
        assert results["losses"] == pytest.approx(expected["losses"], rel=0, abs=TOLERANCE)
        assert results["evaluated"] == pytest.approx(expected["evaluated"], rel=0, abs=TOLERANCE)
        for outputs, reference in zip(results["outputs"], expected["outputs"], strict=True):
            assert (outputs.shape, outputs.dtype) == (reference.shape, reference.dtype)
            assert (outputs - reference).abs().max() <= TOLERANCE
    assert largest_difference(ranks[0][str(case)]["weights"], expected["weights"]) <= TOLERANCE


@pytest.mark.parametrize("kind", REFUSED)
def test_inputs_that_a_pipeline_cannot_take_are_refused_by_one_message_on_all_ranks(kind):
    for rank in outcomes(2):
        assert REFUSED[kind] in rank["refused"][kind]


class Shorter(nn.Module):
    """Drops a logit in training."""

    def forward(self, inputs):
        return inputs[:, :-1] if self.training else inputs


def test_shapes_that_depend_on_the_mode_are_refused_by_one_message():
    with Lab("pipeline", device="cpu", num_microbatches=2) as lab:
        model = nn.Sequential(nn.Linear(6, 5), Shorter())
        trainer = lab.trainer(
            model, tasks.Classification(), SGD, batch_size=BATCH, example=torch.zeros(6)
        )
        message = (
            r"^1 returned \[4, 4\] \(float32\), but \[4, 5\] \(float32\) was computed for the "
            "inputs of this step"
        )
        with pytest.raises(TrainingError, match=message):
            trainer.step(torch.rand(BATCH, 6), torch.zeros(BATCH, dtype=torch.int64))
        assert trainer.predict(torch.rand(3, 6)).shape == (3, 5)


def test_error_of_a_stage_is_not_the_reason_of_its_own_reason():
    with pytest.raises(TrainingError) as error, unwrapped():
        raise RuntimeError("of torch") from TrainingError("of the stage")
    before = error.value.__context__
    assert before is None or error.value not in (before.__cause__, before.__context__)
