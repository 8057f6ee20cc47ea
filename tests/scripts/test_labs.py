"""The labs that the manual teaches with: their tables and pictures, and what all scripts refuse."""

from itertools import pairwise

import pytest
import torch
from launches import launch
from PIL import Image

from ddp_lab.exercises.speed import PROJECT
from scripts import lab_allreduce, lab_overlap


@pytest.mark.slow
def test_lab_allreduce_prints_and_draws_all_algorithms(tmp_path):
    line = (
        "torchrun --standalone --nproc_per_node=3 scripts/lab_allreduce.py --largest 16 --repeat 3"
    )
    code, output = launch(line, "--out", str(tmp_path / "lab"))
    assert code == 0, output
    rows = [line.split() for line in output.splitlines()]
    with_model = [] if lab_allreduce.NO_FIT in output else ["model"]
    assert ["bytes", *PROJECT, "library", *with_model] in rows
    times = [row for row in rows if row[:1] and row[0] in ("4,096", "16,384", "65,536")]
    assert len(times) == 3
    assert all(float(value) > 0 for row in times for value in row[1:])
    assert Image.open(tmp_path / "lab.png").width > 500


def test_cost_model_of_the_allreduce_goes_through_the_librarys_first_and_last_call():
    library = [(4096, 0.04), (65_536, 0.03), (2**26, 0.34)]
    (_, first), *_, (_, last) = lab_allreduce.model(library, 4)
    assert (first, last) == pytest.approx((0.04, 0.34), rel=0.02)
    slower_at_first = [(4096, 0.4), (65_536, 0.3), (2**18, 0.2)]
    times = [time for _, time in lab_allreduce.model(slower_at_first, 4)]
    assert times == sorted(times), "the model takes less time for more bytes"
    assert lab_allreduce.has_slope(lab_allreduce.model(library, 4))
    assert not lab_allreduce.has_slope(lab_allreduce.model(slower_at_first, 4))


@pytest.mark.parametrize(
    "gpus",
    [0, pytest.param(1, marks=pytest.mark.gpu(1)), pytest.param(2, marks=pytest.mark.gpu(2))],
)
def test_lab_overlap_prints_and_draws_both_parts(gpus, tmp_path, monkeypatch):
    if gpus == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = "python scripts/lab_overlap.py --size 64 --matmuls 3 --repeat 2"
    code, output = launch(line, "--out", str(tmp_path / "new" / "lab"), gpus=gpus > 0)
    assert code == 0, output
    for row in (
        "sequential",
        "concurrent",
        "one stream",
        "two streams",
        *["two, pageable"] * (gpus > 0),
    ):
        assert f"\n{row} " in output
    assert "every copy is correct" in output
    picture = Image.open(tmp_path / "new" / "lab.png").convert("RGB")
    shown = {colour for _, colour in picture.getcolors(picture.width * picture.height)}
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= shown, (
        "issue, wait or matmul is missing in the timelines"
    )


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (
            "lab_allreduce.py",
            1,
            "error: an all-reduce needs at least 2 ranks, got 1; use torchrun --standalone "
            "--nproc_per_node=2",
        ),
        ("lab_overlap.py --size 0", 1, "error: --size 0: must be at least 1"),
        (
            "bench.py --loops bare --repeats 1",
            1,
            "error: --repeats 1: must be at least 2, for the quartiles\n",
        ),
        ("bench.py --gpus 1", 1, "error: --gpus 1: this machine shows 0; use 0 for the CPU\n"),
        (
            "bench.py --gpus 0 --strategies magic",
            1,
            "error: --strategies: strategy=magic",
        ),
        (
            "same_losses.py --gpus 8 --out none",
            1,
            "error: --gpus 8: this machine shows 0; use 0 for the CPU\n",
        ),
        (
            "same_losses.py --gpus 0 --steps 4 --out none",
            1,
            "error: --steps 4: must be at least 5\n",
        ),
        ("compare.py runs_dir=elsewhere", 2, "runs_dir=elsewhere: is set by compare.py; use --out"),
        ("compare.py --ranks 2 0 -- epochs=2", 2, "--ranks 2 0: each must be at least 1"),
        (
            "compare.py --strategies magic",
            2,
            "--strategies magic: no such strategy; allowed: single, scratch, ddp",
        ),
    ],
)
def test_scripts_refuse_invalid_options(line, code, message):
    exit_code, output = launch(f"python scripts/{line}")
    assert (exit_code, message in output) == (code, True), output
    if code == 1:  # the others print their usage, too
        assert output.startswith(message)
        assert output.count("\n") == 1


def test_copies_start_after_their_matmuls_and_lanes_run_sequentially():
    before = torch.get_num_threads()
    pair = [lab_overlap.Lane(name, torch.device("cpu")) for name in ("compute", "copy")]
    try:
        rows = lab_overlap.once(pair, lab_overlap.on_two(pair, 32, 5)["sequential"]).rows
        copies = lab_overlap.with_copies(pair, 32, 4, 2)["two streams"].rows
    finally:
        for lane in pair:
            lane.pool.shutdown()
        torch.set_num_threads(before)
    assert rows["compute"][-1][1] <= rows["copy"][0][0]
    for row in rows.values():
        assert all(end <= start for (_, end, _), (start, _, _) in pairwise(row)), (
            "boxes of one row overlap"
        )
    assert all(
        done <= start
        for (_, done, _), (start, _, _) in zip(copies["compute"], copies["copy"], strict=True)
    )
