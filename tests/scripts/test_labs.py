"""The labs run without errors, and their tables and pictures are complete."""

import json
import sys
import time
from itertools import pairwise

import pytest
import torch
from launches import SMALL, launch, read_metrics
from PIL import Image

from ddp_lab.observe.plot import figure
from scripts import lab_allreduce, lab_overlap
from scripts.lanes import Thread, once


@pytest.mark.slow
def test_lab_allreduce_prints_and_draws_all_algorithms(tmp_path):
    line = "torchrun --standalone --nproc_per_node=3 scripts/lab_allreduce.py --largest 16 --repeat 3 --batch 24"
    code, output = launch(line, "--out", str(tmp_path / "lab"))
    assert code == 0, output
    rows = [line.split() for line in output.splitlines()]
    (header,) = (row for row in rows if row[:1] == ["bytes"])
    assert header == ["bytes", "star", "per_tensor", "flat", "ring", "library", "model"]
    times = {row[0]: [float(value) for value in row[1:]] for row in rows if row and row[0] in ("4,096", "16,384", "65,536")}
    assert len(times) == 3
    for size in ("4,096", "65,536"):
        low = times["4,096"][-2]  # noise can make the larger call the faster one
        assert abs(times[size][-1] - max(low, times[size][-2])) < 0.01, (
            "the model does not fit the library's first and last row"
        )
    assert ["star", "per_tensor", "flat", "ring", "bucketed", "ddp", "none"] in rows
    assert Image.open(tmp_path / "lab.png").width > 1000


@pytest.mark.parametrize(
    "library",
    [
        [(4096, 0.04), (65_536, 0.03), (2**26, 0.34)],
        [(4096, 0.4), (65_536, 0.3), (2**18, 0.2)],
        [(4096, 0.01), (65_536, 0.3), (2**18, 9.0)],
    ],
    ids=["as measured", "the largest is the fastest", "faster than linear"],
)
def test_cost_model_of_the_allreduce_never_falls_with_the_size(library):
    found = lab_allreduce.model(library, 4)
    assert [size for size, _ in found] == [size for size, _ in library]
    times = [time for _, time in found]
    assert times == sorted(times)
    if library[0][1] < library[-1][1]:
        assert times[-1] == pytest.approx(library[-1][1], rel=0.02)


def test_lab_allreduce_has_milliseconds_in_its_table_and_its_picture(tmp_path, capsys, monkeypatch):
    pictures = []
    monkeypatch.setattr(lab_allreduce, "beside", lambda plots, path: pictures.append(figure(plots)))
    found = {"flat": [(4096, 0.25), (65_536, 0.5)], "library": [(4096, 0.125), (65_536, 0.375)]}
    lab_allreduce.report(found, {"flat": 3.5}, 2, tmp_path / "lab.png")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("milliseconds")
    assert lines[2].split() == ["4,096", "0.250", "0.125", "0.125"]
    sizes, step = pictures[0].axes
    assert (sizes.get_ylabel(), step.get_xlabel()) == ("ms", "ms")
    assert sizes.lines[0].get_ydata().tolist() == [0.25, 0.5]


def test_lab_allreduce_refuses_one_rank():
    code, output = launch("python scripts/lab_allreduce.py")
    assert code == 1
    assert "error: an all-reduce needs at least 2 ranks, got 1; use torchrun" in output


@pytest.mark.slow
def test_lab_scaling_rules_scales_the_rate_by_each_rule(tmp_path):
    line = f"python scripts/lab_scaling_rules.py --ks 1 4 --out {tmp_path} --"
    code, output = launch(line, *SMALL[:-2], "batch_size=25", "epochs=3", "optimizer.lr=0.02")
    assert code == 0, output
    rows = [line.split() for line in output.splitlines()]
    one, four = (next(row for row in rows if row[:2] == [k, batch]) for k, batch in (("1", "25"), ("4", "100")))
    assert len(set(one[2:])) == 1
    rates = {rule: read_metrics(tmp_path / f"k4-{rule}")[0]["lr"] / 0.02 for rule in ("none", "linear", "sqrt")}
    assert rates["linear"] / rates["none"] == 4
    assert rates["sqrt"] / rates["none"] == 2
    assert [float(value) for value in four[2:]] == [
        round(read_metrics(tmp_path / f"k4-{rule}")[-1]["test_accuracy"], 4) for rule in rates
    ]
    assert Image.open(tmp_path / "accuracy.png").width > 600


def test_lab_scaling_rules_continues_after_a_run_that_diverges(tmp_path):
    line = f"python scripts/lab_scaling_rules.py --ks 1 2 --out {tmp_path} --"
    code, output = launch(line, *SMALL[:-2], "batch_size=25", "epochs=3", "optimizer.lr=1e20")
    assert code == 0, output
    assert output.count("diverged") == 6
    assert not (tmp_path / "accuracy.png").exists(), "a picture without a curve was drawn"


def test_lab_scaling_rules_refuses_an_invalid_batch_size():
    code, output = launch("python scripts/lab_scaling_rules.py --ks 1 2 -- batch_size=many")
    assert code == 2
    assert "batch_size=many --ks 1 2: must be integers of at least 1" in output


ON_TWO = {0: ["thread 0", "thread 1"], 1: ["stream 0", "stream 1"], 2: ["cuda:0", "cuda:1"]}


def numbers(lines: list[str], title: str) -> dict[str, list[float]]:
    """Return the rows of the table whose title begins with `title`."""
    at = next(i for i, line in enumerate(lines) if line.startswith(title)) + 2
    rows = (line for line in lines[at : lines.index("", at)] if not line.startswith("every"))
    return {line[:24].strip(): [float(cell) for cell in line[24:].split()] for line in rows}


@pytest.mark.parametrize("gpus", [0, pytest.param(1, marks=pytest.mark.gpu(1)), pytest.param(2, marks=pytest.mark.gpu(2))])
def test_lab_overlap_prints_and_draws_three_parts(gpus, tmp_path, monkeypatch):
    if gpus == 1:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = "python scripts/lab_overlap.py --size 64 --matmuls 3 --repeat 2"
    code, output = launch(line, "--out", str(tmp_path / "new" / "lab"), gpus=gpus > 0)
    assert code == 0, output
    lines = output.splitlines()
    assert ("stand for two devices" in lines[0]) == (gpus < 2)
    on_pair = numbers(lines, "1. 3 matmuls of 64 x 64 on each of two devices")
    assert list(on_pair) == [*(f"{name} alone" for name in ON_TWO[gpus]), "sequential", "concurrent"]
    by_size = numbers(lines, "3 matmuls by size")
    assert list(by_size) == [f"{size} x {size}" for size in (8, 16, 32, 64)]
    for sequential, concurrent, ratio in by_size.values():
        low = (sequential - 0.0005) / (concurrent + 0.0005)
        high = (sequential + 0.0005) / max(1e-9, concurrent - 0.0005)
        assert low - 0.0005 <= ratio <= high + 0.0005, "the ratio is not that of the rounded times"
    copies = numbers(lines, "2. 3 matmuls")
    pageable = ["two, pageable"] if gpus else []
    assert list(copies) == ["matmuls alone", "copies alone", "sequential", "one stream", "two streams", *pageable]
    assert "every copy is correct" in lines
    streams = numbers(lines, "3. 8 independent chains")
    assert list(streams) == [f"streams: {count}" for count in (1, 2, 4, 8)]
    assert all(value > 0 for table in (on_pair, copies, streams) for row in table.values() for value in row)
    picture = Image.open(tmp_path / "new" / "lab.png")
    assert picture.width > 1000
    boxes = picture.convert("RGB").crop((0, 0, picture.width // 2, picture.height // 2))  # the first timeline, not its legend
    shown = {colour for _, colour in boxes.getcolors(boxes.width * boxes.height)}
    assert {(0, 114, 178), (213, 94, 0), (0, 158, 115)} <= shown, "issue, wait or matmul is missing in the timeline"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0"], "error: --size 0: must be at least 1"),
        (["--repeat", "-1"], "error: --repeat -1: must be at least 1"),
        (["--out", "/dev/null/lab"], "error: --out /dev/null/lab: the picture cannot be written there"),
        (["--size", "100000000"], "error: --size 100000000 --matmuls 10: "),
    ],
)
def test_lab_overlap_refuses_invalid_arguments_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lab_overlap.py", "--out", str(tmp_path / "lab"), *arguments])
    with pytest.raises(SystemExit) as ended:
        lab_overlap.main()
    assert ended.value.code.startswith(message)
    assert "\n" not in ended.value.code


@pytest.fixture
def threads():
    """Yield two lanes with one core each, then restore the number of threads, which they set for the whole process."""
    before, pair = torch.get_num_threads(), [Thread(name, torch.device("cpu")) for name in ("compute", "copy")]
    yield pair
    for one in pair:
        one.pool.shutdown()
    torch.set_num_threads(before)


def test_lane_runs_its_work_sequentially(threads):
    variants = lab_overlap.on_two(threads, 32, 5, 1)
    for name, lanes in (
        ("compute alone", ["compute"]),
        ("sequential", ["compute", "copy"]),
        ("concurrent", ["compute", "copy"]),
    ):
        rows = once(threads, variants[name]).rows
        assert list(rows) == ["host", *lanes]
        assert all(len(rows[lane]) == 5 for lane in lanes)
        for row in rows.values():
            assert all(start <= end for start, end, _ in row)
            assert all(end <= start for (_, end, _), (start, _, _) in pairwise(row)), "boxes of one row overlap"
        issued = [start for start, _, label in rows["host"] if label == "issue"]
        assert issued[0] <= rows["compute"][0][0], "work ran before it was issued"
    rows = once(threads, variants["sequential"]).rows
    assert rows["compute"][-1][1] <= rows["copy"][0][0]


def test_copy_starts_after_its_matmul(threads):
    found = lab_overlap.with_copies(threads, 32, 4, 2)
    for name, run in found.items():
        last = max(end for row in run.rows.values() for _, end, _ in row)
        assert last <= run.seconds, name
    one, two = found["one stream"].rows, found["two streams"].rows
    assert [label for _, _, label in one["compute"]] == ["matmul", "copy"] * 4
    assert [label for _, _, label in found["sequential"].rows["compute"]] == ["matmul"] * 4 + ["copy"] * 4
    matmuls, copies = two["compute"], two["copy"]
    assert [label for _, _, label in matmuls + copies] == ["matmul"] * 4 + ["copy"] * 4
    assert all(done <= start for (_, done, _), (start, _, _) in zip(matmuls, copies, strict=True))


def test_copy_that_starts_too_early_is_detected(threads, monkeypatch):
    issue = Thread.issue

    def issue_without_waiting(self, label, work, after=None):
        def late():
            time.sleep(0.02)
            work()

        return issue(self, label, late if label == "matmul" else work)

    monkeypatch.setattr(Thread, "issue", issue_without_waiting)
    with pytest.raises(AssertionError, match="too early"):
        lab_overlap.with_copies(threads, 32, 2, 1)


@pytest.mark.slow
def test_book_loop_keeps_one_network_object(tmp_path):
    line = "python scripts/book_loop.py --smoke --keep --lazy --batches 32 64 --lrs 0.1 0.2 --seeds 0 --json"
    code, output = launch(line, str(tmp_path / "runs.jsonl"))
    assert code == 0, output
    assert output.count("kept object, lazy") == 2
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(run["batch"], run["lr"], len(run["accuracies"])) for run in runs] == [(32, 0.1, 1), (64, 0.2, 1)]


def test_book_loop_names_missing_data(tmp_path):
    code, output = launch("python scripts/book_loop.py --gpus 0 --data-root", str(tmp_path))
    assert code == 1
    assert output.startswith(f"error: --data-root {tmp_path}: FashionMNIST not found")
    assert output.count("\n") == 1
