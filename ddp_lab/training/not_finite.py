"""The message about metrics of evaluations that are not finite.

It is one message for all of them, and names each metric once.
"""

import math
from collections.abc import Mapping

from ddp_lab.observe.log import log
from ddp_lab.training.metrics import Evaluation


class NotFiniteNotes:
    """Logs which metrics of evaluations are not finite, each once.

    A set whose targets are all ignored has no metrics: the message is about the set. Its numbers
    are null in metrics.jsonl, as all that are not finite.

    Args:
        is_main: whether this rank logs.
    """

    def __init__(self, is_main: bool):
        self.is_main = is_main
        self._said: set[str] = set()

    def check(self, evaluations: Mapping[str, Evaluation], when: str = "") -> None:
        """Log what is not finite in evaluations and was finite, or not there, in those before.

        Args:
            evaluations: by the name of the set, val or test; empty if it has none.
            when: the end of "not finite", for example " after epoch 3".
        """
        sets: list[str] = []
        metrics: dict[str, float] = {}
        for name, evaluation in evaluations.items():
            if not evaluation.weight:
                sets.append(f"{name} set" if name else "set that was evaluated")
                continue
            values = evaluation.metrics(name) if name else evaluation.values
            metrics |= {
                metric: value for metric, value in values.items() if not math.isfinite(value)
            }

        messages = [describe_sets([each for each in sets if each not in self._said])]
        messages.append(
            describe_metrics(
                {each: metrics[each] for each in metrics if each not in self._said}, when
            )
        )
        if self.is_main and any(messages):
            log.warning(". ".join(filter(None, messages)))
        self._said.update(sets, metrics)


def describe_sets(names: list[str]) -> str:
    """Return the message about sets without weight; "" if there is none."""
    if not names:
        return ""
    return (
        f"the {' and the '.join(names)} {'has' if len(names) == 1 else 'have'} no weight: all "
        "targets are ignored, so that there is no loss, and the metrics mean nothing. Use a set "
        "with targets that count"
    )


def describe_metrics(values: Mapping[str, float], when: str) -> str:
    """Return the message about metrics that are not finite; "" if there is none.

    `when` is as in `NotFiniteNotes.check`.
    """
    if not values:
        return ""
    listed = ", ".join(f"{name} ({value})" for name, value in values.items())
    never_best = ""
    if any(name.startswith("val_") for name in values):
        never_best = "; such a value is never the best one"
    return f"not finite{when}: {listed}{never_best}"
