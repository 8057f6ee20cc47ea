"""What the watchdog reports of an exception."""

import json
from types import SimpleNamespace

from ddp_lab.config.errors import SampleError
from ddp_lab.resilience.watchdog import Watchdog


def test_sample_that_cannot_be_read_is_reported_without_a_traceback(tmp_path, capsys):
    runtime = SimpleNamespace(rank=1, world_size=1)
    watchdog = Watchdog(SimpleNamespace(path=tmp_path, attempt="a"), runtime, timeout=60)
    watchdog.failed(SampleError("sample 5 cannot be read"))
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["kind"], failure["rank"]) == ("exception", 1)
    assert failure["message"].endswith("epoch 0, step 0, starting: sample 5 cannot be read")
    assert failure["message"] in capsys.readouterr().err
    assert "SampleError: sample 5" in (tmp_path / "train.rank1.log").read_text()
