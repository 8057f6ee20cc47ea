"""train.py as users start it: launch lines, run directory, error messages."""

import os
import re
from pathlib import Path

import pytest
from launches import (
    NARROW,
    SMALL,
    launch,
    launch_on_terminal,
    main_in_world,
    only_run,
    read_metrics,
    refusal_in_world,
)
from run_checks import check_run
from slow_rows import slow_but
from small_digits import ALL_DIGITS
from worlds import once, run_world

LINES = [  # command, strategy, ranks, an excerpt of the log
    ("torchrun --nproc_per_node=2 train.py strategy=ddp", "ddp", 2, "ddp on 2 x cpu"),
    ("python train.py", "single", 1, "single on 1 x cpu"),
    ("python -m ddp_lab train --nproc 2 strategy=fsdp", "fsdp", 2, "fsdp on 2 x cpu"),
]


@pytest.mark.parametrize(
    ("line", "strategy", "world_size", "logged"),
    slow_but(LINES[:2], LINES),
    ids=[line[1] for line in LINES],
)
def test_launch_line_trains_and_logs_its_layout(
    line, strategy, world_size, logged, tmp_path, monkeypatch
):
    monkeypatch.setenv(ALL_DIGITS, "1")
    code, output = launch(line, "epochs=1", f"runs_dir={tmp_path}/runs")
    assert code == 0, output
    assert output.count(logged) == 1, "it must be logged once, not once per rank"
    plural = "s" if world_size > 1 else ""
    batch = (
        f"{world_size} rank{plural}, global batch 64 = {world_size} x {64 // world_size}, 23 steps "
        "an epoch, lr 0.1"
    )
    assert batch in output
    assert output.splitlines()[-1].startswith("result: epoch 1 (last), test loss ")
    assert "arning" not in output.replace("OMP_NUM_THREADS", ""), output
    check_run(only_run(tmp_path / "runs"), epochs=1, strategy=strategy, world_size=world_size)
    assert read_metrics(only_run(tmp_path / "runs"))[0]["test_accuracy"] > 0.5


BUBBLE = (
    "1f1b, 8 micro-batches, expected bubble of equally busy ranks (p-1)/(m+p-1) = 11% of the time, "
    "p=2"
)
LAYOUTS = {  # ranks, and by overrides besides SMALL excerpts of the log
    1: {
        "strategy=dp": ["dp on the CPU: no GPU"],
        "strategy=split model=lenet": ["conv2 fc1 fc2 on cpu"],
    },
    2: {
        "strategy=tp model=lenet": [
            "tp on 2 x cpu: dp 1 x tp 2; the model has no plan, so 4 layers are sharded"
        ],
        f"strategy=pipeline {' '.join(NARROW)}": [
            "pipeline: stem layer1 on pp rank 0 (60% of the FLOPs), layer2 head on pp rank 1 (40% "
            "of the FLOPs), balance 83% (mean rank / busiest)",
            BUBBLE,
            "BatchNorm normalises at most 3 samples of a global batch of 24 together, because of "
            "strategy.num_microbatches=8: losses differ from those of one device",
        ],
        f"strategy=ddp {' '.join(NARROW)}": [
            "BatchNorm normalises at most 12 samples of a global batch of 24 together, because of "
            "strategy=ddp on 2 replicas: losses differ from those of one device",
        ],
    },
    4: {
        "strategy=ddp_pipeline": [BUBBLE, "4 ranks, global batch 24 = 2 x 12, 5 steps an epoch"],
        "strategy=mesh strategy.pp=2 strategy.tp=2 strategy.num_microbatches=2 "
        "strategy.schedule=interleaved1f1b model=vit model.depth=4 model.width=16 model.heads=2": [
            "pp 2 x dp 1 x tp 2, dp = replicate 1 x shard 1\n  pp 0  ranks 0 to 1  embed .. block0 "
            "and block2\n  pp 1  ranks 2 to 3  block1 and block3 .. head\n"
        ],
    },
}


def train_each(lines: list[str], folder: Path) -> None:
    for i, line in enumerate(lines):
        main_in_world(*SMALL, *line.split(), "epochs=1", f"runs_dir={folder}", f"name=run{i}")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_layout_of_a_strategy_is_logged_once(ranks, tmp_path):
    run_world(ranks, train_each, list(LAYOUTS[ranks]), tmp_path)
    for i, excerpts in enumerate(LAYOUTS[ranks].values()):
        written = (tmp_path / f"run{i}" / "train.log").read_text()
        assert [written.count(excerpt) for excerpt in excerpts] == [1] * len(excerpts), written


def test_progress_bar_is_shown_on_a_terminal_and_not_in_the_log(tmp_path):
    more = ["data.dataset.train_size=2400", "epochs=1", "log_every=0.05s"]
    written = launch_on_terminal("python train.py", *SMALL, *more, f"runs_dir={tmp_path}")
    assert "epoch 1/1:" in written
    assert "/100 [" in written
    assert re.search(
        r"<\d\d:\d\d, loss \d\.\d{4}, accuracy [01]\.\d{4}, lr 0\.\d+, [\d,]+ samples/s", written
    ), written[-500:]
    log = (only_run(tmp_path) / "train.log").read_text()
    assert "\r" not in log
    assert "samples/s, " not in log


OWN = "model=own model._target_=own_models."
REJECTED = {  # overrides on two ranks: an excerpt of the message
    "batchsize=32": "batchsize=32: there is no such key; did you mean batch_size? allowed: seed, "
    "epochs, max_steps,",
    "strategy=ddp optimizer.speed=1": "optimizer.speed=1: there is no such key; did you mean "
    "optimizer.fused? allowed: optimizer.lr, optimizer.momentum",
    "strategy=ddp tracker_options.mlflow.url=a": "tracker_options.mlflow.url=a: there is no such "
    "key; allowed: tracker_options.mlflow.exp",
    "strategy=ddp log_every=0": "log_every=0: must be a number of steps, as 100, or of seconds, as "
    "10s, or off or null",
    "strategy=ddp model=null": "a group cannot be null or a list",
    "strategy=magic": "strategy=magic: there is no such option; allowed: ddp, ddp_pipeline, dp, "
    "fsdp,",
    "batch_size": "batch_size: overrides look like key=value",
    "strategy=ddp batch_size=1": "batch_size=1: is the global batch and must be divisible by the 2 "
    "replicas that share it; use 2, or",
    "strategy=ddp batch_size=7": "use 6 or 8, or scaling=weak to give every replica 7",
    "name=${nobody}": "Interpolation key 'nobody' not found",
    "strategy=ddp device=cuda:7": "device=cuda:7: there is no such device",
    "strategy=single": "strategy=single: runs in one process, and not on 2 ranks. Start "
    "`ddp-lab train strategy=single`",
    "strategy=ddp_pipeline strategy.pp=3": "strategy.pp=3: cannot lay 2 ranks on a mesh of dp x "
    "pp, because 2 is not divisible by 3; use 1 or 2, or "
    "start a multiple of 3 ranks",
    f"{OWN}one_weight strategy=mesh strategy.pp=2 strategy.schedule=interleaved1f1b "
    "strategy.cut=['2','3','4']": "strategy=mesh: 4.weight is the same parameter as 2.weight, "
    "which is in another stage of the same rank",
    f"{OWN}Plain strategy=mesh strategy.tp=2": "strategy.tp=2: Plain is no Chain of blocks with a "
    "plan for tensor parallelism, and has no plan of its own. Name the layers to divide, ",
    f"{OWN}Plain strategy=mesh strategy.pp=2 strategy.sequence_parallel=true": "strategy.pp=2 "
    "strategy.sequence_parallel=true: Plain is no Chain of blocks, so strategy.pp=2 cuts it by a ",
    f"{OWN}Plain strategy=fsdp strategy.keep_whole=[expert.*]": "strategy.keep_whole=[expert.*]: "
    "matches no module of the model.",
    f"{OWN}Wrong +model.how=scalar strategy=fsdp": "strategy=fsdp: cannot shard the parameter "
    "scale, which has no dimensions.",
    "strategy=pipeline strategy.schedule=interleaved1f1b "
    "strategy.cut=[fc1,fc2]": "strategy.cut=[fc1,fc2]: makes 3 stages, but "
    "strategy.schedule=interleaved1f1b on 2 ranks needs a multiple of 2 stages",
    "strategy=pipeline strategy.cut=[fc9]": "strategy.cut=[fc9]: must be blocks of the model in "
    "their order, the first excluded: some of conv2, fc1, "
    "fc2",
    "strategy=pipeline strategy.cut=[conv1]": "strategy.cut=[conv1]: must be blocks of the model "
    "in their order, the first",
    "strategy=pipeline strategy.schedule=interleaved1f1b "
    "strategy.cut=[fc2,fc1,conv2]": "must be blocks of the model in their",
    "strategy=pipeline strategy.schedule=interleaved1f1b "
    "strategy.cut=[fc1,fc1,fc2]": "must be blocks of the model in their",
    "strategy=pipeline strategy.cut=[1,2]": "strategy.cut=[1,2]: makes 3 stages, but "
    "strategy.schedule=1f1b on 2 ranks needs 2 stages, one for each",
    "strategy=pipeline strategy.num_microbatches=1": "strategy.num_microbatches=1: "
    "strategy.schedule=1f1b needs at least one "
    "for each of the 2 ranks in a pipeline; use 2 "
    "or more, or strategy.schedule=gpipe",
    "strategy=pipeline model=simple_cnn "
    "strategy.schedule=interleaved1f1b": "the model cannot be cut into 4 stages: it has 2 blocks "
    "(conv, head) and a stage needs at least one. Use at most "
    "2 ranks, strategy.devices or",
    "strategy=pipeline strategy.schedule=interleaved1f1b "
    "strategy.num_microbatches=5": "strategy.num_microbatches=5: strategy.schedule=interleaved1f1b "
    "on 2 ranks needs a multiple of 2, to make 2 equal rounds; use "
    "4 or 6",
    "strategy=pipeline strategy.num_microbatches=12 batch_size=22 "
    "accumulate=2": "strategy.num_microbatches=12: must not exceed the 11 samples that a pipeline "
    "gets at once (local batch size / accumulate); use at most 11",
    "strategy=ddp_pipeline strategy.pp=1 "
    "strategy.schedule=interleaved1f1b": "strategy.schedule=interleaved1f1b: needs at least 2 "
    "ranks in a pipeline, because torch cannot evaluate with "
    "consecutive stages on one rank; use gpipe or 1f1b for",
    "strategy=ddp mixup=0.4 batch_size=6": "mixup=0.4, cutmix=0: mix the samples of a local batch "
    "in pairs, but a global batch of 6 has local batches of "
    "3; use a global batch of 4 or 8, or mixup=0 cutmix=0",
    "strategy=ddp batch_size=auto accumulate=auto": "accumulate=auto: needs a fixed global batch; "
    "use a number for batch_size",
    f"strategy=ddp {OWN}waiting_blocks data=digits "
    "batch_size=auto": "batch_size=auto: cannot be planned: a step on",
    "strategy=ddp profile=true batch_size=382 epochs=3": "profile=true: needs 16 steps of "
    "training, and this run has 6; raise "
    "epochs\n",
    "strategy=ddp data=fashion_mnist data.root=RUNS/none": "or use data=digits, which needs no "
    "download",
    "strategy=ddp data.mean=[0.1,0.2]": "data.mean=[0.1, 0.2]: has 2 values",
    "strategy=ddp data.crop_padding=28": "data.crop_padding=28: must be smaller than the images, "
    "which are 28 x 28 pixels; allowed: 0 to 27",
    "strategy=ddp data=synthetic data.dataset.image_size=8": "model=lenet: needs images of at "
    "least 14x14 pixels, got 8x8",
    "strategy=ddp checkpoint.mirror=no://x": "checkpoint.mirror=no://x: cannot be used",
    "strategy=ddp runs_dir=train.py": "runs_dir=train.py: cannot make the run directory there",
    "strategy=ddp patience=3": "patience=3: needs a validation set, which these data do not have. "
    "Use data.val_fraction=0.1",
    "checkpoint.best=test_accuracy": "must be auto or a metric of the validation set, as val_loss "
    "or null",
    "strategy=ddp optimize=val_loss": "optimize=val_loss: needs a validation set",
    "strategy=ddp data.val_fraction=0.0001": "data.val_fraction=0.0001: leaves 384 of 384 "
    "samples to train on and 0 to",
    "-m strategy=ddp seed=1,2": "--multirun: is not supported by several ranks, where all jobs "
    "would share one process group",
}


def is_further(line: str) -> bool:
    """Return whether the tests of pipelines and of data, which start no ranks, have the mistake."""
    return "strategy=pipeline" in line or " data." in line


FURTHER = [line for line in REJECTED if is_further(line)]  # slow
FAST = [line for line in REJECTED if not is_further(line)]


def refusals_in_world(folders: dict[str, Path]) -> dict[str, tuple[object, str]]:
    """Start train.py on this rank with each of some overrides, each in its folder."""
    refusals = {}
    for attempt, (line, folder) in enumerate(folders.items()):
        # the ranks agree under other keys of their store
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        overrides = line.replace("RUNS", str(folder)) + (
            "" if "runs_dir" in line else f" runs_dir={folder}/runs"
        )
        refusals[line] = refusal_in_world(overrides)
    return refusals


@once
def refusals(folder: Path, are_further: bool) -> list[dict]:
    lines = FURTHER if are_further else FAST
    folders = {line: folder / f"rejected-{are_further}-{i}" for i, line in enumerate(lines)}
    for path in folders.values():
        path.mkdir()
    ranks = run_world(2, refusals_in_world, folders, timeout=300)
    left = {line: list(path.glob("runs/*")) for line, path in folders.items()}
    return [{line: (*rank[line], left[line]) for line in lines} for rank in ranks]


@pytest.mark.parametrize("line", slow_but(FAST, REJECTED))
def test_user_error_is_reported_once_with_exit_code_2(line, tmp_path):
    (code, printed, left), (code_of_rank_1, printed_by_rank_1, _) = (
        rank[line] for rank in refusals(tmp_path.parent, line in FURTHER)
    )
    assert code == 2, printed
    assert (code_of_rank_1, printed_by_rank_1) == (2, ""), "every rank reported it"
    assert printed.startswith("error: ")
    assert REJECTED[line] in printed
    assert printed.count("\n") == 1, printed
    assert not left, "a rejected run left a directory"


def test_mistake_that_the_ranks_find_is_printed_once(tmp_path):
    message = (
        "error: strategy=split: runs in one process, and not on 2 ranks. Start `ddp-lab train "
    )
    code, output = launch(
        "torchrun --standalone --nproc_per_node=2 train.py strategy=split", f"runs_dir={tmp_path}"
    )
    assert code == 1  # torchrun's exit code, whatever the exit codes of its workers are
    assert output.count(message) == 1
    assert "exitcode  : 2" in output
    assert "ConfigError" not in output
    code, output = launch(
        "python -m ddp_lab train --nproc 2 strategy=split", f"runs_dir={tmp_path}"
    )
    assert (code, output.count("\n")) == (2, 1), output
    assert output.startswith(message)
