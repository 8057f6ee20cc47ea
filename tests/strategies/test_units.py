"""What fsdp gathers together, the order of units on which ranks agree, and refusals."""

import re
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from unit_models import Around, Containers, Mixture
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError, TrainingError
from ddp_lab.models.usage import find_usage
from ddp_lab.strategies.unit_advice import Advice
from ddp_lab.strategies.unit_order import END, WHOLE, UnitOrder
from ddp_lab.strategies.units import find_units, require_one_dtype
from ddp_lab.world.runtime import Runtime

SHAPE = (1, 6, 6)
SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-4)
TIMEOUT = 8.0


def names_of(units: list[nn.Module], model: nn.Module) -> list[str]:
    names = {module: name for name, module in model.named_modules()}
    return [names[unit] for unit in units]


def units_of(
    model: nn.Module, tried: bool = True, keep_whole: tuple = (), shape: tuple = SHAPE
) -> list[str]:
    usage = find_usage(model, torch.empty(2, *shape, device="meta")) if tried else None
    return names_of(find_units(model, usage, keep_whole), model)


def test_parameters_that_are_used_elsewhere_stay_with_the_module_around_them():
    """Not in a unit: encoder, never called; table, used directly; first, last, h.*.inner, tied."""
    units = units_of(Containers(1, 6, 3))
    blocks = ["transformer.h.0.outer", "transformer.h.1.outer"]
    assert units == [*blocks, "deep.0.a.0", "encoder.layer", "transformer.ln", "head"]
    inner = [f"model.{name}" for name in [*blocks, "deep.0.a.0", "transformer.ln"]]
    assert units_of(Around(1, 6, 3)) == [*inner, "model"]


def test_without_a_trial_only_containers_and_ties_are_known():
    units = units_of(Containers(1, 6, 3), tried=False)
    assert {*units} == {*units_of(Containers(1, 6, 3)), "encoder", "table"} - {"encoder.layer"}


@pytest.mark.parametrize(
    ("patterns", "left"),
    [
        (["experts.*"], ["entry", "head"]),
        (["experts"], ["entry", "head"]),
        (["experts.0", "h*"], ["experts.1", "experts.2", "entry"]),
    ],
)
def test_keep_whole_leaves_modules_and_what_they_contain_with_the_module_around_them(
    patterns, left
):
    assert units_of(Mixture(1, 6, 3, "units"), keep_whole=patterns) == left


def test_keep_whole_that_matches_nothing_is_refused():
    message = (
        r"strategy.keep_whole=\[expert\]: matches no module of the model. Use .*, for example of "
        "entry, experts, experts.0"
    )
    with pytest.raises(ConfigError, match=message):
        units_of(Mixture(1, 6, 3, "units"), keep_whole=["expert"])


class Table(nn.Module):
    """A module that returns its parameter, which is used elsewhere."""

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.rand(4))

    def forward(self):
        return self.values


class Odd(nn.Module):
    """A weight that is used directly, and another parameter."""

    def __init__(self, parameter: torch.Tensor | None = None):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.table = Table()
        self.odd = None if parameter is None else nn.Parameter(parameter)

    def forward(self, inputs):
        hidden = F.linear(self.body(inputs), self.body.weight.t()) + self.table()
        return self.head(hidden if self.odd is None else hidden + self.odd.sum())


class Adapted(nn.Module):
    """A unit after a layer at the input, which some ranks leave out from the second step on."""

    def __init__(self):
        super().__init__()
        self.adapter = nn.Linear(4, 4)
        self.out = nn.Linear(4, 2)
        self.steps = 0

    def forward(self, inputs):
        in_trial = inputs.max() <= 1
        self.steps += not in_trial
        if self.steps < 2 or inputs[:, 0].max() > 2:
            inputs = self.adapter(inputs)
        return self.out(inputs)


class Sometimes(nn.Module):
    """A model whose unit is left out where no number in the first column of a batch is above 2.

    Args:
        kind: from the first step (first) or the third one (late); or it is called, and its output
            is left out (output).
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.steps = 0
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, inputs):
        in_trial = inputs.max() <= 1
        self.steps += not in_trial
        hidden = self.body(inputs)
        chosen = in_trial or inputs[:, 0].max() > 2
        if self.kind == "output":
            branch = self.branches[0](hidden)
            return self.head(self.branches[1](hidden + branch if chosen else hidden))
        if chosen or (self.kind == "late" and self.steps < 3):
            hidden = hidden + self.branches[0](hidden)
        return self.head(self.branches[1](hidden))


def samples() -> TensorDataset:
    """Return samples of which every second one has a large number.

    These are those of rank 1 of two; the number is in the first column.
    """
    inputs = torch.rand(32, 4, generator=torch.Generator().manual_seed(1))
    inputs[:, 0] = 2 + 0.5 * (torch.arange(32) % 2 * 2 - 1)
    return TensorDataset(inputs, torch.ones(32, 2))


def refusal(model: nn.Module, tried: bool = True, **options) -> tuple[str, float]:
    """Return the message with which training ends on this rank, or "", and the seconds."""
    data = samples()
    with Lab("fsdp", device="cpu", timeout=TIMEOUT, **options) as lab:
        start = time.perf_counter()
        try:
            example = (torch.rand(4), data[0][1]) if tried else None
            trainer = lab.trainer(model, tasks.Regression(), SGD, batch_size=8, example=example)
            for batch in trainer.batches(data, 0, shuffle=False):
                trainer.step(*batch)
        except (TrainingError, ConfigError) as error:
            return str(error), time.perf_counter() - start
        except RuntimeError:  # of gloo: this rank waits for another one, which has ended
            return "", time.perf_counter() - start
        return "", time.perf_counter() - start


def first_refusal(kind: str) -> list[str]:
    torch.manual_seed(0)
    return list(refusal(Sometimes(kind)))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("first", r"rank \d comes to branches.\d, but rank \d to branches.\d"),
        (
            "output",
            r"rank \d comes to the backward pass of \S+, but rank \d to the backward pass of \S+",
        ),
        ("late", r"rank 0 comes to branches.1, but the others to branches.0"),
    ],
)
def test_units_that_some_ranks_leave_out_are_refused_by_name_before_the_timeout(kind, message):
    ranks = run_world(2, first_refusal, kind, timeout=60)
    errors = [error for error, _ in ranks if error]
    assert errors
    for error in errors:
        assert re.match(
            rf"strategy=fsdp: {message}\. .*strategy.keep_whole=\[\S+\], in a Lab ", error
        ), error
    assert "keep_whole=[branches.*]" in errors[0]
    assert all(seconds < TIMEOUT for _, seconds in ranks)


def refusal_of_late_sums() -> str:
    torch.manual_seed(0)
    return refusal(Adapted(), keep_whole=["adapter"], find_unused_parameters=True)[0]


def test_gradients_that_some_ranks_sum_later_are_refused_by_name():
    """Without the layer before it, `out` has inputs without a gradient: torch sums at the end."""
    errors = [error for error in run_world(2, refusal_of_late_sums, timeout=60) if error]
    message = (
        "strategy=fsdp: rank 0 comes to the end of the pass, but the others to the sum of the "
        "gradients of out. All ranks must sum the gradients of the units in the same order, so the "
        "inputs of a unit must need a gradient on all ranks or on none. Gather such units together "
        "with the module around them: use "
        'strategy.keep_whole=[adapter,out], in a Lab keep_whole=["adapter", "out"]'
    )
    assert errors
    assert errors[0].startswith(message)


def refusals_of_odd_models() -> dict[str, str]:
    parameters = {
        "scalar": torch.tensor(1.0),
        "empty": torch.empty(4, 0),
        "types": torch.ones(2, dtype=torch.float64),
    }
    refusals = {kind: refusal(Odd(parameter))[0] for kind, parameter in parameters.items()}
    return refusals | {"untried": refusal(Odd(), tried=False)[0], "tried": refusal(Odd())[0]}


def test_what_fsdp_cannot_take_is_refused_in_one_message():
    refusals = run_world(1, refusals_of_odd_models)[0]
    expected = {
        "scalar": r"strategy=fsdp: cannot shard the parameter odd, which has no dimensions\. Give "
        r"it the shape \[1\], or .*",
        "empty": r"strategy=fsdp: cannot shard the parameter odd of shape \[4, 0\], which has no "
        r"elements\. Let its first .*",
        "types": r"strategy=fsdp: gathers odd \(torch.float64\) and \S+ \(torch.float32\) "
        "together, which must .*",
        "untried": "strategy=fsdp: a parameter is used outside the forward pass of the module that "
        r"has it \(test_units.py, line \d+\), and is not gathered then\. .* use "
        r"strategy.keep_whole=\[body,table\], in a Lab .*; or, in a Lab, let the model "
        r"be tried: lab.trainer\(\.\.\., example=dataset\[0\]\)",
        "tried": "",
    }
    for kind, message in expected.items():
        assert re.fullmatch(message, refusals[kind]), refusals[kind]


def trained_on(strategy: str, folder: str, steps: int | None = None) -> list[float]:
    """Return the losses from the checkpoint in a folder on, of an epoch or until one is written."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    data = TensorDataset(torch.rand(22, *SHAPE) - 0.5, torch.rand(22, 3))
    with Lab(strategy, device="cpu", timeout=30) as lab:
        trainer = lab.trainer(
            Containers(1, 6, 3),
            tasks.Regression(),
            ADAM,
            batch_size=6,
            accumulate=3,
            max_grad_norm=0.1,
            ema=0.5,
            example=data[0],
        )
        trainer.resume(folder)
        losses = []
        for batch in trainer.batches(data, 0):
            losses.append(trainer.step(*batch).item())
            if len(losses) == steps:
                trainer.checkpoint(folder)
                break
        return losses


def continue_under_fsdp(folder: str) -> tuple[list[float], list[float]]:
    begun = trained_on("fsdp", f"{folder}/fsdp", steps=2)
    return begun, trained_on("fsdp", f"{folder}/single")


def continue_on_one_rank(folder: str) -> list[float]:
    return trained_on("single", f"{folder}/fsdp")


def begin_on_one_rank(folder: str) -> tuple[list[float], list[float]]:
    return trained_on("single", f"{folder}/none"), trained_on("single", f"{folder}/single", steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_model_of_containers_resumes_under_another_strategy(ranks, tmp_path):
    """A parameter without elements has a state of the optimizer, too, as on one rank."""
    whole, _ = run_world(1, begin_on_one_rank, str(tmp_path))[0]
    begun, ended = run_world(ranks, continue_under_fsdp, str(tmp_path))[0]
    assert begun + ended == pytest.approx(whole, rel=1e-12)
    assert run_world(1, continue_on_one_rank, str(tmp_path))[0] == pytest.approx(
        whole[2:], rel=1e-12
    )


def keys_after_each_question() -> list[int]:
    """Ask for 20 events that no path knows. Return the number of keys in the store after each."""
    key_counts: list[int] = []
    with Runtime("cpu", timeout=TIMEOUT) as runtime:
        runtime.open_group()
        order = UnitOrder(runtime, "fsdp", [])
        for number in range(20):
            order.begin(number)
            order.event("unit")
            runtime.all_reduce(torch.zeros(1))  # the other rank has got its answer, too
            key_counts.append(runtime.store.num_keys())
    return key_counts


def test_store_does_not_grow_with_the_questions_about_the_order_of_units():
    """Each question has three keys; the next question deletes those before."""
    for keys in run_world(2, keys_after_each_question):
        assert max(keys) - min(keys) <= 2 * 3


def messages_of_different_calls() -> str:
    """Rank 0 computes the whole model once more, while the other rank's pass has ended."""
    with Runtime("cpu", timeout=TIMEOUT) as runtime:
        runtime.open_group()
        order = UnitOrder(runtime, "fsdp", Advice(["", "a"], ["a"]))
        order.begin("training")
        with pytest.raises(TrainingError) as caught:
            order.event(END if runtime.rank else WHOLE)
        return str(caught.value)


def test_ranks_that_call_the_model_differently_get_no_list_for_keep_whole():
    for message in run_world(2, messages_of_different_calls, timeout=60):
        assert "All ranks must call the model equally often and in the same mode" in message
        assert "keep_whole" not in message


def test_parameters_of_another_type_are_allowed_if_they_are_frozen_or_of_another_unit():
    inner = nn.Linear(2, 2).double()
    model = nn.Sequential(inner, nn.Linear(2, 2))
    names = {module: name for name, module in model.named_modules()}
    require_one_dtype([inner, model], names)
    both = r"0\.weight \(torch\.float64\) and 1\.weight \(torch\.float32\)"
    with pytest.raises(ConfigError, match=f"gathers {both} together"):
        require_one_dtype([model], names)
    inner.requires_grad_(False)
    require_one_dtype([model], names)
