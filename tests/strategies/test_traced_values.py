"""What stages of a trace pass on: each value gets a gradient, as torch 2.11 expects."""

import torch
from torch import nn

from ddp_lab.strategies.traced_values import TracedStage, as_sent


class Select(nn.Module):
    """A stage that gets tokens, their positions and a mask, and returns the tokens."""

    def forward(self, tokens, positions, mask):
        assert positions.dtype == torch.int64
        assert mask.dtype == torch.bool
        return torch.where(mask, tokens[:, positions[0]], 0)


def test_integers_and_booleans_travel_exactly_and_get_gradients_of_zero():
    values = {
        "tokens": torch.arange(6.0).view(2, 3),
        "positions": torch.tensor([[2, 0, 1], [2, 0, 1]]),
        "mask": torch.tensor([[True, False, True], [True, True, True]]),
    }
    names = list(values)
    sent = {name: as_sent(value) for name, value in values.items()}
    assert all(value.is_floating_point() for value in sent.values())
    stage = TracedStage(
        Select(),
        sent,
        names,
        {"chosen": None},
        ["positions", "chosen"],
        values | {"chosen": values["tokens"]},
    )
    received = [value.clone().requires_grad_() for value in sent.values()]
    positions, chosen = stage(*received)
    assert positions.dtype == sent["positions"].dtype
    assert torch.equal(positions.to(torch.int64), values["positions"])
    assert chosen.tolist() == [[2, 0, 1], [5, 3, 4]]

    chosen.sum().backward()
    tokens, *others = (each.grad for each in received)
    assert tokens.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert [each.tolist() for each in others] == [[[0, 0, 0], [0, 0, 0]]] * 2


def test_largest_positions_are_exact():
    position = torch.tensor([2**53 - 1])
    assert torch.equal(as_sent(position).to(torch.int64), position)
