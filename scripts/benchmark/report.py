"""The table and the plot of the measured rates."""

from pathlib import Path

from ddp_lab.observe.plot import Curve, bars, beside, curves


def is_ours(loop: str) -> bool:
    """Return whether a loop is train.py's, or its kernels alone."""
    return loop.startswith("ours") or loop == "kernels"


def strongest(rows: list[dict], model: str, devices: int) -> float | None:
    """Return the highest rate of the loops that are not ours; None if there is none."""
    others = [row for row in rows if (row["model"], row["devices"]) == (model, devices) and not is_ours(row["loop"])]
    return max((row["rate"] for row in others if "rate" in row), default=None)


def table(rows: list[dict]) -> str:
    """Return the rates as a table, with their ratios.

    The ratios are to the strongest loop that is not ours, and to the tutorial, on as many devices; to one device (linear); and
    to the kernels alone.
    """
    found = {(row["model"], row["devices"], row["loop"], row["strategy"]): row.get("rate") for row in rows}

    def of(row: dict, devices: int, loop: str) -> float | None:
        names = {"tutorial": ("ddp",), "kernels": (row["strategy"], "single")}.get(loop, (row["strategy"], "single"))
        return next((found[key] for name in names if (key := (row["model"], devices, loop, name)) in found), None)

    def times(row: dict, base: float | None) -> str:
        return f"{row['rate'] / base:.2f}x" if base else ""

    lines = ["| model | devices | loop | strategy | images/s | +- | strongest other | tutorial | linear | kernels |"]
    lines.append("|" + "---|" * 10)
    for row in rows:
        head = f"| {row['model']} | {row['devices']} | {row['loop']} | {row['strategy']} |"
        if "skipped" in row:
            lines.append(f"{head} not run: {row['skipped']} | | | | | |")
            continue
        one, limit = of(row, 1, row["loop"]), of(row, row["devices"], "kernels")
        linear = f"{row['rate'] / one / row['devices']:.0%}" if one and row["devices"] > 1 else ""
        share = f"{row['rate'] / limit:.0%}" if limit and row["loop"] == "ours" else ""
        ratios = [times(row, strongest(rows, row["model"], row["devices"])), times(row, of(row, row["devices"], "tutorial"))]
        lines.append(f"{head} {row['rate']:,.0f} | {row['spread']:.1%} | {' | '.join([*ratios, linear, share])} |")
    return "\n".join(lines)


def turns_table(rows: list[dict]) -> str:
    """Return the comparison of `ours eager` with `bare` as a table."""
    lines = [
        "| model | devices | threads | batch | pairs | bare, images/s | ours | ratio | at least | CPU time: ratio | at least |"
    ]
    lines.append("|" + "---|" * 11)
    for row in rows:
        head = f"| {row['model']} | {row['devices']} | {row['threads']} | {row['batch']} |"
        if "skipped" in row:
            lines.append(f"{head} not run: {row['skipped']} | | | | | | |")
            continue
        ours, bare = row["rates"]
        ratios = " | ".join(f"{value:.3f}" for ratio in row["ratios"] for value in ratio)
        lines.append(f"{head} {row['pairs']} | {bare:,.0f} | {ours:,.0f} | {ratios} |")
    return "\n".join(lines)


def draw(rows: list[dict], path: Path) -> None:
    """Plot, for each model, the loops' rates on the most devices, and the rate of `ours` by number of devices."""
    plots = []
    measured = [row for row in rows if "rate" in row]
    for model in dict.fromkeys(row["model"] for row in measured):
        mine = [row for row in measured if row["model"] == model]
        most = max(row["devices"] for row in mine)
        best = {}
        for row in mine:
            if row["devices"] == most:
                best[row["loop"]] = max(row["rate"], best.get(row["loop"], 0.0))
        plots.append(bars(f"{model} on {most} device{'s' * (most > 1)}", "images/s", best))
        alone = next((row["rate"] for row in mine if row["devices"] == 1 and row["loop"] == "ours"), None)
        lines = []
        for strategy in dict.fromkeys(row["strategy"] for row in mine if row["loop"] == "ours" and row["devices"] > 1):
            points = [(row["devices"], row["rate"]) for row in mine if (row["loop"], row["strategy"]) == ("ours", strategy)]
            lines.append(Curve(strategy, [*([(1, alone)] if alone else []), *points]))
        if lines and alone:
            lines.append(Curve("linear", [(1, alone), (most, most * alone)], dashed=True))
            plots.append(curves(f"{model}: more devices", "devices", "images/s", lines, zero=True))
    if plots:
        beside(plots, path)
