"""Stochastic depth, `model.drop_path`.

tests/strategies/test_equivalence.py compares the strategies.
"""

import pytest
import torch

from ddp_lab.models.drop_path import DropPath, drop_paths_of
from ddp_lab.models.vit import vit

SIZES = {"width": 16, "heads": 4, "mlp_ratio": 2.0, "patch_size": 7, "pool": "mean"}


def model(drop_path: float, depth: int = 3):
    torch.manual_seed(0)
    made = vit(1, 28, 10, depth=depth, drop_path=drop_path, **SIZES)
    torch.nn.init.normal_(made.head.linear.weight)
    return made


def test_rates_grow_linearly_from_zero():
    rates = {
        name: layer.rate
        for name, layer in model(0.4, depth=5).named_modules()
        if isinstance(layer, DropPath)
    }
    assert rates == pytest.approx(
        {
            f"block{i}.drop{k}": rate
            for i, rate in enumerate([0, 0.1, 0.2, 0.3, 0.4])
            if i
            for k in (1, 2)
        }
    )
    assert not any(isinstance(layer, DropPath) for layer in model(0.0).modules())


def test_drops_have_their_rate_and_differ_by_step_and_name():
    first = DropPath(0.3, "block1.drop1")
    second = DropPath(0.3, "block1.drop2")
    drawn = [first.draw(7, step) for step in range(2000)]
    assert set(drawn) == {0.0, 1 / 0.7}
    assert drawn.count(0.0) / 2000 == pytest.approx(0.3, abs=0.03)
    assert sum(drawn) / 2000 == pytest.approx(1, abs=0.05)
    for other in (
        [second.draw(7, step) for step in range(2000)],
        [first.draw(8, step) for step in range(2000)],
    ):
        assert sum(one != two for one, two in zip(drawn, other, strict=True)) == pytest.approx(
            2000 * 2 * 0.3 * 0.7, rel=0.1
        )
    assert drawn[5] == first.draw(7, 5), "a resumed run draws something else"


@torch.no_grad()
def test_dropped_branches_add_nothing_and_the_others_are_scaled():
    net = model(0.5, depth=2)
    images = torch.randn(2, 1, 28, 28)
    tokens = net.block0(net.embed(images))
    branches = drop_paths_of(net.modules())
    seen = set()
    for step in range(20):
        for branch in branches:
            branch.prepare(1, step)
        scales = [layer.draw(1, step) for layer in (net.block1.drop1, net.block1.drop2)]
        seen.add(tuple(scales))
        expected = tokens + scales[0] * net.block1.attn(net.block1.norm1(tokens))
        mlp = net.block1.fc2(torch.nn.functional.gelu(net.block1.fc1(net.block1.norm2(expected))))
        torch.testing.assert_close(net.train()(images), net.head(expected + scales[1] * mlp))
    assert len(seen) == 4, "some combination of the two branches never occurred"
    assert not torch.equal(net.eval()(images), net.train()(images))
    torch.testing.assert_close(net.eval()(images), model(0.0, depth=2)(images))
