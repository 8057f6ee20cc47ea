"""scheduler=trapezoid"""

from settings import DECAY, WARMUP_STEPS


def lr_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate in a step from 0: it falls at the end."""
    if WARMUP_STEPS > 0:
        if step < WARMUP_STEPS:
            return (step + 1) / (WARMUP_STEPS + 1)
        progress = min(1.0, (step - WARMUP_STEPS) / (steps - WARMUP_STEPS))
    else:
        progress = min(1.0, step / steps)
    return 1.0 if progress <= 1 - DECAY else (1 - progress) / DECAY
