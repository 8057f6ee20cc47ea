"""The time and the memory that a pipeline's schedule takes.

Every forward and backward pass takes one unit of time.
"""

from typing import Any, cast

from ddp_lab.config.errors import count
from ddp_lab.exercises.explain import Wrong

Action = tuple[str, int]


def check_actions(actions: object, stage: int, micro_batches: int) -> list[Action]:
    """Return a stage's actions.

    Raises:
        Wrong: they are not each micro-batch's forward and backward pass, once, in this order.
    """
    text = (
        f"The schedule of stage {stage} with {count(micro_batches, 'micro-batch')} is {actions}. "
    )
    if not isinstance(actions, list) or not all(
        isinstance(each, list) and len(cast(Any, each)) == 2 and each[0] in ("F", "B")
        for each in actions
    ):
        raise Wrong(text + 'Expected a list of pairs such as ("F", 0).')

    actions = [(kind, int(micro_batch)) for kind, micro_batch in cast(Any, actions)]
    expected = {(kind, micro_batch) for kind in "FB" for micro_batch in range(micro_batches)}
    missing = sorted(expected - set(actions))
    others = sorted(set(actions) - expected)
    if missing:
        extra = f", and there is no {others}." if others else "."
        raise Wrong(f"{text}It lacks {missing}{extra}")
    if others:
        raise Wrong(f"{text}There is no {others}.")

    twice = sorted({each for each in actions if actions.count(each) > 1})
    if twice:
        raise Wrong(text + f"It has {twice} more than once.")
    for micro_batch in range(micro_batches):
        if actions.index(("B", micro_batch)) < actions.index(("F", micro_batch)):
            raise Wrong(
                text
                + f"The backward pass of micro-batch {micro_batch} comes before its forward pass."
            )
    return actions


def simulate(schedules: list[list[Action]]) -> int:
    """Return the units of time until all stages are done.

    Args:
        schedules: the actions of each stage.

    Raises:
        Wrong: stages wait for each other forever.
    """
    last = len(schedules) - 1
    done = dict[tuple[int, str, int], int]()
    positions = [0] * len(schedules)
    time = 0
    while any(
        position < len(actions) for position, actions in zip(positions, schedules, strict=True)
    ):
        ready = list[int]()
        for stage, actions in enumerate(schedules):
            if positions[stage] < len(actions):
                kind, micro_batch = actions[positions[stage]]
                before = stage - 1 if kind == "F" else stage + 1
                if not 0 <= before <= last or done.get((before, kind, micro_batch), time) < time:
                    ready.append(stage)

        if not ready:
            waits = [
                f"stage {stage} for {''.join(map(str, actions[positions[stage]]))} of its neighbour"
                for stage, actions in enumerate(schedules)
                if positions[stage] < len(actions)
            ]
            raise Wrong(f"Stages wait for each other forever: {', '.join(waits)}.")

        for stage in ready:
            done[(stage, *schedules[stage][positions[stage]])] = time
            positions[stage] += 1
        time += 1
    return time


def peak(actions: list[Action]) -> int:
    """Return the largest number of micro-batches whose activations a stage keeps at a time."""
    in_memory = 0
    highest = 0
    for kind, _ in actions:
        in_memory += 1 if kind == "F" else -1
        highest = max(highest, in_memory)
    return highest
