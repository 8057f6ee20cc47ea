"""Predictions as a table, as JSON and as a picture."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddp_lab.estimate.advice import Advice, Prediction, Refused
from ddp_lab.estimate.cards import GiB
from ddp_lab.models.trial import some
from ddp_lab.observe.plot import GREY, Plot, beside, stacked

COLUMNS = ("predicted", "GPUs", "GiB", "state", "activations", "others", "ms/step", "exposed", "images/s", "GPU-hours", "")
RARE = ("averages", "buffers", "copies", "host")
MOST = 24  # strategies in the table and in the picture, without --all


def table(advice: Advice, everything: bool) -> str:
    """Return the predictions as lines of text, and the recommendation below them.

    Args:
        everything: whether to list all predictions, and what is refused with the reasons.
    """
    shown = advice.listed if everything else best_of(advice)
    lines = aligned([COLUMNS, *(row(prediction) for prediction in shown)])
    if own := advice.own_refusal:
        lines.insert(1, f"{own.name}  is refused: {own.explanation}")
    hidden = len(advice.predictions) - len(shown)
    notes = [f"and {hidden} more, which --all shows"] if hidden else []
    notes += [*advice.notes, *refusals([each for each in advice.refused if each is not own], everything)]
    best = advice.ranked[0] if advice.ranked else advice.least
    detailed = [each for each in advice.listed if everything or each is best or each.overrides == advice.own]
    return "\n".join([*advice.head, "", *lines, *notes, "", *parts(detailed), "", advice.conclusion])


def refusals(refused: Sequence[Refused], everything: bool) -> list[str]:
    """Return what is refused with the reasons, of which each is given once.

    Args:
        everything: whether to list all of it; otherwise one line is about the reason that concerns the most strategies.
    """
    groups = dict[str, list[Refused]]()
    for each in refused:
        groups.setdefault(each.explanation, []).append(each)
    if everything:
        return [f"refused: {', '.join(each.name for each in group)}: {why}" for why, group in groups.items()]
    if not groups:
        return []
    why, group = max(groups.items(), key=lambda pair: (len({each.overrides[0] for each in pair[1]}), len(pair[1])))
    sentence = why.splitlines()[0].partition(". ")[0].rstrip(".")
    number = f"{len(refused)} {'is' if len(refused) == 1 else 'are'}"
    return [f"{number} refused, which --all lists; {some([each.name for each in group])}: {sentence}"]


def parts(predictions: Sequence[Prediction]) -> list[str]:
    """Return the lines of a table of the parts of the memory; of those that few runs have, only what a prediction has."""
    sizes = [vars(each.memory) | {"host": each.host} for each in predictions]
    names = [name for name in sizes[0] if name not in RARE or any(each[name] for each in sizes)] if sizes else []
    titles = ("GiB of the peak", *({"nccl": "NCCL", "host": "host memory"}.get(name, name) for name in names))
    rows = [(each.name, *(gib(size[name]) for name in names)) for each, size in zip(predictions, sizes, strict=True)]
    return aligned([titles, *rows]) if rows else []


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return rows as lines of text: the first column aligned to the left, all others to the right."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    lines = [f"{cells[0]:<{widths[0]}}  " + "  ".join(map(str.rjust, cells[1:], widths[1:])) for cells in rows]
    return [line.rstrip() for line in lines]


def gib(size: float) -> str:
    """Return a number of bytes in GiB, with more digits if two would be zeros."""
    if size == 0 or size >= 0.005 * GiB:
        return f"{size / GiB:,.2f}"
    return f"{size / GiB:.4f}" if size >= 1e-4 * GiB else "<0.0001"


def row(prediction: Prediction) -> tuple[str, ...]:
    """Return the cells of a prediction."""
    memory, time = prediction.memory, prediction.time
    state = memory.parameters + memory.gradients + memory.optimizer + memory.averages + memory.buffers
    notes = ["does not fit"] if not prediction.fits else []
    notes += [f"+ {gib(prediction.host)} in host memory"] if prediction.host else []
    sizes = (memory.total, state, memory.activations, memory.total - state - memory.activations)
    return (
        prediction.name,
        str(prediction.devices),
        *(f"{size / GiB:,.2f}" for size in sizes),
        f"{1000 * time.total:,.2f}",
        f"{(time.communication + time.bubble) / time.total:.0%}",
        f"{prediction.images_per_second:,.0f}",
        f"{prediction.gpu_hours:,.3g}",
        ", ".join(notes),
    )


def best_of(advice: Advice) -> list[Prediction]:
    """Return the first of each strategy, and the best of all that fit, in the order of the table."""
    first = {prediction.overrides[0]: prediction for prediction in reversed(advice.listed)}
    wanted = [*advice.listed[:1], *advice.ranked[:3], *first.values(), *advice.ranked]
    names = set(list(dict.fromkeys(prediction.name for prediction in wanted))[: MOST // 2])
    return [prediction for prediction in advice.listed if prediction.name in names]


def as_json(advice: Advice) -> dict[str, Any]:
    """Return the predictions as plain values: bytes and seconds."""
    return {
        "head": advice.head,
        "card_memory": advice.memory,
        "own": advice.own,
        "predictions": [with_totals(prediction) for prediction in advice.listed],
        "notes": list(advice.notes),
        "refused": [asdict(refused) for refused in advice.refused],
        "recommended": advice.ranked[0].overrides if advice.ranked else None,
        "conclusion": advice.conclusion,
    }


def with_totals(prediction: Prediction) -> dict[str, Any]:
    """Return a prediction as plain values, with the sums of memory and time."""
    values = asdict(prediction)
    values["memory"] |= {"allocated": prediction.memory.allocated, "total": prediction.memory.total}
    values["time"] |= {"total": prediction.time.total}
    return values


def draw(advice: Advice, path: Path) -> None:
    """Draw the memory of the strategies in the table against the card's memory."""
    beside([memory_plot(best_of(advice), advice.memory)], path)


def memory_plot(predictions: Sequence[Prediction], card: float) -> Plot:
    """Return stacked bars of the memory of each prediction, and a line at the card's memory."""
    parts = {
        prediction.name: {name: size / GiB for name, size in vars(prediction.memory).items()} for prediction in predictions
    }
    plot = stacked("Predicted peak memory of a GPU; the line is the card's memory", "GiB", parts)

    def with_line(axes: Any) -> None:
        plot.draw(axes)
        axes.axvline(card / GiB, color=GREY, linestyle="--")
        axes.set_xlim(0, max(axes.get_xlim()[1], 1.05 * card / GiB))

    return plot._replace(draw=with_line)
