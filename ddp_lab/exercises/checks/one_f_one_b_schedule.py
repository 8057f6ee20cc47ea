"""Check of one_f_one_b_schedule."""

from types import ModuleType

import torch.distributed as dist

from ddp_lab.config.errors import count
from ddp_lab.exercises.checks.simulate import check_actions, peak, simulate
from ddp_lab.exercises.explain import Call, Wrong, of_all_ranks, plain

WRITE = ("one_f_one_b",)
RANKS = (2, 3, 4)
HINTS = (
    "Three parts: forward passes alone, one forward and one backward pass alternately, backward "
    "passes alone.",
    "The last stage needs no warm-up: it computes F0 B0 F1 B1. Each stage before needs one forward "
    "pass more.",
    "After the warm-up of w passes, the pairs are F(w+i) B(i); there may be fewer micro-batches "
    "than stages: min().",
)


def check(theirs: ModuleType, calls: list[Call]) -> None:
    stage = dist.get_rank()
    stages = dist.get_world_size()
    for micro_batches in (2 * stages, 1):
        schedules = of_all_ranks(plain(theirs.one_f_one_b(stage, stages, micro_batches)))
        schedules = [
            check_actions(actions, each, micro_batches) for each, actions in enumerate(schedules)
        ]
        time = simulate(schedules)
        expected = 2 * (micro_batches + stages - 1)
        text = f"With {count(micro_batches, 'micro-batch')} on {stages} stages, "
        for each, actions in enumerate(schedules):
            kinds = "".join(letter for letter, _ in actions)
            allowed = min(stages - each, micro_batches)
            if peak(actions) > allowed:
                text += (
                    f"stage {each} computes {kinds} and keeps "
                    f"{count(peak(actions), 'micro-batch')}; 1F1B keeps at most {allowed}. "
                )
                gpipe = kinds == "F" * micro_batches + "B" * micro_batches
                if gpipe:
                    text += "This is GPipe's schedule."
                else:
                    text += "Its warm-up is too long: one pass for each stage after it."
                raise Wrong(text)

        if time != expected:
            text += (
                f"the schedule takes {time} units of time, expected 2 (m + p - 1) = {expected}. "
            )
            short = [
                each
                for each, actions in enumerate(schedules)
                if peak(actions) < min(stages - each, micro_batches)
            ]
            if short:
                text += (
                    f"The warm-up of stage {short[0]} is too short, so later stages wait for it."
                )
            raise Wrong(text)
