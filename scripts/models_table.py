"""Train models of other libraries under each strategy, and write the table in docs/models.md.

python scripts/models_table.py        takes about 15 minutes on two cores

The models, their data and the three steps are those of tests/support/models_of_others.py, which
tests/strategies/test_models_of_others.py compares with one device.
"""

import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
STRATEGIES = ("ddp", "fsdp", "pipeline")
BEGIN = "<!-- table -->\n"
END = "<!-- end of the table -->\n"


def cell(result: str | float) -> str:
    """Return what the table says about a model under a strategy."""
    if not isinstance(result, float):
        return f"refused: {result}"
    return f"{result:.0e}" if result else "0"


def write_table(results: Mapping[str, Mapping[str, str | float]], page: Path) -> None:
    """Replace the table of a page.

    Args:
        results: by strategy and model, the largest difference of a weight from that of `single`, or
            why the model is refused.
        page: with the lines BEGIN and END.
    """
    lines = [
        f"| model | {' | '.join(results)} |",
        f"|---{'|---' * len(results)}|",
    ]
    for model in next(iter(results.values())):
        cells = [cell(of_models[model]) for of_models in results.values()]
        lines.append(f"| {model} | {' | '.join(cells)} |")
    note = (
        f"`python scripts/models_table.py`, two processes on a CPU, torch {torch.__version__}, "
        f"{date.today()}."
    )
    text = page.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
    page.write_text(f"{before}{BEGIN}\n{table}\n\n{note}\n\n{END}{after}")


def main() -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    from models_of_others import MODELS, train_all
    from worlds import run_world

    names = list(MODELS)
    results: dict[str, dict[str, str | float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_world(1, train_all, "single", names, folder, timeout=900)
        for strategy in STRATEGIES:
            first, _ = run_world(2, train_all, strategy, names, folder, timeout=1800)
            results[strategy] = first
            print(strategy, first, flush=True)
    write_table(results, ROOT / "docs" / "models.md")


if __name__ == "__main__":
    main()
