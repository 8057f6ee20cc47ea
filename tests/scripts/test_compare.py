"""scripts/compare.py: the runs and the table."""

from pathlib import Path

import pytest
import torch
from launches import SMALL, launch

from ddp_lab.launchers.short_run import ShortRun
from scripts.compare import COLUMNS, ENERGY, Entry, Result, report, rows

STRATEGIES = ["scratch", "tp", "mesh strategy.pp=3 strategy.num_microbatches=3"]
TITLES = [*STRATEGIES[:-1], "mesh pp=3 num_microbatches=3"]


def rows_of(output: str) -> dict[str, list[str]]:
    """Return the cells of the table by strategy."""
    lines = ([cell.strip() for cell in line.split("|")] for line in output.splitlines())
    return {row[1]: row[2:-1] for row in lines if len(row) == 12}


@pytest.mark.slow
def test_compare_shows_the_same_weights_for_all_strategies(tmp_path):
    """On three ranks, on which strategies for even numbers cannot run."""
    out = tmp_path / "compare"
    chosen = [
        "--strategies",
        *STRATEGIES,
        "--",
        *SMALL,
        "epochs=4",
        "model=lenet",
        "data.dataset.channels=1",
    ]
    code, output = launch(f"python scripts/compare.py --ranks 3 --out {out}", *chosen)
    assert code == 0, output
    table = rows_of(output)
    assert set(table) - {"strategy", "---"} == {"single", *TITLES}
    for name in ("scratch", TITLES[-1]):
        assert table[name][0] == "3"
        assert float(table[name][-2]) < 1e-6, "the weights after 5 steps differ from single's"
        assert float(table[name][-1]) < 1e-6, "the weights at the end differ from single's"
        assert table[name][6] == table["single"][6], "the test accuracy differs"
        assert int(table[name][5].removesuffix(" MiB").replace(",", "")) > 100
    assert float(table["scratch"][-1]) > 0, "no rounding difference: was single's checkpoint read?"
    assert table["tp"][1].startswith("not run: strategy.tp=2: cannot lay 3 ranks")
    assert (out / "report.md").read_text() in output
    assert "- mesh_pp_3_num_microbatches_3-3: bubble: the busiest rank" in output
    assert " tp 'mesh strategy.pp=3 strategy.num_microbatches=3' -- " in output, (
        "the command cannot be repeated"
    )
    assert (out / "mesh_pp_3_num_microbatches_3-3" / "config.yaml").exists()


def result_of(
    entry: Entry,
    seconds: list[float],
    rates: list[float],
    checkpoints: dict[int, Path] | None = None,
) -> Result:
    records = [
        {"seconds": took, "samples_per_second": rate, "test_accuracy": 0.5}
        for took, rate in zip(seconds, rates, strict=True)
    ]
    return Result(entry, ShortRun(records, None), checkpoints or {})


def save_weights(folder: Path, by_step: dict[int, float]) -> dict[int, Path]:
    """Save checkpoints, by step, of weights of which one has a value and the others are zero."""
    paths = {step: folder / f"{step}-{value}.pt" for step, value in by_step.items()}
    for step, value in by_step.items():
        torch.save(
            {
                "model": {
                    "a": torch.zeros(2),
                    "b": torch.tensor([0.0, value]),
                    "count": torch.tensor(step),
                }
            },
            paths[step],
        )
    return paths


def test_rows_compare_every_strategy_with_single(tmp_path):
    """The first epoch, which allocates and tunes, is excluded from the throughput."""
    saved = {
        name: save_weights(tmp_path, dict(zip((1, 5, 20, 60), values, strict=True)))
        for name, values in {
            "single": (0, 0, 0, 0),
            "ddp": (0, 1e-8, 1e-5, 2e-3),
            "fsdp": (0, 3e-8, 1e-6, 1e-3),
        }.items()
    }
    results = [
        result_of(
            Entry("single", [], None, 1), [9.0, 4.0, 4.0], [10.0, 100.0, 100.0], saved["single"]
        ),
        result_of(Entry("ddp", [], 2, 2), [9.0, 2.5, 2.5], [10.0, 160.0, 160.0], saved["ddp"]),
        result_of(Entry("fsdp", [], 4, 4), [9.0, 2.0, 2.0], [10.0, 200.0, 200.0], saved["fsdp"]),
    ]
    assert rows(results) == [
        (
            "single",
            "1",
            "4.00",
            "100",
            "1.00",
            "100%",
            "not measured",
            "0.5000",
            "0.0e+00",
            "0.0e+00",
        ),
        ("ddp", "2", "2.50", "160", "1.60", "80%", "not measured", "0.5000", "1.0e-08", "2.0e-03"),
        ("fsdp", "4", "2.00", "200", "2.00", "50%", "not measured", "0.5000", "3.0e-08", "1.0e-03"),
    ]


def test_table_has_the_energy_where_a_run_has_counted_it():
    """The first epoch is left out of the joules a sample; kWh are those of the whole run."""
    results = [
        result_of(Entry("single", [], None, 1), [9.0, 4.0, 4.0], [10.0, 100.0, 100.0]),
        result_of(Entry("ddp", [], 2, 2), [9.0, 2.5, 2.5], [10.0, 160.0, 160.0]),
    ]
    joules = zip((9.0, 0.5, 0.25), (1.0, 1.5, 2.0), strict=True)
    for record, (by_sample, total) in zip(results[0].run.records, joules, strict=True):
        record |= {"joules_per_sample": by_sample, "energy_kWh": total}
    place = COLUMNS.index(ENERGY[0])
    table = rows(results)
    assert [row[place : place + 2] for row in table] == [("0.375", "2"), ("", "")]
    assert [len(row) for row in table] == [len(COLUMNS)] * 2
    assert f"| {' | '.join(COLUMNS)} |" in report(table, [], [], True).splitlines()
    without = [name for name in COLUMNS if name not in ENERGY]
    assert f"| {' | '.join(without)} |" in report([], [], [], False).splitlines()


def test_compare_ends_where_no_step_can_be_profiled(tmp_path):
    code, output = launch(
        f"python scripts/compare.py --out {tmp_path} --strategies scratch --", *SMALL, "epochs=1"
    )
    assert (code, "scratch" in output) == (1, False)
    assert output.endswith(
        "error: nothing ran: profile=true: needs 16 steps of training, and this run has 5; raise "
        "epochs\n"
    )


def test_compare_refuses_a_directory_that_is_not_empty(tmp_path):
    """Otherwise numbers of other runs could be mistaken for those of this report."""
    (tmp_path / "other").touch()
    code, output = launch(f"python scripts/compare.py --out {tmp_path}")
    assert (code, output) == (1, f"error: --out {tmp_path}: is not empty; use another folder\n")
