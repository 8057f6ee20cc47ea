"""Inputs that the model does not support, in a Lab without an example: one message."""

import re
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from slow_rows import slow_but
from torch import nn
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError

CLASSES = 4
BATCH = 8
SGD = partial(torch.optim.SGD, lr=0.1)
STRATEGIES = {"dp": 1, "ddp": 2, "scratch": 2, "fsdp": 2, "tp": 2}  # and numbers of ranks
# They cut the model by a sample of its input, which the inputs that follow may not resemble.
CUT: dict[str, dict] = {
    "pipeline": {"num_microbatches": 2},
    "mesh": {"pp": 2, "num_microbatches": 2},
}


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module], *arguments: int):
        super().__init__()
        self.first = kind(*arguments)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, inputs):
        hidden = self.first(inputs)
        return self.last(torch.tanh(hidden.flatten(2).mean(2) if hidden.dim() > 2 else hidden))


class ByHand(nn.Module):
    """A layer of the user's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))

    def forward(self, inputs):
        return inputs @ self.weight


def double() -> nn.Module:
    return Net(nn.Linear, 8, 8).double()


def tokens() -> nn.Module:
    return nn.Sequential(nn.Embedding(5, 8), nn.Flatten(), nn.Linear(32, CLASSES))


# The model, its inputs, and what the message says about them. B is the size of a local batch.
MISTAKES = {
    "width": (
        partial(Net, nn.Linear, 8, 8),
        torch.rand(BATCH, 6),
        "first, Linear(in_features=8, out_features=8, bias=True), got [B, 6] (float32)PLACE, but "
        "expects [..., 8]. Use inputs ",
    ),
    "double": (
        double,
        torch.rand(BATCH, 8),
        "first, Linear(in_features=8, out_features=8, bias=True), got [B, 8] (float32)PLACE, but "
        "expects float64. Convert the inputs, for example by inputs.to(torch.float64), or the "
        "model, for example by model.to(torch.float32)",
    ),
    "float": (
        partial(Net, nn.Linear, 8, 8),
        torch.rand(BATCH, 8, dtype=torch.float64),
        "first, Linear(in_features=8, out_features=8, bias=True), got [B, 8] (float64)PLACE, but "
        "expects float32. Convert the",
    ),
    "integers": (
        partial(Net, nn.Linear, 8, 8),
        torch.ones(BATCH, 8, dtype=torch.int64),
        "first, Linear(in_features=8, out_features=8, bias=True), got [B, 8] (int64)PLACE, but "
        "expects float32. Convert the",
    ),
    "channels": (
        partial(Net, nn.Conv2d, 3, 8, 3),
        torch.rand(BATCH, 1, 8, 8),
        "first, Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1)), got [B, 1, 8, 8] (float32)PLACE, "
        "but expects [b, 3, ...]. Use",
    ),
    "norm": (
        partial(Net, nn.BatchNorm1d, 8),
        torch.rand(BATCH, 6),
        "first, BatchNorm1d(8, OPTIONS), got [B, 6] (float32)PLACE, but expects [b, 8, ...]. ",
    ),
    "of_its_own": (
        partial(Net, ByHand),
        torch.rand(BATCH, 6),
        "first, ByHand(), got [B, 6] (float32)PLACE, and fails: RuntimeError: ",
    ),
    "token": (
        tokens,
        torch.full((BATCH, 4), 5),
        "0, Embedding(5, 8), got [B, 4] (int64), but expects numbers from 0 to 4. ",
    ),
    "no_tokens": (
        tokens,
        torch.rand(BATCH, 4),
        "0, Embedding(5, 8), got [B, 4] (float32), but expects int64. Convert the ",
    ),
}


def fail(
    strategy: str,
    options: dict,
    make: Callable[[], nn.Module],
    inputs: torch.Tensor,
    how: str = "step",
) -> BaseException | None:
    """Return the exception with which a model ends for a batch of inputs."""
    with Lab(strategy, device="cpu", timeout=20, **options) as lab:
        model = make()
        sample = torch.zeros(8) if strategy in CUT else None
        trainer = lab.trainer(model, tasks.Classification(), SGD, len(inputs), example=sample)
        data = TensorDataset(inputs, torch.zeros(len(inputs), dtype=torch.int64))
        try:
            if how == "evaluate":
                trainer.evaluate(data)
            elif how == "fit":
                trainer.fit(data, data, epochs=1)
            elif how == "predict":
                trainer.predict(inputs)
            else:
                trainer.step(*next(trainer.batches(data, 0, shuffle=False)))
        except Exception as error:
            return error
        return None


def message_of(error: BaseException | None) -> str:
    if isinstance(error, ConfigError):
        assert error.__suppress_context__
        return str(error)
    return "".join(traceback.format_exception(error)) if error else ""


def expected(message: str) -> str:
    pattern = re.escape(message).replace("PLACE", r" \(test_model_mistakes\.py, line \d+\)")
    pattern = pattern.replace("OPTIONS", ".*")
    return "the model: " + re.sub(r"\bB\b", r"\\d", pattern)


@pytest.mark.parametrize("how", ["step", "fit", "evaluate", "predict"])
@pytest.mark.parametrize("case", MISTAKES)
def test_inputs_that_the_model_does_not_support_are_one_message(case, how):
    make, inputs, message = MISTAKES[case]
    text = message_of(fail("single", {}, make, inputs, how))
    assert re.match(expected(message), text), text
    assert "\n" not in text


def failures(strategy: str) -> dict[str, str]:
    return {
        case: message_of(fail(strategy, {}, make, inputs))
        for case, (make, inputs, _) in MISTAKES.items()
    }


@pytest.mark.parametrize("strategy", slow_but(["dp", "ddp"], STRATEGIES))
def test_inputs_that_the_model_does_not_support_are_one_message_on_ranks(strategy, capfd):
    for rank in run_world(STRATEGIES[strategy], failures, strategy, timeout=90):
        for case, (_, _, message) in MISTAKES.items():
            assert re.match(expected(message), rank[case]), rank[case]
            assert "\n" not in rank[case]
    assert "Traceback" not in capfd.readouterr().err


def mixed(stage: int) -> nn.Module:
    """Return a model of which the first or the last layer is float64."""
    blocks = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    blocks[2 * stage].double()
    return blocks


def failure_of_stage(strategy: str, stage: int) -> str:
    error = fail(
        strategy, CUT[strategy] | {"cut": ["2"]}, partial(mixed, stage), torch.rand(BATCH, 8)
    )
    return message_of(error) if isinstance(error, ConfigError) else type(error).__name__


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("strategy", CUT)
def test_stage_with_inputs_of_another_dtype_is_one_message_of_its_rank(strategy, stage):
    ranks = run_world(2, failure_of_stage, strategy, stage, timeout=60)
    number = [0, 2][stage]
    assert re.match(
        rf"the model: {number}, Linear\(.*\), got \[4, 8\] \(float32\).*, but expects float64\. ",
        ranks[stage],
    )
    assert ranks[1 - stage] == "RuntimeError"  # of gloo, which waits for the other rank


def raises_value_error(inputs):
    raise ValueError("the size of tensor a must match the size of tensor b")


def raises_runtime_error(inputs):
    raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def asserts(inputs):
    assert inputs.shape[1] == 8, "same dtype"


def has_a_mistake(inputs):
    return {}["index out of range in self"]


class OfUser(nn.Module):
    """A model whose own code fails."""

    def __init__(self, code):
        super().__init__()
        self.layer = nn.Linear(6, CLASSES)
        self.code = code

    def forward(self, inputs):
        self.code(inputs)
        return self.layer(inputs)


@pytest.mark.parametrize("code", [raises_value_error, raises_runtime_error, asserts, has_a_mistake])
def test_error_of_the_users_code_keeps_its_type_and_its_traceback(code):
    error = fail("single", {}, partial(OfUser, code), torch.rand(BATCH, 6))
    kinds = {
        raises_value_error: ValueError,
        raises_runtime_error: RuntimeError,
        asserts: AssertionError,
    }
    assert type(error) is kinds.get(code, KeyError)
    last = traceback.extract_tb(error.__traceback__)[-1]
    assert (Path(last.filename).name, last.name) == ("test_model_mistakes.py", code.__name__)


def test_one_value_per_channel_keeps_torchs_error():
    error = fail("single", {}, partial(Net, nn.BatchNorm1d, 8), torch.rand(1, 8))
    assert type(error) is ValueError


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
@pytest.mark.parametrize(
    ("compiles", "named"), [("all", "the model"), ("last", "the module last of the model")]
)
def test_torchscript_is_refused_where_a_model_is_divided(compiles, named):
    model = Net(nn.Linear, 8, 8)
    if compiles == "all":
        model = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, CLASSES)))
    else:
        model.last = torch.jit.script(model.last)
    message = f"^strategy=split: does not support {named}, which is compiled by torch.jit.script."
    with (
        Lab("split", device="cpu", devices=["cpu", "cpu"]) as lab,
        pytest.raises(ConfigError, match=message),
    ):
        lab.trainer(model, tasks.Classification(), SGD, BATCH, example=torch.rand(8))
