"""The proof of a run of a config: `ddp-lab verify`."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch

from ddp_lab.config.build import Config, find_target
from ddp_lab.proof.compare import RunReport, compare
from ddp_lab.proof.plans import Plan, is_chosen, make_plans, single
from ddp_lab.proof.subject import ConfigRun
from ddp_lab.proof.workers import Workers

# What the ranks would import, each by itself.
FEW = 4  # plans for which it does not pay
USED = (
    "ddp_lab.strategies.ddp",
    "ddp_lab.strategies.mesh",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


def verify_run(
    cfg: Config, strategy: str | None, ranks: int, only: tuple[str, ...] = ()
) -> RunReport:
    """Compare the strategies with `single` on a run.

    Args:
        cfg: the config, checked.
        strategy: the overrides of the run's strategy, the name of its row; None: it has none.
        ranks: the most ranks to start.
        only: names of the strategies to compare besides it; empty: all of them.

    Raises:
        ConfigError: the run is refused, or is not the same twice.
    """
    torch.set_num_threads(1)  # a forked process cannot use the threads of this one
    subject = ConfigRun.of(cfg)
    options = subject.strategy_options()
    run = None
    if strategy is not None:
        run = plan_of_run(strategy, options, ranks)
    facts = subject.facts()
    plans = make_plans(run, options, ranks, facts.accumulate, facts.has_batch_norm)
    plans = [plan for plan in plans if is_chosen(plan, only)]
    preload(plans)
    with Workers(subject, ranks) as workers:
        return compare(workers, single(), plans, facts)


def preload(plans: Sequence[Plan]) -> None:
    """Import what many plans would import, on each of their ranks."""
    for name in USED if len(plans) > FEW else ():
        importlib.import_module(name)


def plan_of_run(strategy: str, options: dict[str, Any], ranks: int) -> Plan:
    """Return the plan of the run's own strategy.

    Args:
        strategy: its overrides.
        options: the config group `strategy`.
        ranks: the most ranks to start.
    """
    if find_target("strategy._target_", options["_target_"]).one_process:
        return Plan(strategy, 1, options)
    return Plan(f"{strategy} on {ranks}", ranks, options)
