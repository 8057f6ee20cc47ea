"""The strategies that a proof compares with `single`, and on how many ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddp_lab.config.errors import ConfigError
from ddp_lab.lab.arguments import find_strategy

# By the number of ranks: strategies with their options. The most ranks come first, because ranks
# that have worked together can go on as fewer (workers.py).
CHOICES: Mapping[int, tuple[tuple[str, dict[str, Any]], ...]] = {
    4: (
        ("scratch", {"algorithm": "ring"}),
        ("ddp", {}),
        ("fsdp", {}),
        ("pipeline", {"schedule": "gpipe"}),
        ("ddp_pipeline", {"pp": 2}),
        ("tp", {"tp": 2}),
        ("mesh", {"shard": 2}),
        ("mesh", {"tp": 2, "shard": None}),
        ("mesh", {"pp": 2, "shard": None}),
        ("mesh", {"pp": 2, "tp": 2}),
    ),
    2: (
        ("scratch", {}),
        ("ddp", {}),
        ("fsdp", {}),
        ("pipeline", {}),
        ("tp", {"tp": 2}),
    ),
    1: (
        ("split", {"devices": ["cpu", "cpu"]}),
        ("dp", {}),
    ),
}
# the matrix of the equivalence tests has these sizes
MICRO_BATCHES = 4
# options of the run that a comparison needs under any strategy which has them
OF_MODEL = ("find_unused_parameters",)


@dataclass(frozen=True)
class Plan:
    """A strategy on some ranks.

    Attributes:
        name: in the table.
        ranks: number of processes.
        strategy: the config group `strategy`.
        accumulate: number of gradient-accumulation steps; None: that of the run.
        is_of_run: whether it is the strategy of the run.
    """

    name: str
    ranks: int
    strategy: dict[str, Any] = field(default_factory=dict[str, Any])
    accumulate: int | None = None
    is_of_run: bool = False


def single() -> Plan:
    """Return the plan of the reference."""
    return Plan("single", 1, find_strategy("single", {}))


def make_plans(
    run: Plan | None,
    options: Mapping[str, Any],
    most_ranks: int,
    accumulate: int,
    has_batch_norm: bool,
) -> list[Plan]:
    """Return what is compared with `single`: the strategy of the run first, if it has another one.

    Args:
        run: the strategy of the run; None: it is `single`.
        options: of that strategy.
        most_ranks: the most ranks to start.
        accumulate: number of gradient-accumulation steps of the run.
        has_batch_norm: whether the model has BatchNorm, whose statistics are then synchronised.
    """
    plans: list[Plan] = []
    if run is not None:
        plans.append(replace(run, is_of_run=True))
    if accumulate > 1 and not has_batch_norm:
        plans.append(Plan("single without accumulation", 1, single().strategy, 1))
    for ranks, choices in CHOICES.items():
        if ranks > most_ranks:
            continue
        for name, chosen in choices:
            node = find_strategy(name, chosen)
            of_model = {key: options[key] for key in OF_MODEL if key in options and key in node}
            if "num_microbatches" in node:
                of_model["num_microbatches"] = MICRO_BATCHES
            plan = Plan(name_of(name, chosen, ranks), ranks, node | of_model)
            if run is None or plan.name != run.name:
                plans.append(plan)
    if has_batch_norm:
        plans = [with_same_statistics(plan) for plan in plans]
    return plans


def with_same_statistics(plan: Plan) -> Plan:
    """Return the plan with BatchNorm's statistics of the global batch, as one device has them."""
    changes: dict[str, Any] = {}
    if "batch_norm" in plan.strategy:
        changes["batch_norm"] = "sync"
    if "num_microbatches" in plan.strategy:
        changes["num_microbatches"] = 1
    if "schedule" in plan.strategy:
        changes["schedule"] = "gpipe"  # which one micro-batch is enough for
    return replace(plan, strategy=plan.strategy | changes)


def name_of(name: str, options: Mapping[str, Any], ranks: int) -> str:
    """Return the name of a plan in the table, for example "mesh tp=2 on 4"."""
    chosen = [
        f"{key}={'null' if value is None else value}"
        for key, value in options.items()
        if key != "devices"
    ]
    return " ".join([name, *chosen, *([f"on {ranks}"] if ranks > 1 else [])])


def is_chosen(plan: Plan, only: Sequence[str]) -> bool:
    """Whether the row of a plan is asked for.

    Args:
        plan: of a strategy.
        only: names of the strategies that are asked for; empty: all of them.
    """
    always = plan.is_of_run or plan.accumulate is not None or not only
    return always or plan.name.split()[0] in only


def check_ranks(ranks: int, key: str) -> None:
    """Check the number of ranks.

    Args:
        ranks: the most to start.
        key: begins the message.

    Raises:
        ConfigError: it is not allowed.
    """
    allowed = [number for number in sorted(CHOICES) if number > 1]
    if ranks not in allowed:
        raise ConfigError(
            f"{key}{ranks}: must be {' or '.join(map(str, allowed))}, the ranks on the CPU that a "
            "comparison starts"
        )


def check_names(names: Sequence[str], key: str) -> None:
    """Check the names of strategies of which the rows are asked for.

    Args:
        names: of strategies.
        key: begins the message.

    Raises:
        ConfigError: one is not compared.
    """
    known = sorted({name for choices in CHOICES.values() for name, _ in choices})
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{key}{name}: there is no such strategy to compare; allowed: {', '.join(known)}"
            )


def batch_size_for(accumulate: int, micro_batches: int = MICRO_BATCHES) -> int:
    """Return a global batch that every plan can divide: each micro-batch has a sample or more.

    Args:
        accumulate: number of gradient-accumulation steps.
        micro_batches: of the strategy of the run; those of a plan are MICRO_BATCHES.
    """
    return max(16, 2 * max(micro_batches, MICRO_BATCHES) * accumulate)


def samples_for(batch_size: int) -> int:
    """Return the samples of three steps, of which the last is partial, and uneven over ranks."""
    return 2 * batch_size + batch_size // 2 - 3
