"""A resume says what it changes in the config, and keeps the config of before."""

from pathlib import Path

import pytest
from launches import SMALL, main_in_world
from omegaconf import OmegaConf
from worlds import run_world

from ddp_lab.launchers.config_changes import list_changes, record_config
from ddp_lab.launchers.recorded_config import to_record

SECRET = "s3cr3t"


def train(run_dir: Path, *overrides: str, ranks: int = 1) -> list[str]:
    """Train, and return the lines of the log of this launch from that on where it resumed."""
    log = run_dir / "train.log"
    before = log.read_text() if log.exists() else ""
    where = f"runs_dir={run_dir.parent}", f"name={run_dir.name}"
    run_world(ranks, main_in_world, *SMALL, "device=cpu", *where, *overrides)
    lines = [
        line.partition(" INFO ")[2] or line
        for line in log.read_text().removeprefix(before).splitlines()
    ]
    resumed = [number for number, line in enumerate(lines) if "resumed from " in line]
    return lines[resumed[0] + 1 :] if resumed else lines


def changes(lines: list[str]) -> list[str]:
    return [line.rpartition("  ")[2].strip() for line in lines if " -> " in line]


def kept(run_dir: Path) -> list[str]:
    return sorted(path.name for path in run_dir.glob("config.*.yaml"))


def test_resume_lists_each_key_that_it_changes_and_keeps_the_config_before(tmp_path):
    run = tmp_path / "run"
    assert not changes(train(run, "epochs=1"))
    first = (run / "config.yaml").read_text()

    assert not changes(train(run, "epochs=1", f"resume={run}/checkpoints/step_00000005.pt"))
    assert kept(run) == [], "neither the key resume nor a launch without steps changes the config"

    lines = train(run, "epochs=2", "optimizer.lr=0.005", "batch_size=20", "strategy=ddp", ranks=2)
    changed = changes(lines)
    assert {
        "number of ranks: 1 -> 2",
        "epochs: 1 -> 2",
        "optimizer.lr: 0.01 -> 0.005",
        "batch_size: 24 -> 20",
        "strategy._target_: ddp_lab.strategies.single.Single -> ddp_lab.strategies.ddp.DDP",
        "strategy.bucket_cap_mb: not set -> 25",
    } <= set(changed)
    assert not [
        line for line in changed if line.startswith(("name", "runs_dir", "resume", "model", "data"))
    ]
    assert kept(run) == ["config.1.yaml"]
    assert (run / "config.1.yaml").read_text() == first
    assert f"{run}/config.1.yaml" in "\n".join(lines)
    second = (run / "config.yaml").read_text()

    assert changes(
        train(run, "epochs=3", "optimizer.lr=0.005", "batch_size=20", "strategy=ddp", ranks=2)
    ) == ["epochs: 2 -> 3"]
    assert kept(run) == ["config.1.yaml", "config.2.yaml"]
    assert (run / "config.2.yaml").read_text() == second


def test_unchanged_resume_and_another_name_list_nothing_but_what_they_change(tmp_path):
    train(tmp_path / "one", "epochs=2", "checkpoint.at_steps=[5]", "checkpoint.keep=9")
    (tmp_path / "one" / "checkpoints" / "step_00000010.pt").unlink()
    lines = train(tmp_path / "one", "epochs=2", "checkpoint.at_steps=[5]", "checkpoint.keep=9")
    assert "epoch 2: train loss" in "\n".join(lines), "it has not trained"
    assert (changes(lines), kept(tmp_path / "one")) == ([], [])

    source = tmp_path / "one" / "checkpoints" / "step_00000005.pt"
    lines = train(
        tmp_path / "two",
        "epochs=2",
        "checkpoint.at_steps=[5]",
        "checkpoint.keep=9",
        "seed=7",
        f"resume={source}",
    )
    assert changes(lines) == ["seed: 0 -> 7"]
    assert f"{tmp_path}/one/config.yaml" in "\n".join(lines), (
        "the config of before is in the other run"
    )
    assert kept(tmp_path / "two") == []


def config(**keys):
    return OmegaConf.create(
        {"seed": 0, "data": {"root": "a", "dataset": {"root": "${data.root}"}}, **keys}
    )


def test_secrets_are_not_listed_and_references_are_listed_once(tmp_path):
    options = {"wandb": {"api_key": SECRET}}
    mirror = {"mirror": f"s3://me:{SECRET}@host/a"}
    record_config(tmp_path, to_record(config(tracker_options=options, checkpoint=mirror)), 2, None)
    other = config(tracker_options={}, checkpoint={"mirror": f"s3://you:{SECRET}2@host/b"})
    other.data.root = "b"
    lines = record_config(tmp_path, to_record(other), 2, tmp_path)
    assert lines[1:] == ["data.root: a -> b", "checkpoint.mirror: s3://host/a -> s3://host/b"]


def test_launch_that_was_killed_while_it_recorded_its_config_leaves_no_second_copy(tmp_path):
    record_config(tmp_path, to_record(config()), 1, None)
    before = (tmp_path / "config.yaml").read_text()
    # kept, but the config of that launch was not written
    (tmp_path / "config.1.yaml").write_text(before)
    lines = record_config(tmp_path, to_record(config(epochs=3)), 1, tmp_path)
    assert lines[1:] == ["epochs: not set -> 3"]
    assert kept(tmp_path) == ["config.1.yaml"]
    record_config(tmp_path, to_record(config()), 1, tmp_path)
    record_config(tmp_path, to_record(config(epochs=3)), 1, tmp_path)
    assert kept(tmp_path) == ["config.1.yaml", "config.2.yaml", "config.3.yaml"]
    assert (tmp_path / "config.3.yaml").read_text() == before


@pytest.mark.parametrize("damaged", ["a: [", "- 1", "", "a: ${"])
def test_config_that_cannot_be_read_is_not_compared(damaged):
    assert list_changes(damaged, "# number of ranks: 1\nseed: 0\n") == []
