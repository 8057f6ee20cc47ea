"""scheduler=multi_step"""

from settings import GAMMA, MILESTONES, WARMUP_STEPS


def lr_factor(step: int, steps_per_epoch: int) -> float:
    """Return the factor of the learning rate in a step from 0: it changes at milestones."""
    if WARMUP_STEPS > 0 and step < WARMUP_STEPS:
        return (step + 1) / (WARMUP_STEPS + 1)
    epoch = step / steps_per_epoch
    return GAMMA ** sum(epoch >= milestone for milestone in MILESTONES)
