"""A run of train.py whose samples have a dict of inputs, and its model a dict with logits."""

import json
from pathlib import Path

import pytest
from launches import main_in_world
from worlds import run_world

WORDS = [
    "data=own",
    "data.dataset._target_=own_datasets.Pairs",
    "model=own",
    "model._target_=own_models.Compared",
]
WORDS += ["device=cpu", "tracker=none", "epochs=2", "batch_size=8", "optimizer.lr=0.1"]


def losses_of(ranks: int, strategy: str, folder: Path) -> list[float]:
    run_world(
        ranks,
        main_in_world,
        *WORDS,
        f"strategy={strategy}",
        f"runs_dir={folder}",
        f"name={strategy}",
        timeout=60,
    )
    rows = [
        json.loads(line) for line in (folder / strategy / "metrics.jsonl").read_text().splitlines()
    ]
    return [
        row[key] for row in rows if row["kind"] == "epoch" for key in ("train_loss", "val_loss")
    ]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_dict_of_inputs_trains_alike_on_one_and_two_ranks(strategy, tmp_path):
    alone = losses_of(1, "single", tmp_path)
    assert len(alone) == 4
    assert alone[2] < alone[0]
    assert losses_of(2, strategy, tmp_path) == pytest.approx(alone, abs=1e-6)
