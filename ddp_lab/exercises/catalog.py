"""The exercises in their order, and the file that a learner starts from."""

import ast
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, cast

from ddp_lab.config.errors import ConfigError
from ddp_lab.exercises.explain import Call

TITLES = {
    "split_batch": "split a global batch over the ranks",
    "average_or_sum": "divide the loss so that summed gradients are those of the global mean",
    "star_all_reduce": "sum over the ranks through rank 0",
    "ring_all_reduce": "sum over the ranks by passing chunks around a ring",
    "buckets": "sum many gradients in a few collectives",
    "overlap": "sum gradients while the backward pass computes",
    "accumulate": "accumulate gradients over micro-batches, and sum them once",
    "sampler_order": "the samples of each rank in an epoch, as DistributedSampler orders them",
    "sync_batch_norm": "batch statistics over all ranks",
    "sharded_optimizer": "ZeRO-1: each rank keeps and updates a part of the optimizer's state",
    "fully_sharded": "gather the weights, compute, scatter the gradients",
    "column_parallel": "a linear layer split by its outputs",
    "row_parallel": "a linear layer split by its inputs",
    "gpipe_schedule": "GPipe's schedule of a pipeline",
    "one_f_one_b_schedule": "the 1F1B schedule, which keeps fewer activations",
    "resume_epoch": "resume in the middle of an epoch, on another number of ranks",
    "weighted_mean": "a weighted mean whose elements are spread over the ranks unequally",
    "spot_the_bug": "the line of the error in sixteen programs that train wrongly on several ranks",
}


class Check(Protocol):
    """A module of `exercises/checks`.

    Attributes:
        WRITE: names of the functions, or Class.method, whose bodies the learner writes.
        RANKS: the numbers of processes on which the solution is checked.
        HINTS: from a nudge to almost the solution.
        FILES: optional; texts of further files by their paths beside the learner's file.
    """

    WRITE: tuple[str, ...]
    RANKS: tuple[int, ...]
    HINTS: tuple[str, ...]

    def check(self, theirs: ModuleType, calls: list[Call]) -> None:
        """Run the learner's functions on this rank of an open gloo group.

        Args:
            theirs: the learner's module.
            calls: the calls of torch.distributed that the learner's file has made, which the
                solution extends.

        Raises:
            Wrong: with an explanation.
        """

    def explain_hang(self, waiting: Mapping[int, Call | None]) -> str | None:
        """Return why ranks wait for each other, if the exercise knows.

        Args:
            waiting: by rank, the call in which it waits; None: it has returned from the learner's
                functions.
        """


@dataclass(frozen=True)
class Exercise:
    """An exercise.

    Attributes:
        name: of the learner's file and of the modules in tasks/ and checks/.
        check: how a solution is checked.
        solution: source of the reference solution.
    """

    name: str
    check: Check
    solution: str

    def template(self) -> str:
        """Return the solution with `raise NotImplementedError` for what the learner writes."""
        lines = self.solution.splitlines()
        for name, node in reversed(list(functions(ast.parse(self.solution)))):
            if name in self.check.WRITE:
                first = node.body[0]
                last = node.body[-1]
                has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
                begin = (first.end_lineno or 0) if has_text else first.lineno - 1
                lines[begin : last.end_lineno] = [
                    " " * first.col_offset + "raise NotImplementedError"
                ]
        return "\n".join(lines) + "\n"


def functions(tree: ast.Module | ast.ClassDef) -> list[tuple[str, ast.FunctionDef]]:
    """Return the functions of a module by name, methods as Class.method, in the file's order."""
    members = list[tuple[str, ast.FunctionDef]]()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            members.append((node.name, node))
        elif isinstance(node, ast.ClassDef):
            members += [(f"{node.name}.{name}", method) for name, method in functions(node)]
    return members


def load(name: str) -> Exercise:
    """Return an exercise.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in TITLES:
        raise ConfigError(f"{name}: there is no such exercise; allowed: {', '.join(TITLES)}")
    check = importlib.import_module(f"ddp_lab.exercises.checks.{name}")
    task = importlib.import_module(f"ddp_lab.exercises.tasks.{name}")
    return Exercise(name, cast(Check, check), inspect.getsource(task))


def following(name: str) -> str | None:
    """Return the exercise after this one, or None after the last."""
    names = list(TITLES)
    return names[names.index(name) + 1] if name != names[-1] else None
