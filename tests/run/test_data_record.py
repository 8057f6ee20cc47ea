"""The data of a run, compared with those of a command or launch that continues it."""

import json
from dataclasses import asdict, replace

import pytest
from configs import config
from launches import SMALL

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.datasets import Synthetic
from ddp_lab.run.checks import check_and_build
from ddp_lab.run.data_record import DataRecord, compare_data
from ddp_lab.world.runtime import Runtime

HELD_OUT = "data.val_fraction=0.1"


@pytest.mark.parametrize(
    ("record", "warning", "refusal"),
    [
        ({"digest": "2", "held_out": HELD_OUT}, None, None),
        ({"digest": "1", "held_out": HELD_OUT}, "was trained on other files or samples", None),
        (
            {"digest": "", "held_out": ""},
            "was trained with data.val_fraction=0, so its weights",
            "was trained with data.val_frac",
        ),
    ],
)
def test_other_files_are_a_warning_and_other_held_out_samples_no_resume(record, warning, refusal, tmp_path):
    dataset = replace(Synthetic(2, 2, 1, 4, 2).load(), classes=["a", "b"], digest="2", held_out=HELD_OUT)
    (tmp_path / "data.json").write_text(json.dumps({"shape": {}, "classes": ["a", "b"], "criterion": None, **record}))
    found = compare_data(tmp_path, dataset, resumes=False)
    assert found is None if warning is None else warning in found
    if refusal is None:
        assert compare_data(tmp_path, dataset, resumes=True) == found
    else:
        with pytest.raises(ConfigError, match=f"{HELD_OUT}: .* {refusal}.* Use the recorded values, or start a new run"):
            compare_data(tmp_path, dataset, resumes=True)


@pytest.mark.parametrize("resume", ["auto", "{run}/checkpoints/step_00000005.pt"])
def test_run_does_not_resume_with_other_classes_or_another_validation_set(resume, tmp_path):
    run = tmp_path / "mine"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step_00000005.pt").touch()
    record = DataRecord({}, ["0", "1", "3", "2", *"456789"], "", "", None)
    (run / "data.json").write_text(json.dumps(asdict(record)))
    cfg = config(*SMALL, "name=mine", f"runs_dir={tmp_path}", f"resume={resume.format(run=run)}")
    difference = r"number 2 of 10 was 3, in these data it is 2\. Use data with the same"
    with pytest.raises(ConfigError, match=f"{run}: was trained with other classes: {difference}"):
        check_and_build(cfg, Runtime("cpu"), lambda *_: "", lambda *_: None)
    (run / "data.json").write_text(json.dumps(asdict(replace(record, classes=[*"0123456789"], held_out=HELD_OUT))))
    with pytest.raises(ConfigError, match=f"{HELD_OUT}, and a run cannot be resumed with another validation set"):
        check_and_build(cfg, Runtime("cpu"), lambda *_: "", lambda *_: None)
