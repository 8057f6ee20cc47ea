"""Each file that a run writes has, after a preemption and a resume, the same content."""

import json
import logging
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import yaml
from empty_pictures import drawn
from launches import ROOT, SMALL, main_in_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import run_world

from ddp_lab.checkpoints.files import best_in, find_damage, steps_in
from ddp_lab.checkpoints.find import open_checkpoint
from ddp_lab.observe.log import LOG_FILES, log, setup_logging
from ddp_lab.observe.logger import FileLogger
from ddp_lab.observe.metrics_file import read_rows
from ddp_lab.observe.trackers.background import Trackers
from ddp_lab.observe.trackers.base import TrackedRun
from ddp_lab.run.data_record import LATER

LINE = (
    *SMALL,
    "strategy=ddp",
    "data.val_fraction=0.2",
    "batch_size=8",
    "epochs=5",
    "log_every=2",
    "profile=true",
)
PREEMPTED = "inject=sigterm@rank=1,step=3"
STEPS = 50
PER_EPOCH = 10
EARLIER = "error: rank 1 was killed"  # the failure of a launch before the last one
OF_TIME = {
    "samples_per_second",
    "data_wait",
    "peak_memory_MiB",
    "eta",
    "eta_epoch",
    "mfu",
    "seconds",
}
MEASURED_SECONDS = ("seconds", "trained")  # in the position of a checkpoint
# tags of values that differ from run to run
MEASURED = "speed/|memory/|step/(samples|data_wait|peak|eta|mfu)"
# Files that other tests look at after a resume, by test.
ELSEWHERE = {
    "wandb/*": "tests/observe/test_trackers.py",
    "mlflow.db": "tests/observe/test_trackers.py",
    "mlartifacts/*": "tests/observe/test_trackers.py",
    "tracker.NAME.json": "tests/observe/test_trackers.py",
    "config.2.yaml": "tests/run/test_config_changes.py",
    "stacks/": "tests/run/test_watch.py",
}


def preempted_main(*overrides: str) -> object:
    """Run train.py on this rank, and return its exit code."""
    try:
        main_in_world(*overrides)
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """Return the directory of a run of one launch."""
    folder = tmp_path_factory.mktemp("straight")
    run_world(2, main_in_world, *LINE, f"runs_dir={folder}", "name=mine")
    return folder / "mine"


@pytest.fixture(scope="module")
def resumed(tmp_path_factory) -> Path:
    """Return the directory of a run that was preempted, failed at its start, and was resumed."""
    folder = tmp_path_factory.mktemp("resumed")
    where = f"runs_dir={folder}", "name=mine"
    assert run_world(2, preempted_main, *LINE, PREEMPTED, *where) == [75, 75]
    run_dir = folder / "mine"
    status = json.loads((run_dir / "status.json").read_text())
    assert status["status"] == "preempted"
    assert 0 < status["step"] <= STEPS - 20, "the rest is long enough for a profile"
    assert (run_dir / ".injected").exists()
    (run_dir / "failure.json").write_text(json.dumps({"message": EARLIER}))
    (run_dir / "environment.json").write_text("{}")  # as on another machine, with other versions
    data = json.loads((run_dir / "data.json").read_text())
    earlier = {name: value for name, value in data.items() if name not in LATER}
    (run_dir / "data.json").write_text(json.dumps(earlier))  # as of an earlier version
    (run_dir / "checkpoints" / "step_99999999.tmp").write_bytes(b"part of a checkpoint")
    for folder in ("step_8", "step_8.1", "step_9"):  # of this launch, and of one before it
        (run_dir / "flight_recorder" / folder).mkdir(parents=True)
        (run_dir / "flight_recorder" / folder / "rank_7").write_text(folder)
    run_world(2, main_in_world, *LINE, "timeout=99", *where)
    return run_dir


def check_config(resumed: Path, straight: Path) -> None:
    first, rest = (resumed / "config.yaml").read_text().split("\n", 1)
    assert first == "# number of ranks: 2"
    expected = yaml.safe_load((straight / "config.yaml").read_text())
    changed = {"timeout": 99, "runs_dir": str(resumed.parent)}
    assert yaml.safe_load(rest) == expected | changed


def check_config_before(resumed: Path, straight: Path) -> None:
    expected = yaml.safe_load((straight / "config.yaml").read_text())
    changed = {"inject": PREEMPTED.removeprefix("inject="), "runs_dir": str(resumed.parent)}
    actual = yaml.safe_load((resumed / "config.1.yaml").read_text())
    assert actual.keys() == expected.keys()
    assert {key: actual[key] for key in actual if key != "inject"} == {
        key: (expected | changed)[key] for key in actual if key != "inject"
    }
    assert "sigterm" in str(actual["inject"])


def check_data(resumed: Path, straight: Path) -> None:
    """It is that of the last launch."""
    assert (resumed / "data.json").read_text() == (straight / "data.json").read_text()


def check_environment(resumed: Path, straight: Path) -> None:
    """It is that of the last launch."""
    actual, expected = (
        json.loads((folder / "environment.json").read_text()) for folder in (resumed, straight)
    )
    assert actual.keys() == expected.keys()
    assert (actual["versions"], actual["model"]) == (expected["versions"], expected["model"])


def check_log(resumed: Path, straight: Path) -> None:
    text = (resumed / "train.log").read_text()
    epochs = [int(number) for number in re.findall(r" INFO epoch (\d+): train loss", text)]
    assert epochs == [1, 2, 3, 4, 5], "of each epoch one line"
    lines = [
        "preempted at epoch ",
        f"started again after {EARLIER}",
        "resumed from ",
        "result: epoch ",
    ]
    places = [text.index(line) for line in lines]
    assert places == sorted(places)
    assert all(text.count(line) == 1 for line in lines)
    assert "timeout: " in text


def check_metrics(resumed: Path, straight: Path) -> None:
    actual, expected = (
        [
            {key: value for key, value in row.items() if key not in OF_TIME}
            for row in read_rows(folder / "metrics.jsonl")
        ]
        for folder in (resumed, straight)
    )
    assert [row["step"] for row in actual if row["kind"] == "step"] == list(range(2, STEPS + 1, 2))
    assert actual == expected


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return steps and values of each tag in TensorBoard's files of a folder."""
    events = EventAccumulator(str(folder)).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not re.match(MEASURED, tag)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def check_events(resumed: Path, straight: Path) -> None:
    actual = scalars(resumed)
    expected = scalars(straight)
    assert {"loss/train", "loss/val", "accuracy/test"} <= actual.keys()
    assert actual == expected


def check_step_events(resumed: Path, straight: Path) -> None:
    assert scalars(resumed / "steps") == scalars(straight / "steps") != {}


def check_picture(resumed: Path, straight: Path) -> None:
    """The worlds of the tests draw nothing; what is drawn, another test below compares."""


def check_checkpoints(resumed: Path, straight: Path) -> None:
    folders = resumed / "checkpoints", straight / "checkpoints"
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert all(find_damage(path) is None for path in steps_in(folders[0]))
    assert len({best_in(folder).resolve().name for folder in folders}) == 1
    for name in (path.name for path in steps_in(folders[0])):
        actual, expected = (open_checkpoint(folder / name) for folder in folders)
        assert actual.tensors.keys() == expected.tensors.keys()
        assert all(
            torch.equal(actual.tensors[key], expected.tensors[key]) for key in actual.tensors
        )
        progress = [
            {
                key: value
                for key, value in each.state["progress"].items()
                if key not in MEASURED_SECONDS
            }
            for each in (actual, expected)
        ]
        assert progress[0] == progress[1]
        assert actual.state["scheduler"] == expected.state["scheduler"]


def check_status(resumed: Path, straight: Path) -> None:
    actual, expected = (
        json.loads((folder / "status.json").read_text()) for folder in (resumed, straight)
    )
    assert actual.keys() == expected.keys(), "no heartbeats of a launch that has ended"
    assert (actual["status"], actual["epoch"], actual["step"]) == ("finished", 5, STEPS)
    assert actual["time"] >= (resumed / "train.log").read_text()[:19]


def check_launch(resumed: Path, straight: Path) -> None:
    assert (resumed / ".launch").read_text() != (straight / ".launch").read_text()


def check_lock(resumed: Path, straight: Path) -> None:
    """It names the process of the last launch only."""
    assert re.fullmatch(r"pid \d+ on \S+ since [\d-]+ [\d:]+", (resumed / ".lock").read_text())


def check_injected(resumed: Path, straight: Path) -> None:
    assert (resumed / ".injected").read_text().count("sigterm") == 1


def check_profile(resumed: Path, straight: Path) -> None:
    """It is that of the last launch, complete."""
    names = [
        {path.name for path in (folder / "profile").iterdir()} for folder in (resumed, straight)
    ]
    assert names[0] == names[1]
    actual, expected = (
        json.loads((folder / "profile" / "summary.json").read_text())
        for folder in (resumed, straight)
    )
    assert actual.keys() == expected.keys()
    assert (resumed / "profile").stat().st_mtime > (resumed / "config.1.yaml").stat().st_mtime


def check_flight_recorder(resumed: Path, straight: Path) -> None:
    """A hang at the same step must not mix with those of other ranks, which may be fewer."""
    dumps = {
        str(path.relative_to(resumed / "flight_recorder")): path.read_text()
        for path in (resumed / "flight_recorder").glob("*/*")
    }
    assert dumps == {
        "step_8.1/rank_7": "step_8.1",
        "step_8.2/rank_7": "step_8",
        "step_9.1/rank_7": "step_9",
    }


CHECKS: dict[str, Callable[[Path, Path], None]] = {
    "config.yaml": check_config,
    "config.1.yaml": check_config_before,
    "data.json": check_data,
    "environment.json": check_environment,
    "train.log": check_log,
    "metrics.jsonl": check_metrics,
    "events.out.tfevents.*": check_events,
    "steps/*": check_step_events,
    "curves.png": check_picture,
    "confusion.png": check_picture,
    "checkpoints/*": check_checkpoints,
    "status.json": check_status,
    ".launch": check_launch,
    ".lock": check_lock,
    ".injected": check_injected,
    "profile/*": check_profile,
    "flight_recorder/*": check_flight_recorder,
}


@pytest.mark.parametrize("file", CHECKS)
def test_file_is_after_a_resume_as_without_an_interruption(file, resumed, straight):
    CHECKS[file](resumed, straight)


def test_failure_of_an_earlier_launch_is_removed(resumed):
    assert not (resumed / "failure.json").exists()


def test_every_file_of_a_run_has_a_check(resumed):
    files = [str(path.relative_to(resumed)) for path in resumed.rglob("*") if path.is_file()]
    assert [name for name in files if not any(fnmatch(name, each) for each in CHECKS)] == []
    unused = [each for each in CHECKS if not any(fnmatch(name, each) for name in files)]
    assert unused == []


def test_every_file_in_the_manual_has_a_check_or_a_test():
    manual = (ROOT / "docs" / "running.md").read_text()
    table = manual.partition("| file | content |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if row.startswith("| ")]
    named = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(named) > 10
    here = {*CHECKS, *ELSEWHERE, "failure.json", "train.rank<N>.log"}
    assert [name for name in named if name not in here and f"{name}*" not in here] == []
    assert all((ROOT / test).exists() for test in ELSEWHERE.values())


def record(run_dir: Path, launches: list[list[int]]) -> None:
    """Record epochs and confusion matrices, some per launch; all but the last are preempted."""
    run_dir.mkdir(parents=True)
    for number, epochs in enumerate(launches, 1):
        start = epochs[0], PER_EPOCH * (epochs[0] - 1)
        trackers = Trackers({}, TrackedRun(run_dir, "", {}, {}, start))
        logger = FileLogger(run_dir, start, {"world_size": 2}, trackers, classes=["cat", "dog"])
        for epoch in epochs:
            losses = {"train_loss": 2.0 / epoch, "val_loss": 3.0 / epoch, "lr": 0.1}
            logger.epoch(
                epoch, step=PER_EPOCH * epoch, seconds=1.0, samples_per_second=9.0, **losses
            )
            logger.confusion(epoch, torch.tensor([[epoch, 1], [2, 7]]))
        logger.close("finished" if number == len(launches) else "preempted", {})


@pytest.mark.parametrize(
    "picture", ["curves.png", pytest.param("confusion.png", marks=pytest.mark.slow)]
)
def test_picture_of_a_resumed_run_has_all_epochs_and_the_last_evaluation(picture, tmp_path):
    with drawn():
        record(tmp_path / "resumed" / "mine", [[1, 2], [2, 3]])
        record(tmp_path / "straight" / "mine", [[1, 2, 3]])
        record(tmp_path / "shorter" / "mine", [[1, 2]])
    pictures = {
        name: (tmp_path / name / "mine" / picture).read_bytes()
        for name in ("resumed", "straight", "shorter")
    }
    assert pictures["resumed"] == pictures["straight"] != pictures["shorter"]


def warn_twice(folder: Path) -> list[str]:
    """Warn in two launches of each of some ranks; return the names of the log files."""
    for launch in (1, 2):
        for rank in (0, 1, LOG_FILES - 1, LOG_FILES):
            setup_logging(folder, rank)
            log.info(f"information {launch}")
            log.warning(f"warning {launch}")
    logging.shutdown()
    return sorted(path.name for path in folder.iterdir())


def test_warnings_of_other_ranks_are_appended_by_a_resume(tmp_path):
    ((first, *others),) = run_world(1, warn_twice, tmp_path)
    assert (first, others) == ("train.log", ["train.rank1.log", "train.rank7.log"])
    lines = (tmp_path / "train.rank1.log").read_text().splitlines()
    assert [line.partition(" WARNING ")[2] for line in lines] == [
        "[rank 1] warning 1",
        "[rank 1] warning 2",
    ]
    assert (tmp_path / "train.log").read_text().count("information 1") == 1
