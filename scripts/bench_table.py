"""The table of scripts/bench.py: rates, efficiency, and memory beside what advise plans."""

import statistics

from scripts.bench_pairs import lower_bound

HEAD = (
    "model",
    "devices",
    "strategy",
    "loop",
    "per second",
    "+-",
    "of one",
    "efficiency",
    "GiB",
    "planned GiB",
    "against the strongest other",
)
KEYS = 4  # columns that say which row it is


def is_same(one: dict, other: dict, *keys: str) -> bool:
    """Return whether two rows have the same values of some keys."""
    return all(one[key] == other[key] for key in keys)


def is_ours(row: dict) -> bool:
    """Return whether the loop of a row is train.py's."""
    return row["loop"].startswith("ours")


def table(rows: list[dict]) -> str:
    """Return the rates as a Markdown table.

    `of one` is the rate in multiples of that of the same model and loop on one device, `efficiency`
    its share of the number of devices; of a pipeline also without the idle time of its schedule.
    `GiB` is the peak of the fullest device, as torch counts it on a GPU, and on a CPU the resident
    size of the largest process; `planned GiB` what `ddp-lab advise` plans. The last column is the
    ratio to the strongest loop that is not ours, of the same strategy. A loop that is named with
    "no cuda_graph" was asked for it, and the run has disabled it.
    """
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows:
        without = "".join(f", no {option}" for option in row.get("disabled", []))
        cells = [row["model"], str(row["devices"]), row["strategy"], f"{row['loop']}{without}"]
        cells += rate_cells(row, rows) if "rate" in row else other_cells(row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def other_cells(row: dict) -> list[str]:
    """Return the cells of a row that was not measured, after that of its loop."""
    cells = dict.fromkeys(HEAD[KEYS:], "")
    cells["per second"] = f"not run: {row['skipped']}" if "skipped" in row else "not measured"
    cells["planned GiB"] = gib(row, "planned")
    return list(cells.values())


def rate_cells(row: dict, rows: list[dict]) -> list[str]:
    """Return the cells of a row that was measured, after that of its loop."""
    alike = [each for each in rows if is_same(each, row, "model", "devices") and "rate" in each]
    others = [each for each in alike if not is_ours(each)]
    same = [each for each in others if each["strategy"] == row["strategy"]]
    best = max((each["rate"] for each in same or others), default=None)
    alone = [each for each in rows if is_same(each, row, "model", "loop") and each["devices"] == 1]
    one = next((each["rate"] for each in alone if "rate" in each), None)
    ratio = f"{row['rate'] / best:.2f}x" if best else ""
    return [
        f"{row['rate']:,.0f}",
        f"{row['spread']:.1%}",
        f"{row['rate'] / one:.2f}x" if one else "",
        efficiency(row, one) if one else "",
        gib(row, "peak"),
        gib(row, "planned"),
        describe_pairs(row) if "ratios" in row else ratio,
    ]


def efficiency(row: dict, one: float) -> str:
    """Return the share of so many times the rate of one device, of a pipeline also of busy time."""
    share = row["rate"] / one / row["devices"]
    bubble = row.get("bubble", 0)
    if not bubble:
        return f"{share:.0%}"
    return f"{share:.0%}; {share / (1 - bubble):.0%} without the bubble of {bubble:.0%}"


def gib(row: dict, key: str) -> str:
    """Return a number of bytes of a row in GiB; "" if it is not known."""
    return f"{row[key] / 2**30:.2f}" if key in row else ""


def describe_pairs(row: dict) -> str:
    """Return the median of the ratios of a row and their lower 95 % bounds."""
    shown = []
    for name, clock in (("ratios", "time"), ("cpu_ratios", "CPU time")):
        median = statistics.median(row[name])
        shown.append(f"{median:.3f}, at least {lower_bound(row[name]):.3f}, by {clock}")
    return f"{'; '.join(shown)} ({len(row['ratios'])} pairs)"
