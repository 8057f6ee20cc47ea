"""What the watchdog reports of an exception."""

import json
from types import SimpleNamespace

from ddp_lab.config.errors import SampleError
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
