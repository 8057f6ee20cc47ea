"""Errors shown without a traceback: what is wrong, the value, what is allowed, and what to do."""

import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

# The values of the field `kind` of failure.json, from which scripts read why a launch failed. The
# text in its field `message` is for people and may change.
FailureKind = Literal[
    "lost_rank", "lost_node", "hang", "exception", "not_finite", "replicas_drifted", "checkpoint"
]
# What to do about errors of torch that the user's choices cause, by a part of their texts.
ADVICE = {
    "Expected more than 1 value per channel when training": (
        "BatchNorm cannot compute the variance of one value. Choose a batch_size with which each "
        "rank, and each micro-batch, has two samples or more, in the last batch of an epoch, too; "
        "or strategy.batch_norm=sync, with which the ranks together need two"
    ),
    "out of memory": (
        "Lower batch_size, raise accumulate, or choose another strategy: ddp-lab advise, with the "
        "same overrides, predicts which ones fit"
    ),
}


class ConfigError(Exception):
    """A mistake in the config or on the command line.

    It is raised on every rank; rank 0 reports it.
    """


class NodeError(ConfigError):
    """A problem of one machine (its devices, its files).

    The first rank of each machine reports it.
    """


class SampleError(Exception):
    """A sample that a dataset cannot return. The rank that reads it raises and reports it."""


class TrainingError(Exception):
    """Training cannot continue, for a reason that is not a bug.

    The message explains it, so no traceback is shown.

    It is raised on all ranks.

    Args:
        message: What is wrong, and what to do.
        kind: The field `kind` of failure.json.
        rank: The rank on which the problem began; it reports the error.
    """

    def __init__(self, message: str, kind: FailureKind = "exception", rank: int = 0):
        super().__init__(message)
        self.kind: FailureKind = kind
        self.rank = rank


def divisors(number: int) -> str:
    """Return the divisors of a number, for a message."""
    return " or ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def multiples(number: int, of: int) -> str:
    """Return the multiples of `of`, but 0, next to a number that is none, for a message."""
    lower = number // of * of
    return " or ".join(str(size) for size in (lower, lower + of) if size)


def count(number: int, noun: str) -> str:
    """Return a number with its noun, for example "1 rank", "2 batches" or "1,024 steps"."""
    plural = "es" if noun.endswith(("batch", "ss", "branch")) else "s"
    ending = "" if number == 1 else plural
    return f"{number:,} {noun}{ending}"


def count_with_verb(number: int, noun: str) -> str:
    """Return a count and its verb, for example "1 rank is" or "2 ranks are"."""
    return f"{count(number, noun)} {is_or_are(number)}"


def is_or_are(number: int) -> str:
    """Return the verb of a count, where it does not directly follow the noun."""
    return "is" if number == 1 else "are"


def raise_first(problems: Iterable[str]) -> None:
    """Raise a ConfigError with the first problem of a rank that has one; "" is none."""
    for problem in filter(None, problems):
        raise ConfigError(problem)


def first_few(values: Iterable[object], most: int) -> str:
    """Return values, separated by commas, and dots in place of those after the first `most`."""
    texts = [str(value) for value in values]
    dots = ["..."] if len(texts) > most else []
    return ", ".join([*texts[:most], *dots])


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error and, if it was raised in the user's code, the place.

    No full stop ends it.
    """
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """Return where in the user's code an error was raised, as "(file, line)", or ""."""
    others = [
        Path(__file__).parents[1],
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    ]
    places = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and not any(folder in Path(frame.filename).parents for folder in others)
    ]
    return f" ({Path(places[-1].filename).name}, line {places[-1].lineno})" if places else ""


def advice(error: str) -> str:
    """Return a line that says what to do about an error of torch; "" for an unknown error.

    Args:
        error: the text of the error and of its causes.
    """
    return next((f"\n{todo}" for part, todo in ADVICE.items() if part in error), "")
