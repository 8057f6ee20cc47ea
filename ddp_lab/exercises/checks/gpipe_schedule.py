"""Check of gpipe_schedule."""

from types import ModuleType

import torch.distributed as dist

from ddp_lab.config.errors import count
from ddp_lab.exercises.checks.simulate import check_actions, simulate
from ddp_lab.exercises.explain import Call, Wrong, of_all_ranks, plain

WRITE = ("gpipe",)
RANKS = (2, 3)
HINTS = (
    "Every stage computes the same list; only the waiting differs.",
    "A stage begins a micro-batch as soon as the stage before sends it: no stage has to wait in "
    "its list.",
    "Two comprehensions over range(micro_batches), one with F and one with B.",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    stage = dist.get_rank()
    stages = dist.get_world_size()
    for micro_batches in (4, 1):
        schedules = of_all_ranks(plain(theirs.gpipe(stage, stages, micro_batches)))
        schedules = [
            check_actions(actions, each, micro_batches) for each, actions in enumerate(schedules)
        ]
        time = simulate(schedules)
        expected = 2 * (micro_batches + stages - 1)
        text = (
            f"{count(micro_batches, 'micro-batch')} on {stages} stages: the schedule takes {time} "
            f"units of time, expected 2 (m + p - 1) = {expected}. "
        )

        for each, actions in enumerate(schedules):
            kinds = "".join(letter for letter, _ in actions)
            if "BF" in kinds:
                text = f"Stage {each} computes {kinds} ({text[:-2]}). "
                raise Wrong(
                    text + "GPipe computes all forward passes before the first backward pass."
                )

        if time != expected:
            orders = {
                tuple(m for letter, m in actions if letter == kind)
                for kind in "FB"
                for actions in schedules
            }
            if len(orders) > 1:
                text += (
                    "The stages take the micro-batches in different orders, so they wait for each "
                    "other."
                )
            raise Wrong(text)
