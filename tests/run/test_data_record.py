"""The data of a run, compared with those of a command or launch that continues it."""

import importlib
import json
from dataclasses import asdict, replace

import pytest
from configs import config
from launches import SMALL

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.datasets import Synthetic
from ddp_lab.run.build import prepare
from ddp_lab.run.data_record import DataRecord, code_of, compare_data
from ddp_lab.world.runtime import Runtime

HELD_OUT = "data.val_fraction=0.1"


def test_other_files_are_a_warning(tmp_path):
    dataset = replace(
        Synthetic(2, 2, 1, 4, 2).load(), classes=["a", "b"], digest="2", held_out=HELD_OUT
    )
    record = DataRecord({}, ["a", "b"], "1", HELD_OUT, None)
    (tmp_path / "data.json").write_text(json.dumps(asdict(record)))
    difference = compare_data(tmp_path, dataset, resumes=True)
    assert difference == compare_data(tmp_path, dataset, resumes=False)
    assert "was trained on other files or samples" in difference
    for same_or_none in ("1", ""):
        assert compare_data(tmp_path, replace(dataset, digest=same_or_none), resumes=True) is None


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
        prepare(cfg, Runtime("cpu"))
    (run / "data.json").write_text(
        json.dumps(asdict(replace(record, classes=[*"0123456789"], held_out=HELD_OUT)))
    )
    with pytest.raises(
        ConfigError,
        match=f"{HELD_OUT}, and a run cannot be resumed with another validation set. Use the "
        "recorded values, or start",
    ):
        prepare(cfg, Runtime("cpu"))


def test_code_of_modules_that_a_config_names_is_hashed(tmp_path, monkeypatch):
    (tmp_path / "hashed_net.py").write_text("def make():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("hashed_net")
    config = "model:\n  _target_: hashed_net.make\noptimizer:\n  _target_: torch.optim.SGD\n"
    first = code_of(config)
    assert [*first] == ["hashed_net"]
    (tmp_path / "hashed_net.py").write_text("def make():\n    return 2\n")
    assert code_of(config) != first
    assert code_of("callbacks:\n- hashed_net.make\n") == code_of(config)
    assert code_of("model:\n  _target_: ddp_lab.models.lenet.lenet\n") == {}
