"""Train models of other libraries under each strategy, and write the tables in docs/models.md.

python scripts/models_table.py                        about 35 minutes on two cores
python scripts/models_table.py --every-strategy       the second table only, about 15 minutes

The models, their data, the three steps and the worlds of the second table are those of
tests/support/models_of_others.py, which tests/strategies/test_models_of_others.py compares with one
device.
"""

import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
STRATEGIES = ("ddp", "fsdp", "pipeline")
ALL_MODELS = "<!-- table -->\n"
EVERY_STRATEGY = "<!-- every strategy -->\n"
END = "<!-- end of the table -->\n"
NOTE = "`python scripts/models_table.py`, CPU, torch {}, {}."
Results = Mapping[str, Mapping[str, str | float]]


def cell(result: str | float) -> str:
    """Return what a table says about a model under a strategy."""
    if not isinstance(result, float):
        return f"refused: {result}"
    return f"{result:.0e}" if result else "0"


def rows_of_models(results: Results) -> list[str]:
    """Return the table of all models, with a column for each strategy.

    Args:
        results: by strategy and model, the largest difference of a weight from that of `single`, or
            why the model is refused.
    """
    lines = [
        f"| model | {' | '.join(results)} |",
        f"|---{'|---' * len(results)}|",
    ]
    for model in next(iter(results.values())):
        cells = [cell(of_models[model]) for of_models in results.values()]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    return lines


def rows_of_worlds(results: Results, ranks: Mapping[str, int]) -> list[str]:
    """Return the table of all strategies, with a column for each model, and the refusals after it.

    Args:
        results: by world and model, as in `rows_of_models`.
        ranks: number of processes of each world.
    """
    models = [*next(iter(results.values()))]
    lines = [
        f"| strategy | ranks | {' | '.join(models)} |",
        f"|---|---{'|---' * len(models)}|",
    ]
    reasons: list[str] = []
    for world, of_models in results.items():
        refusals = [str(result) for result in of_models.values() if not isinstance(result, float)]
        if refusals:
            reasons += ["", f"Refused: {world}. {refusals[0]}."]
        cells = [
            cell(result) if isinstance(result, float) else "refused"
            for result in of_models.values()
        ]
        lines.append(f"| {world} | {ranks[world]} | {' | '.join(cells)} |")
    return lines + reasons


def write_table(lines: list[str], begin: str, page: Path) -> None:
    """Replace a table of a page.

    Args:
        lines: of the table.
        begin: the line before it; the next END is after it.
        page: with these lines.
    """
    note = NOTE.format(torch.__version__, date.today())
    text = page.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
    page.write_text(f"{before}{begin}\n{table}\n\n{note}\n\n{END}{after}")


def compare_all_models(folder: Path) -> Results:
    """Return the results of all models under STRATEGIES, on two ranks."""
    from models_of_others import MODELS, train_all
    from worlds import run_world

    names = list(MODELS)
    run_world(1, train_all, "single", names, folder, timeout=900)
    results: dict[str, dict[str, str | float]] = {}
    for strategy in STRATEGIES:
        results[strategy] = run_world(2, train_all, strategy, names, folder, timeout=1800)[0]
        print(strategy, results[strategy], flush=True)
    return results


def compare_every_strategy(folder: Path) -> Results:
    """Return the results of the models of PLANS in all worlds."""
    from models_of_others import PLANS, WORLDS, train_all, train_planned
    from worlds import run_world

    run_world(1, train_all, "single", list(PLANS), folder, timeout=900)
    results: dict[str, dict[str, str | float]] = {}
    for name, world in WORLDS.items():
        results[name] = run_world(
            world.ranks, train_planned, world, list(PLANS), folder, timeout=900
        )[0]
        print(name, results[name], flush=True)
    return results


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from models_of_others import WORLDS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "--every-strategy" not in sys.argv:
            write_table(rows_of_models(compare_all_models(folder)), ALL_MODELS, PAGE)
        ranks = {name: world.ranks for name, world in WORLDS.items()}
        results = compare_every_strategy(folder)
        write_table(rows_of_worlds(results, ranks), EVERY_STRATEGY, PAGE)


if __name__ == "__main__":
    main()
