"""What is said about metrics of an evaluation that are not finite, once for each."""

import math

from ddp_lab.observe.log import log
from ddp_lab.training.metrics import Evaluation


class NotFiniteNotes:
    """Logs which metrics of evaluations are not finite, each once.

    A set whose targets are all ignored has no metrics: one line is about the set. Its numbers are null in metrics.jsonl, as all
    that are not finite.

    Args:
        is_main: whether this rank logs.
    """

    def __init__(self, is_main: bool):
        self.is_main = is_main
        self._said: set[str] = set()

    def check(self, evaluation: Evaluation, name: str, when: str = "") -> None:
        """Log what is not finite in an evaluation and was finite, or not there, in those before.

        Args:
            evaluation: of a set.
            name: of the set, val or test; empty if it has none.
            when: the end of "is not finite", for example " after epoch 3".
        """
        if not evaluation.weight:
            about = f"{name} set" if name else "set that was evaluated"
            self._say(
                about,
                f"the {about} has no weight: all its targets are ignored, so that it has no loss, and its metrics mean "
                "nothing. Use a set with targets that count",
            )
            return
        values = evaluation.metrics(name) if name else evaluation.values
        never_best = ": such a value is never the best one" if name == "val" else ""
        for metric, value in values.items():
            if not math.isfinite(value):
                self._say(metric, f"{metric} is not finite ({value}){when}{never_best}")

    def _say(self, what: str, line: str) -> None:
        if self.is_main and what not in self._said:
            log.warning(line)
        self._said.add(what)
