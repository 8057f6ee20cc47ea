"""scripts/same_losses.py: its table and picture, and a run of it on two CPU ranks."""

import json

import pytest
from launches import launch
from PIL import Image

from scripts.same_losses import differences, table, write_results


def row_of(devices: int, **more) -> dict:
    strategy = "single" if devices == 1 else "ddp"
    return {
        "model": "gpt2",
        "devices": devices,
        "strategy": strategy,
        "steps": 7,
        "overrides": [],
    } | more


ONE = row_of(1, losses={"1": 4.0, "5": 2.0, "6": 1.0, "7": 1.0})
TWO = row_of(2, losses={"1": 4.0, "5": 2.002, "6": 1.1, "7": 1.01})


def test_table_has_the_differences_from_one_device():
    failed = row_of(4, skipped="the time limit was reached")
    later = row_of(8)
    lines = table([ONE, TWO, failed, later]).splitlines()[2:]
    assert lines == [
        "| gpt2 | 1 | single | 2.000000 | 0.0e+00 | 1.000000 | 0.0e+00 | 0.0e+00 |",
        "| gpt2 | 2 | ddp | 2.002000 | 1.0e-03 | 1.010000 | 1.0e-02 | 1.0e-01 |",
        "| gpt2 | 4 | ddp | not run: the time limit was reached |  |  |  |  |",
        "| gpt2 | 8 | ddp | not run |  |  |  |  |",
    ]


def test_other_training_on_one_device_is_no_reference():
    other = ONE | {"overrides": ["seed=1"]}
    assert differences(TWO, [other, TWO]) == {}
    assert table([other, TWO]).splitlines()[-1] == (
        "| gpt2 | 2 | ddp | 2.002000 |  | 1.010000 |  |  |"
    )


def test_results_have_a_picture_of_the_losses_and_the_differences(tmp_path):
    write_results([ONE], {"where": "here"}, tmp_path)
    losses_alone = Image.open(tmp_path / "losses.png").width
    write_results([ONE, TWO], {"where": "here"}, tmp_path)
    assert Image.open(tmp_path / "losses.png").width > 1.5 * losses_alone
    assert json.loads((tmp_path / "losses.json").read_text()) == {
        "where": "here",
        "rows": [ONE, TWO],
    }
    assert (tmp_path / "table.md").read_text() == f"{table([ONE, TWO])}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (
            "gpt2",
            "model.depth=2 model.width=32 model.heads=2 data.context=32 data.num_classes=256 "
            "batch_size=8 precision=float32",
        ),
        ("resnet18", "model._target_=small_networks.narrow_resnet batch_size=32"),
    ],
)
def test_losses_of_two_ranks_are_those_of_one(model, overrides, tmp_path):
    line = f"python scripts/same_losses.py --gpus 0 --models {model} --steps 6"
    chosen = ["--out", str(tmp_path), "--", *overrides.split()]
    code, output = launch(line, *chosen)
    assert code == 0, output
    rows = json.loads((tmp_path / "losses.json").read_text())["rows"]
    assert [(row["devices"], len(row["losses"])) for row in rows] == [(1, 6), (2, 6)], output
    assert max(differences(rows[1], rows).values()) < 1e-5, output
    assert rows[0]["losses"]["6"] != rows[0]["losses"]["1"], "nothing was trained"
    again, _ = launch(line, *chosen)
    assert again == 0
    assert json.loads((tmp_path / "losses.json").read_text())["rows"] == rows
