"""train.py from the outside: the launch lines, the run directory, the user's mistakes."""

from pathlib import Path

import pytest
import torch
from launches import METRICS, SMALL, finish, launch, launch_on_terminal, only_run, read_metrics, refusal_in_world, start
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from worlds import run_world

LINES = [
    ("torchrun --nproc_per_node=4 train.py strategy=ddp", "ddp", 4, "ddp on 4 x cpu"),
    ("torchrun --standalone --nproc_per_node=2 train.py strategy=scratch", "scratch", 2, "scratch on 2 x cpu"),
    ("python train.py", "single", 1, "single on 1 x cpu"),
    ("python train.py strategy=dp", "dp", 1, "dp on the CPU: no GPU"),
    ("python train.py strategy=split", "split", 1, "conv2 fc1 fc2 on cpu"),
]


@pytest.mark.parametrize(("line", "strategy", "world_size", "said"), LINES, ids=[line for line, *_ in LINES])
def test_launch_line(line, strategy, world_size, said, tmp_path):
    code, output = launch(line, "epochs=2", f"runs_dir={tmp_path}/runs")
    assert code == 0, output
    assert output.count(said) == 1, "said once, not once per rank"
    plural = "s" * (world_size > 1)
    assert (
        f"{world_size} rank{plural}, global batch 64 = {world_size} x {64 // world_size}, 23 steps an epoch, lr 0.1" in output
    )
    assert output.splitlines()[-1].startswith("test accuracy ")
    assert "arning" not in output.replace("OMP_NUM_THREADS", ""), output
    check_run(only_run(tmp_path / "runs"), epochs=2, strategy=strategy, world_size=world_size)


def check_run(run_dir: Path, *, epochs: int, strategy: str, world_size: int) -> None:
    """The run directory holds what is promised, each thing once."""
    found = {path.name.split(".tfevents")[0] for path in run_dir.iterdir()} - {".launch"}
    assert found == {"config.yaml", "metrics.jsonl", "train.log", "events.out", "checkpoints"}
    metrics = read_metrics(run_dir)
    assert [record["epoch"] for record in metrics] == list(range(1, epochs + 1))
    for record in metrics:
        assert record.keys() == METRICS
        assert record["strategy"] == strategy
        assert record["world_size"] == world_size
        assert record["seconds"] > 0
        assert 0 <= record["test_accuracy"] <= 1
    assert OmegaConf.load(run_dir / "config.yaml").runs_dir == str(run_dir.parent)
    log = (run_dir / "train.log").read_text()
    assert log.count("global batch") == 1
    assert log.count("epoch 1:") == 1
    assert "\r" not in log, "a progress bar in the log file"
    assert len(list(run_dir.glob("checkpoints/*"))) == min(2, epochs)
    assert len(list(run_dir.glob("events*"))) == 1
    check_tensorboard(run_dir, metrics)


def check_tensorboard(run_dir: Path, metrics: list[dict]) -> None:
    events = EventAccumulator(str(run_dir), size_guidance={"images": 0}).Reload()
    tags = {f"{kind}/{part}" for kind in ("loss", "accuracy") for part in ("train", "test")}
    tags |= {"lr", "speed/samples_per_second", "speed/step_ms", "memory/peak_MiB"}
    assert set(events.Tags()["scalars"]) == tags
    assert [event.value for event in events.Scalars("accuracy/test")] == pytest.approx(
        [record["test_accuracy"] for record in metrics]
    )
    assert all(event.value > 0 for event in events.Scalars("memory/peak_MiB"))
    assert events.Tags()["images"] == ["predictions"]
    assert "config/text_summary" in events.Tags()["tensors"]
    assert "_hparams_/session_start_info" in events.summary_metadata


def test_the_default_run_learns(tmp_path):
    """What `make train` starts."""
    code, output = launch("torchrun --standalone --nproc_per_node=2 train.py strategy=ddp", f"runs_dir={tmp_path}")
    assert code == 0, output
    assert read_metrics(only_run(tmp_path))[-1]["test_accuracy"] >= 0.95


def test_launches_side_by_side_get_a_directory_each(tmp_path):
    line = "torchrun --standalone --nproc_per_node=4 train.py strategy=ddp"
    launches = [start(line, *SMALL, "epochs=3", f"runs_dir={tmp_path}/runs") for _ in range(3)]
    for process in launches:
        code, output = finish(process, timeout=240)
        assert code == 0, output
    run_dirs = list((tmp_path / "runs").iterdir())
    assert len(run_dirs) == 3
    for run_dir in run_dirs:
        check_run(run_dir, epochs=3, strategy="ddp", world_size=4)


def test_a_restart_goes_on_in_its_directory(tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 --max-restarts=1 train.py strategy=ddp"
    same = [*SMALL, "epochs=4"]
    code, output = launch(line, "strategy._target_=crash.CrashOnce", *same, f"runs_dir={tmp_path}/crashed")
    assert code == 0, output
    assert output.count("resumed from") == 1
    code, output = launch(line, *same, f"runs_dir={tmp_path}/undisturbed")
    assert code == 0, output
    crashed, undisturbed = (only_run(tmp_path / name) for name in ("crashed", "undisturbed"))
    assert [record["epoch"] for record in read_metrics(crashed)] == [1, 2, 3, 4]
    one, other = (torch.load(run / "checkpoints/epoch_0004.pt")["model"] for run in (crashed, undisturbed))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_progress_bar_on_a_terminal(tmp_path):
    written = launch_on_terminal("python train.py", *SMALL, "data.dataset.train_size=2400", "epochs=1", f"runs_dir={tmp_path}")
    assert "epoch 1/1:" in written
    assert "/100 [" in written
    assert "\r" not in (only_run(tmp_path) / "train.log").read_text()


def test_help_explains():
    code, output = launch("python train.py --help")
    assert code == 0
    for word in (
        "torchrun --nproc_per_node=4 train.py strategy=ddp",
        "data: cifar10, digits",
        "nn.DataParallel",
        "batch_size: 64",
    ):
        assert word in output


REFUSED = {  # on two ranks
    "batchsize=32": "batchsize=32: there is no such key; did you mean batch_size? allowed: seed, epochs, batch_size,",
    "strategy=ddp optimizer.speed=1": "optimizer.speed=1: there is no such key; allowed: optimizer.lr, optimizer.momentum",
    "strategy=ddp model=null": "a group cannot be null or a list",
    "strategy=magic": "strategy=magic: there is no such option; allowed: ddp, dp, scratch, single, split",
    "group=magic": "group=magic: there is no such key",
    "batch_size": "missing EQUAL",
    "batch_size=": "batch_size=: must be an integer of at least 1",
    "batch_size=many": "batch_size=many: must be an integer of at least 1",
    "batch_size=0": "batch_size=0: must be an integer of at least 1",
    "strategy=ddp batch_size=1": "batch_size=1: is the global batch and must divide by the 2 replicas that share it; use 2, or",
    "strategy=ddp batch_size=7": "use 6 or 8, or scaling=weak to give every replica 7",
    "name=${nobody}": "Interpolation key 'nobody' not found",
    "strategy=ddp device=cuda:7": "device=cuda:7: there is no such device",
    "strategy=single": "strategy=single: runs in one process, but 2 ranks were started. Start `python train.py",
    "strategy=dp": "strategy=dp: runs in one process",
    "strategy=split": "strategy=split: runs in one process",
    "strategy=ddp data=fashion_mnist data.root=RUNS/none": "or use data=digits, which needs no download",
    "strategy=ddp data.mean=[0.1,0.2]": "data.mean=[0.1, 0.2]: has 2 values",
    "strategy=ddp data=synthetic data.dataset.image_size=8": "model=lenet: needs images of at least 14x14, these are 8x8",
    "strategy=ddp runs_dir=train.py": "runs_dir=train.py: cannot make the run directory there",
    "strategy=ddp resume=none.pt": "resume=none.pt: must be auto, never or the path of an existing checkpoint",
    "-m strategy=ddp seed=1,2": "--multirun: the jobs would share one world",
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_mistake_is_one_message_and_code_2(line, tmp_path):
    words = line.replace("RUNS", str(tmp_path)) + ("" if "runs_dir" in line else f" runs_dir={tmp_path}/runs")
    first, second = run_world(2, refusal_in_world, words)
    code, printed = first
    assert code == 2, printed
    assert second == (2, ""), "said by every rank"
    assert printed.startswith("error: ")
    assert REFUSED[line] in printed
    assert printed.count("\n") == 1, printed
    assert not list(tmp_path.glob("runs/*")), "a refused run left a directory"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("python train.py batch_size=abc", "error: batch_size=abc: must be an integer of at least 1\n"),
        ("python train.py device=cuda:7", "error: device=cuda:7: there is no such device on "),
        ("python train.py epoch=3", "error: epoch=3: there is no such key; did you mean epochs? allowed: seed,"),
    ],
)
def test_python_prints_the_message_alone(line, message):
    code, output = launch(line)
    assert code == 2
    assert output.startswith(message)
    assert output.count("\n") == 1


def test_torchrun_shows_the_message_once(tmp_path):
    code, output = launch("torchrun --standalone --nproc_per_node=2 train.py strategy=split", f"runs_dir={tmp_path}")
    assert code == 1  # torchrun's, whatever its workers' are
    assert output.count("error: strategy=split: runs in one process, but 2 ranks were started") == 1
    assert "exitcode  : 2" in output
    assert "ConfigError" not in output
