"""Where the trackers of a Lab begin: they hide what an earlier launch has written from there on."""

from unittest.mock import MagicMock

import pytest

from ddp_lab.lab import log


@pytest.mark.parametrize(
    ("rows", "start"),
    [
        ([{"step": 7}, {"step": 8}], (0, 6)),
        ([{"epoch": 3}], (3, 2)),
        ([{"epoch": 3, "step": 12}], (3, 11)),
    ],
)
def test_trackers_begin_before_the_first_row(rows, start, tmp_path, monkeypatch):
    made = MagicMock()
    monkeypatch.setattr(log, "Trackers", made)
    logger = log.LabLogger(tmp_path, "tensorboard", {}, {})
    for row in rows:
        logger.log(loss=1.0, **row)
    ((_, run), _) = made.call_args
    assert made.call_count == 1
    assert run.start == start
