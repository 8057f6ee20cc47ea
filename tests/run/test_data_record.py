"""The data of a run, compared with those of a command or launch that continues it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from configs import config
from launches import SMALL

from ddp_lab.config.errors import ConfigError
from ddp_lab.data.datasets import Synthetic
from ddp_lab.run.checks import check_and_build
from ddp_lab.run.data_record import compare_data, compare_held_out
from ddp_lab.world.runtime import Runtime


def write_record(folder: Path, classes: list[str], **others: str) -> None:
    (folder / "data.json").write_text(json.dumps({"shape": {}, "classes": classes, **others}))


@pytest.mark.parametrize(
    ("record", "digest", "warning"),
    [
        ({}, "1", None),  # of a version that had no digest
        ({"digest": "1"}, "1", None),
        ({"digest": "1"}, "", None),
        ({"digest": "1"}, "2", "was trained on another list of files"),
    ],
)
def test_another_list_of_files_is_a_warning(record, digest, warning, tmp_path):
    dataset = replace(Synthetic(2, 2, 1, 4, 2).load(), classes=["a", "b"], digest=digest)
    assert compare_data(tmp_path, dataset) is None, "the run has no record"
    write_record(tmp_path, ["a", "b"], **record)
    text = compare_data(tmp_path, dataset)
    assert text is None if warning is None else warning in text


def test_held_out_samples_are_compared_also_if_the_files_are_others(tmp_path):
    dataset = replace(Synthetic(2, 2, 1, 4, 2).load(), classes=["a", "b"], digest="2", held_out="data.val_fraction=0.1")
    write_record(tmp_path, ["a", "b"], digest="1", held_out="")
    assert "has recorded no validation set" in compare_held_out(tmp_path, dataset, resumes=False)
    with pytest.raises(
        ConfigError, match=r"data.val_fraction=0.1: .* was trained with data.val_fraction=0, and a run cannot be"
    ):
        compare_held_out(tmp_path, dataset, resumes=True)
    write_record(tmp_path, ["a", "b"], digest="1")
    assert "nothing about a validation set" in compare_held_out(tmp_path, dataset, resumes=True)


@pytest.mark.parametrize("resume", ["auto", "{run}/checkpoints/step_00000005.pt"])
@pytest.mark.parametrize(
    ("classes", "difference"),
    [
        (
            ["0", "1", "3", "2", *map(str, range(4, 10))],
            r"number 2 of 10 was 3, in these data it is 2\. Use data with the same",
        ),
        ([*map(str, range(11))], r"number 10 of 11 was 10, in these data it is missing\. Use data with the same"),
    ],
)
def test_run_does_not_resume_with_other_classes(resume, classes, difference, tmp_path):
    run = tmp_path / "mine"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step_00000005.pt").touch()
    write_record(run, classes)
    cfg = config(*SMALL, "name=mine", f"runs_dir={tmp_path}", f"resume={resume.format(run=run)}")
    with pytest.raises(ConfigError, match=f"{run}: was trained with other classes: {difference}"):
        check_and_build(cfg, Runtime("cpu"), lambda cfg, job: None)
