"""What the watchdog reports, and how often it looks for reports of others."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ddp_lab.config.errors import SampleError
from ddp_lab.resilience import failure_report
from ddp_lab.resilience.watchdog import Watchdog
from ddp_lab.world.place import Place
from ddp_lab.world.runtime import Runtime


def test_sample_that_cannot_be_read_is_reported_without_a_traceback(tmp_path, capsys):
    place = Place(rank=1)
    watchdog = Watchdog(SimpleNamespace(path=tmp_path), Runtime("cpu", place=place), 60, tmp_path).__enter__()
    watchdog.failed(SampleError("sample 5 cannot be read"))
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["kind"], failure["rank"]) == ("exception", 1)
    assert failure["message"].endswith("epoch 0, step 0, starting: sample 5 cannot be read")
    assert failure["message"] in capsys.readouterr().err
    assert "SampleError: sample 5" in (tmp_path / "train.rank1.log").read_text()


def one_sample():
    nn.BatchNorm1d(2)(torch.ones(1, 2))


def full_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1.00 GiB")


def own_mistake():
    raise ValueError("own mistake")


@pytest.mark.parametrize(
    ("fail", "end"),
    [
        (one_sample, "in the last batch of an epoch, too"),
        (full_gpu, "predicts which ones fit"),
        (own_mistake, "ValueError: own mistake"),
    ],
)
def test_errors_of_torch_that_have_a_remedy_end_with_it(fail, end, tmp_path):
    watchdog = Watchdog(SimpleNamespace(path=tmp_path), Runtime("cpu"), 60, tmp_path).__enter__()
    with pytest.raises((ValueError, torch.OutOfMemoryError)) as raised:
        fail()
    watchdog.failed(raised.value)
    message = json.loads((tmp_path / "failure.json").read_text())["message"]
    assert str(raised.value) in message
    assert message.endswith(end)


class Disk:
    """A run directory without files, which counts how often a file in it is looked for."""

    looks = 0

    def __truediv__(self, name: str) -> "Disk":
        return self

    def exists(self) -> bool:
        self.looks += 1
        return False


def test_disk_is_looked_at_ever_more_rarely_while_the_store_is_silent(tmp_path):
    watchdog = Watchdog(SimpleNamespace(path=tmp_path), Runtime("cpu"), 60, tmp_path)
    watchdog.board = SimpleNamespace(read=lambda page: None)
    watchdog.run_dir = disk = Disk()
    looks = {}
    for half_seconds in range(120):
        watchdog.nodes = SimpleNamespace(silent=half_seconds / 2, failure=None)
        watchdog._failed_elsewhere()
        looks[half_seconds / 2] = disk.looks
    assert [looks[second] for second in (2.5, 3, 5.5, 6, 11.5, 12, 59.5)] == [0, 1, 1, 2, 2, 3, 5]
    watchdog.nodes = SimpleNamespace(silent=0.0, failure=None)
    watchdog._failed_elsewhere()
    watchdog.nodes = SimpleNamespace(silent=3.0, failure=None)
    watchdog._failed_elsewhere()
    assert disk.looks == 6, "it begins again after an answer of the store"


def test_first_failure_is_reported_on_volumes_without_hard_links(tmp_path, monkeypatch, capsys):
    def refuse(*names):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    who = {"rank": 1, "epoch": 1, "step": 2, "since": 0.0}
    others = failure_report.Others([], None)
    reports = [failure_report.report(tmp_path, 0, who, "exception", text, others) for text in ("first", "second")]
    assert reports == [True, False]
    assert json.loads((tmp_path / "failure.json").read_text())["message"] == "first"
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["failure.json", "status.json"]
    assert "second" not in capsys.readouterr().err
