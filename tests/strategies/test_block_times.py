"""strategy.balance=time: the measured times of the blocks move the cut, and a restart keeps it."""

import logging
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.strategies import block_times
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.pipeline import Pipeline
from ddp_lab.strategies.split import Split
from ddp_lab.world.runtime import Runtime


class Slow(nn.Linear):
    """A layer whose forward pass takes some milliseconds more."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not input.is_meta:
            time.sleep(0.02)
        return super().forward(input)


def chain() -> Chain:
    """Return five blocks of equal FLOPs, of which the last is the slowest."""
    layers = {f"fc{i}": nn.Linear(16, 16) for i in range(4)}
    return Chain((1, 4, 4), **{**layers, "fc0": nn.Sequential(nn.Flatten(), nn.Linear(16, 16))}, slow=Slow(16, 16))


def stages(balance: str, path: Path | None = None) -> list[str]:
    """Return the names of the blocks of two stages."""
    torch.manual_seed(0)
    strategy, model = Split(Runtime("cpu"), ["cpu", "cpu"], 2, balance), chain()
    strategy.times_file = path
    strategy.partition(model, 8)
    state = torch.get_rng_state()
    strategy.setup(model)
    assert torch.equal(torch.get_rng_state(), state), "the measurement draws from the run's random numbers"
    return [" ".join(dict(stage.named_children())) for stage in strategy.stages]


def test_slow_block_moves_the_cut():
    assert stages("flops") == ["fc0 fc1", "fc2 fc3 slow"]
    assert stages("time") == ["fc0 fc1 fc2 fc3", "slow"]


def test_restart_keeps_the_cut_and_does_not_measure(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "ddp_lab")
    path = tmp_path / "block_times.json"
    first = stages("time", path)
    monkeypatch.setattr(block_times, "time_of", None)
    assert stages("time", path) == first
    assert (
        sum("strategy.balance=time: forward and backward of a micro-batch take fc0 " in text for text in caplog.messages) == 2
    )


def test_times_of_other_work_are_measured_again(tmp_path, caplog):
    path = tmp_path / "block_times.json"
    assert block_times.known_times(path, {"model": "a"}, lambda: [1, 2]) == [1, 2]
    assert block_times.known_times(path, {"model": "a"}, lambda: [3, 4]) == [1, 2]
    assert block_times.known_times(path, {"model": "b"}, lambda: [3, 4]) == [3, 4]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert not caplog.messages


@pytest.mark.parametrize(
    "content", ["{", "{}", '{"foo": 1}', '{"embed": "x"}', "[]", '{"key": {}, "nanoseconds": ["x"]}', "\0"]
)
def test_damaged_times_are_reported_and_measured_again(content, tmp_path, caplog):
    path = tmp_path / "block_times.json"
    path.write_text(content)
    assert block_times.known_times(path, {}, lambda: [5, 6]) == [5, 6]
    (message,) = caplog.messages
    assert message.startswith(f"{path} is damaged (")
    assert message.endswith("). The blocks are measured again; the cut may differ from the one before")
    assert block_times.known_times(path, {}, lambda: [7, 8]) == [5, 6]


def test_equal_blocks_are_measured_once(monkeypatch):
    calls = iter(range(1, 9))
    monkeypatch.setattr(block_times, "time_of", lambda *args: next(calls))
    shapes = [torch.Size([1, 4, 4]), *[torch.Size([16])] * 5]
    assert block_times.block_times(chain().to("meta"), shapes, 2, Runtime("cpu"), torch.device("cpu")) == [1, 2, 2, 2, 3]


def test_balance_without_a_free_cut_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    pipeline = Pipeline(Runtime("cpu"), "gpipe", 2, None, ["fc1"], "time")
    with pytest.raises(ConfigError, match=r"strategy.balance=time: has no effect with strategy.cut=\[fc1\], which names"):
        pipeline.partition(chain(), 8)
    mesh = Mesh(Runtime("cpu"), None, 1, 1, 1, False, "gpipe", 2, None, None, "local", balance="time")
    with pytest.raises(ConfigError, match=r"strategy.balance=time: are only used if strategy.pp is above 1"):
        mesh.partition(chain(), 8)
