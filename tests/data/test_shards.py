"""data=tokens: windows of shards in one order for any ranks, and runs from the command line."""

import os
import shutil
from contextlib import suppress
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from launches import launch, main_in_world, newest, read_metrics, refusal_in_world
from slow_rows import extra
from token_shards import write_shard, write_shards
from worlds import once, run_world

from ddp_lab.commands import predict
from ddp_lab.data.batch import LoaderOptions
from ddp_lab.data.dataset import hold_out
from ddp_lab.data.loader import Loader, loader_class
from ddp_lab.data.shards import Shard, TokenShards, Windows

CONTEXT = 16
MODEL = "model=gpt model.depth=2 model.width=32 model.heads=2"
RUN = f"task=tokens data=tokens data.context={CONTEXT} data.num_classes=97 data.num_workers=0 "
RUN += f"{MODEL} batch_size=12 optimizer.lr=0.3 device=cpu speed=off tracker=none log_every=1"


def opened(folder: Path, *lengths: int, context: int = 4, vocabulary: int = 97) -> Windows:
    pattern = write_shards(folder, *lengths)
    windows = TokenShards(pattern, None, context, vocabulary).load().train
    assert isinstance(windows, Windows)
    return windows


def test_windows_are_numbered_through_shards_and_none_crosses_an_end(tmp_path):
    tokens = [
        np.arange(100, 114),
        np.arange(200, 204),
        np.arange(300, 309),
        np.arange(65535, 65536),
    ]
    for number, part in enumerate(tokens):
        write_shard(tmp_path / f"t_{number}.bin", part)
    windows = TokenShards(str(tmp_path / "t_*.bin"), None, 4, 65536).load().train
    samples = [windows.sample(0, index) for index in range(windows.size)]
    # of 14 tokens the last one is the target of nothing: 13 // 4 windows; of 4 tokens there is none
    starts = [100, 104, 108, 300, 304]
    assert [inputs.tolist() for inputs, _ in samples] == [
        [*range(start, start + 4)] for start in starts
    ]
    assert [targets.tolist() for _, targets in samples] == [
        [*range(start + 1, start + 5)] for start in starts
    ]
    assert {tensor.dtype for sample in samples for tensor in sample} == {torch.int64}


def make(kind: str, windows: Windows, rank: int, ranks: int) -> Loader:
    options = LoaderOptions(6, rank, ranks, torch.device("cpu"), [0.0], [1.0], shuffle=True, seed=3)
    return loader_class(kind)(windows, options)


@pytest.mark.parametrize("kind", ["device", "workers"])
def test_order_is_the_same_for_any_number_of_ranks_and_either_loader(kind, tmp_path):
    windows = opened(tmp_path, 100, 50, 80)
    assert windows.size == 24 + 12 + 19
    expected = torch.randperm(55, generator=torch.Generator().manual_seed(3 + 2))[:54]
    for ranks in (1, 2, 3):
        read = []
        for rank in range(ranks):
            loader = make(kind, windows, rank, ranks)
            loader.set_epoch(2)
            read.append([(batch.inputs, batch.targets) for batch in loader][:9])
        for step in range(9):
            for place in range(6):
                inputs, targets = (part[place // ranks] for part in read[place % ranks][step])
                sample = windows.sample(2, int(expected[6 * step + place]))
                assert torch.equal(inputs, sample[0])
                assert torch.equal(targets, sample[1])


def test_device_loader_keeps_large_tokens(tmp_path):
    write_shard(tmp_path / "t.bin", [40000, 65535, 32768, 7, 1])
    windows = TokenShards(str(tmp_path / "t.bin"), None, 4, 65536).load().train
    (batch,) = make("device", windows, 0, 1)
    assert batch.inputs.tolist() == [[40000, 65535, 32768, 7]]
    assert batch.targets.tolist() == [[65535, 32768, 7, 1]]


def test_held_out_windows_are_not_trained_on(tmp_path):
    pattern = write_shards(tmp_path, 100, 50)
    dataset = hold_out(TokenShards(pattern, None, 4, 97).load(), 0.25, 0)
    numbers = [{part.number(i) for i in range(part.size)} for part in (dataset.train, dataset.val)]
    assert [len(each) for each in numbers] == [27, 9]
    assert set.union(*numbers) == {*range(36)}
    whole = TokenShards(pattern, None, 4, 97).load().train
    assert torch.equal(dataset.val.sample(0, 3)[0], whole.sample(0, dataset.val.number(3))[0])


def test_large_shards_are_opened_without_being_read(tmp_path):
    length = 2**31 - 1
    for number in range(5):  # 20 GiB of zeros, which take no space on the disk
        path = write_shard(tmp_path / f"train_{number}.bin", [], length=length)
        os.truncate(path, 1024 + 2 * length)
    before = psutil.Process().memory_info().rss
    windows = TokenShards(str(tmp_path / "train_*.bin"), None, 1024, 10).load().train
    assert windows.size == 5 * (length - 1) // 1024 - 4
    assert windows.sample(0, windows.size - 1)[0].tolist() == [0] * 1024
    assert psutil.Process().memory_info().rss - before < 100 * 2**20


def test_fingerprint_covers_name_size_header_and_both_ends(tmp_path):
    tokens = np.zeros(3 * 2**19, np.uint16)

    def fingerprint(change: int | None = None, name: str = "t.bin", size: int = len(tokens)) -> str:
        changed = tokens[:size].copy()
        if change is not None:
            changed[change] = 1
        return Shard(str(write_shard(tmp_path / name, changed)), size).fingerprint()

    first = fingerprint()
    assert first == fingerprint()
    assert first == fingerprint(3 * 2**18), "the middle is not read"
    others = [fingerprint(0), fingerprint(-1), fingerprint(2**18), fingerprint(-(2**18))]
    others += [fingerprint(name="u.bin"), fingerprint(size=len(tokens) - 1)]
    assert len({first, *others}) == 7


def train(lines: list[str]) -> None:
    for line in lines:
        with suppress(SystemExit):
            main_in_world(*line.split())


QUICK = ["1 single data.loader=device", "2 ddp data.num_workers=1"]
SLOW = [
    "2 pipeline",
    "1 split strategy.devices=[cpu,cpu]",
    "2 fsdp",
    "2 mesh data.loader=device",
]
EXTRA = ["3 ddp", "1 dp", "2 ddp data.loader=device", "2 tp", "2 scratch"]
EXTRA += ["4 ddp_pipeline strategy.num_microbatches=2"]


def train_all(folder: Path, cases: list[str]) -> Path:
    """Train on one device, and each case: ranks, strategy and overrides. Return the folder."""
    patterns = (
        write_shards(folder / "t", 900, 300, 700),
        write_shards(folder / "t", 400, 100, name="val"),
    )
    data = f"{RUN} data.root={patterns[0]} data.val_root={patterns[1]} runs_dir={folder} epochs=2"
    stopped = f"{data} name=stopped"
    lines = {1: [f"{data} name=single", f"{stopped} inject=sigterm@rank=0,step=13", stopped]}
    for number, case in enumerate(cases):
        ranks, strategy = case.split(" ", 1)
        lines.setdefault(int(ranks), []).append(f"{data} name=run{number} strategy={strategy}")
    for ranks, each in lines.items():
        run_world(ranks, train, each)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return train_all(tmp_path_factory.mktemp("runs"), QUICK)


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("others")


@once
def folder_of_others(parent: Path, are_extra: bool) -> Path:
    folder = parent / ("extra" if are_extra else "slow")
    folder.mkdir()
    return train_all(folder, EXTRA if are_extra else SLOW)


def require_losses_of_single(folder: Path, number: int) -> None:
    expected = read_metrics(folder / "single")
    rows = read_metrics(folder / f"run{number}")
    assert len(rows) == len(expected) == 2
    # 56 + 18 + 43 windows
    assert rows[-1]["step"] == expected[-1]["step"] == 2 * 10
    for row, other in zip(rows, expected, strict=True):
        for name in ("train_loss", "val_loss", "val_perplexity"):
            assert row[name] == pytest.approx(other[name], rel=1e-5), name
    assert expected[1]["train_loss"] < expected[0]["train_loss"]


@pytest.mark.covers("data.val_root")
@pytest.mark.parametrize("case", QUICK)
def test_strategies_and_loaders_give_the_losses_of_one_device(case, folder):
    require_losses_of_single(folder, QUICK.index(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW, *extra(EXTRA)])
def test_other_strategies_give_the_losses_of_one_device(case, parent):
    cases = SLOW if case in SLOW else EXTRA
    folder = folder_of_others(parent, cases is EXTRA)
    require_losses_of_single(folder, cases.index(case))


def test_run_that_is_resumed_in_an_epoch_is_bitwise_the_same(folder):
    assert "resumed from" in (folder / "stopped" / "train.log").read_text()
    one, other = (newest(folder / name) for name in ("single", "stopped"))
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])
    rows = [read_metrics(folder / name) for name in ("single", "stopped")]
    for row, expected in zip(*rows, strict=True):
        assert {key: row[key] for key in row if "loss" in key} == {
            key: expected[key] for key in expected if "loss" in key
        }


def test_changed_shard_is_named_when_a_run_is_resumed(folder, tmp_path):
    shutil.copytree(folder / "t", tmp_path / "t")
    shutil.copytree(folder / "single", tmp_path / "single")
    write_shard(tmp_path / "t" / "train_000001.bin", [3] * 300)
    data = f"data.root={tmp_path}/t/train_*.bin data.val_root={tmp_path}/t/val_*.bin"
    run_world(1, train, [f"{RUN} {data} runs_dir={tmp_path} epochs=3 name=single"])
    log = (tmp_path / "single" / "train.log").read_text()
    assert "was trained on other files or samples than these data" in log
    assert "train: train_000001.bin has changed" in log
    assert "val: " not in log


def test_predict_refuses_a_vocabulary_that_is_not_bytes(folder, command):
    code, _, errors = command(predict.main, folder / "single", "--prompt", "to be")
    assert (code, "its vocabulary has 97 tokens, but the prompt of predict is bytes" in errors) == (
        2,
        True,
    ), errors


MISTAKES = {
    "data.root={T}/no_*.bin": "data.root={T}/no_*.bin: matches no file on ",
    "data.root={T}/text.txt": "{T}/text.txt is no shard of tokens: it begins with 1869881376",
    "data.root={T}/short.bin": "{T}/short.bin is no shard of tokens: it has 9 bytes",
    "data.root={T}/empty.bin": "{T}/empty.bin is no shard of tokens: it is empty",
    "data.root={T}/v7.bin": "{T}/v7.bin has version 7 of the format of token shards; supported is "
    "1, whose tokens are uint16",
    "data.root={T}/cut.bin": "{T}/cut.bin has 1,144 bytes, but its header says 61 tokens, for "
    "which it must have 1,146. Copy or write the file again",
    "data.root={T}/long.bin": "{T}/long.bin has 1,144 bytes, but its header says 59 tokens",
    "data.root={T}/wide.bin": "{T}/wide.bin has 1,264 bytes, as tokens of four bytes have, which "
    "are not supported, but its header says 60 tokens, for which it must have 1,144",
    "data.root={T}/tiny.bin": "{T}/tiny.bin is no shard of tokens: it has 3 bytes",
    "data.root={T}/few.bin": "data.context=16: a window needs 17 tokens, but the longest shard of "
    "data.root={T}/few.bin has 16",
    "data.root={T}/good.bin data.val_root={T}/few.bin": "the longest shard of data.val_root=",
    "data.root={T}/g*.bin data.val_root={T}/good.bin": "{T}/good.bin is also a file of data.root=",
    "data.root={T}/large.bin": "data.num_classes=97: token 2 of {T}/large.bin is 97; tokens must "
    "be 0 to 96. Use the size of the vocabulary",
    "data.root={T}/later.bin data.loader=device": "token 85 of {T}/later.bin is 50000",
    "data.root={T}/good.bin task=classification loss=cross_entropy": "use task=tokens",
    "data.root={T}/good.bin data.flip=true": "data.flip=true: are for images",
}


def refusals(lines: list[str]) -> list[tuple[object, str]]:
    return [refusal_in_world(line) for line in lines]


def test_mistakes_are_one_message(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"  to be or not " * 90)
    (tmp_path / "short.bin").write_bytes(b"123456789")
    (tmp_path / "empty.bin").touch()
    write_shard(tmp_path / "v7.bin", range(60), version=7)
    write_shard(tmp_path / "cut.bin", range(60), length=61)
    write_shard(tmp_path / "long.bin", range(60), length=59)
    write_shard(tmp_path / "wide.bin", [*range(60)] * 2, length=60)
    (tmp_path / "tiny.bin").write_bytes(b"abc")
    write_shard(tmp_path / "few.bin", range(16))
    write_shard(tmp_path / "good.bin", [*range(90)] * 4)
    write_shard(tmp_path / "large.bin", [1, 2, 97] * 60)
    write_shard(tmp_path / "later.bin", [*range(85), 50000, *range(90)])
    lines = [f"{RUN} runs_dir={tmp_path}/runs {line.format(T=tmp_path)}" for line in MISTAKES]
    (ended,) = run_world(1, refusals, lines)
    for (line, message), (code, printed) in zip(MISTAKES.items(), ended, strict=True):
        assert printed.count("error: ") == 1, f"{line}: {printed}"
        assert message.format(T=tmp_path) in printed, f"{line}: {printed}"
        assert code == 2, f"{line}: {printed}"


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_token_outside_of_the_vocabulary_ends_the_run_with_one_message(workers, tmp_path):
    write_shard(tmp_path / "later.bin", [*range(85), 50000, *range(90)])
    line = f"ddp-lab train --nproc 2 strategy=ddp {RUN} data.num_workers={workers}"
    code, printed = launch(line, f"data.root={tmp_path}/later.bin", f"runs_dir={tmp_path}/runs")
    message = f"data.num_classes=97: token 85 of {tmp_path}/later.bin is 50000; tokens must be 0 to"
    assert code == 1
    assert (printed.count(message), printed.count("Traceback")) == (1, 0), printed


def test_all_windows_are_read_once_in_an_epoch(tmp_path):
    windows = opened(tmp_path, 100, 50, 80)
    rows = chain.from_iterable(batch.inputs.tolist() for batch in make("workers", windows, 0, 1))
    expected = [windows.sample(0, index)[0].tolist() for index in range(windows.size)]
    assert sorted(rows) == sorted(expected)
