"""The labs run to their end and find what they are about."""

from launches import SMALL, launch, read_metrics
from PIL import Image


def test_lab_allreduce(tmp_path):
    line = "torchrun --standalone --nproc_per_node=3 scripts/lab_allreduce.py --largest 16 --repeat 3 --batch 24"
    code, output = launch(line, "--out", str(tmp_path / "lab"))
    assert code == 0, output
    rows = [line.split() for line in output.splitlines()]
    (header,) = (row for row in rows if row[:1] == ["bytes"])
    assert header == ["bytes", "star", "per_tensor", "flat", "ring", "library", "model"]
    times = {row[0]: [float(value) for value in row[1:]] for row in rows if row and row[0] in ("4,096", "16,384", "65,536")}
    assert len(times) == 3
    for size in ("4,096", "65,536"):
        assert abs(times[size][-1] - times[size][-2]) < 0.002, "the model goes through the library's ends"
    assert ["star", "per_tensor", "flat", "ring", "bucketed", "ddp", "none"] in rows
    assert Image.open(tmp_path / "lab.png").width > 1000


def test_lab_allreduce_of_one_rank_is_refused():
    code, output = launch("python scripts/lab_allreduce.py")
    assert code == 1
    assert "one rank has nobody to sum with" in output


def test_lab_scaling_rules(tmp_path):
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
