"""Who follows the messages about strategy.keep_whole arrives at a run that equals `single`."""

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.config.errors import TrainingError
from ddp_lab.strategies.unit_advice import Advice

WIDTH = 4
ROUNDS = 3
TIMEOUT = 6.0
ADAM = partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, eps=1e-4)
OPTION = re.compile(r"use strategy\.keep_whole=\[(.*?)\], in a Lab keep_whole=\[(.*?)\]")


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def chosen_by(inputs: torch.Tensor, parts: int) -> torch.Tensor:
    """Return which part each row has chosen.

    Those of rank 0 of two choose the first half, those of rank 1 the others.
    """
    return (inputs[:, 0] * 10).long() % parts


def only(rows: torch.Tensor, part: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Return the hidden values after a part for some rows, not called if there are none."""
    return torch.where(rows[:, None], part(hidden), hidden) if rows.any() else hidden


class Layer(nn.Module):
    """A layer of a mixture of experts: units within a unit."""

    def __init__(self):
        super().__init__()
        self.entry = linear()
        self.experts = nn.ModuleList([nn.Sequential(linear(), nn.Tanh()) for _ in range(4)])

    def forward(self, hidden, chosen):
        hidden = torch.tanh(self.entry(hidden))
        for number, expert in enumerate(self.experts):
            hidden = only(chosen == number, expert, hidden)
        return hidden


class Experts(nn.Module):
    """Several layers, of which a step uses other experts on each rank."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.out = linear()

    def forward(self, inputs):
        hidden = inputs
        for shift, layer in enumerate(self.layers):
            hidden = layer(hidden, (chosen_by(inputs, 4) + shift) % 4)
        return self.out(hidden)


class Adapted(nn.Module):
    """Units after an adapter at the input, without which their inputs need no gradient."""

    def __init__(self):
        super().__init__()
        self.adapter = linear()
        self.left = linear()
        self.right = linear()
        self.out = linear()

    def forward(self, inputs):
        hidden = only(chosen_by(inputs, 2) == 1, self.adapter, inputs)
        return self.out(torch.tanh(self.left(hidden) + self.right(hidden)))


class AdaptedHead(nn.Module):
    """An adapter at the input, before the only other unit."""

    def __init__(self):
        super().__init__()
        self.adapter = linear()
        self.out = linear()

    def forward(self, inputs):
        return self.out(only(chosen_by(inputs, 2) == 1, self.adapter, inputs))


class Nested(nn.Module):
    """A unit with units within it, which steps leave out on some ranks."""

    def __init__(self):
        super().__init__()
        self.entry = linear()
        self.block = Layer()
        self.out = linear()

    def forward(self, inputs):
        hidden = torch.tanh(self.entry(inputs))
        chosen = chosen_by(inputs, 4)
        rows = chosen > 0
        experts = torch.where(rows, chosen, -1)  # the other rows use none
        return self.out(only(rows, partial(self.block, chosen=experts), hidden))


class Head(nn.Module):
    """A last layer that only some samples use."""

    def __init__(self):
        super().__init__()
        self.body = linear()
        self.head = linear()

    def forward(self, inputs):
        return only(chosen_by(inputs, 2) == 1, self.head, torch.tanh(self.body(inputs)))


class Late(nn.Module):
    """The same, and from the third step on only."""

    def __init__(self):
        super().__init__()
        self.body = linear()
        self.head = linear()
        self.steps = 0

    def forward(self, inputs):
        self.steps += 1
        rows = (chosen_by(inputs, 2) == 1) & (self.steps > 2)
        return only(rows, self.head, torch.tanh(self.body(inputs)))


class Named(nn.Module):
    """Alternatives that are no list."""

    def __init__(self):
        super().__init__()
        self.entry, self.first, self.second, self.third, self.fourth, self.out = (
            linear() for _ in range(6)
        )

    def forward(self, inputs):
        chosen = chosen_by(inputs, 4)
        hidden = torch.tanh(self.entry(inputs))
        for number, part in enumerate([self.first, self.second, self.third, self.fourth]):
            hidden = only(chosen == number, part, hidden)
        return self.out(hidden)


class Unused(nn.Module):
    """Units that all ranks call, of which some outputs are not used."""

    def __init__(self):
        super().__init__()
        self.body, self.branch, self.other, self.out = (linear() for _ in range(4))

    def forward(self, inputs):
        rows = chosen_by(inputs, 2) == 1
        hidden = torch.tanh(self.body(inputs))
        branch = self.other(self.branch(hidden))
        return self.out(torch.where(rows[:, None], branch, hidden) if rows.any() else hidden)


class Direct(nn.Module):
    """Weights that are used without the forward pass of their layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third, self.out = (linear() for _ in range(4))

    def forward(self, inputs):
        hidden = torch.tanh(F.linear(self.first(inputs), self.first.weight.t()))
        return self.out(F.linear(self.third(hidden), self.second.weight) + self.second.bias)


class DirectByValue(Direct):
    """The same, where a value decides, so that it cannot run on the meta device."""

    def forward(self, inputs):
        return super().forward(inputs if inputs.mean() > -9 else -inputs)


class InTurn(nn.Sequential):
    """A model whose parts have numbers for names, and of which some ranks leave out one."""

    def __init__(self):
        super().__init__(linear(), linear(), linear())

    def forward(self, inputs):
        return self[2](only(chosen_by(inputs, 2) == 1, self[1], torch.tanh(self[0](inputs))))


MODELS = [
    Experts,
    Adapted,
    AdaptedHead,
    Nested,
    Head,
    Late,
    Named,
    Unused,
    Direct,
    DirectByValue,
    InTurn,
]
# What the messages recommend, one after another.
RECOMMENDED = {
    "Experts": ["layers.*.experts.*"],
    "Adapted": ["adapter", "adapter,left,right"],
    "AdaptedHead": ["adapter", "adapter,out"],
    "Nested": ["block,block.experts.*"],
    "Head": ["head"],
    "Late": ["head"],
    "Named": ["first", "first,second,third,fourth"],
    "Unused": ["branch,other"],
    "Direct": ["first,second"],
    "DirectByValue": ["first,second,third,out"],
    "InTurn": ["1"],
}


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.rand(32, WIDTH, generator=generator)
    position = torch.arange(32)
    # the rank, and every second batch 2 more
    inputs[:, 0] = (position % 2 + 2 * (position // 8 % 2)) / 10 + 0.05
    return TensorDataset(inputs, torch.rand(32, WIDTH, generator=generator))


def train(kind: type[nn.Module], strategy: str, **options) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the message with which training ends, "" if it does not, and the weights."""
    torch.set_default_dtype(torch.float64)
    data = TensorDataset(*(tensor.double() for tensor in samples().tensors))
    with Lab(strategy, device="cpu", timeout=TIMEOUT, **options) as lab:
        trainer = lab.trainer(kind(), tasks.Regression(), ADAM, batch_size=8)
        try:
            for batch in trainer.batches(data, 0, shuffle=False):
                trainer.step(*batch)
        except TrainingError as error:
            return str(error), {}
        except RuntimeError:  # of gloo: this rank waits for another one, which has ended
            return "", {}
        full, _ = gather_full_state(trainer.strategy, trainer.state.weights())
        return "", full


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_following_the_messages_ends_in_a_run_that_equals_single(kind):
    _, expected = run_world(1, train, kind, "single")[0]
    keep_whole: list[str] = []
    recommended: list[str] = []
    for _ in range(ROUNDS):
        run = partial(train, kind, "fsdp", keep_whole=keep_whole)
        ranks = run_world(2, run, timeout=60)
        message = next((message for message, _ in ranks if message), "")
        if not message:
            break
        option = OPTION.search(message)
        assert option, message
        keep_whole = [name.strip('"') for name in option[2].split(", ")]
        assert option[1] == ",".join(keep_whole)
        recommended.append(option[1])
    assert recommended == RECOMMENDED[kind.__name__]
    assert not message
    _, weights = ranks[0]
    for name, tensor in expected.items():
        assert (weights[name] - tensor).abs().max() < 1e-12, name


def test_recommended_list_begins_with_what_is_given():
    advice = Advice(["", "a", "b", "c.0", "c.1"], ["a", "b", "c.0", "c.1"], ["b"])
    assert advice.keep(["a"]) == 'strategy.keep_whole=[b,a], in a Lab keep_whole=["b", "a"]'
    assert advice.keep_alike(["c.0"]).startswith("strategy.keep_whole=[b,c.*],")
