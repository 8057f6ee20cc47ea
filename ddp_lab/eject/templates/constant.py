"""scheduler=constant"""

from settings import WARMUP_STEPS


def lr_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step from 0."""
    if WARMUP_STEPS > 0:
        return min(1.0, (step + 1) / (WARMUP_STEPS + 1))
    else:
        return 1.0
