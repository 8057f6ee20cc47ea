"""Write the 1F1B schedule of a pipeline.

GPipe keeps the activations of all micro-batches. 1F1B (Narayanan et al. 2019, "PipeDream"; here
with a flush after each batch) takes the same time, but begins with the backward passes as early as
it can: a stage computes only as many forward passes as there are stages after it, then one forward
and one backward pass alternately, then the remaining backward passes.

    stages 3, micro-batches 4:
    stage 0   F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3      2 forward passes to warm up
    stage 1      F0 F1 .  B0 F2 B1 F3 B2 .  B3         1
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3            0

A stage keeps the activations of at most stages - stage micro-batches.
"""


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return what a stage computes, in order.

    Args:
        stage: number of the stage, from 0.
        stages: number of stages.
        micro_batches: number of micro-batches; there may be fewer than stages.

    Returns:
        Pairs of "F" or "B" and the number of the micro-batch.
    """
    warm_up = min(stages - 1 - stage, micro_batches)
    actions = [("F", m) for m in range(warm_up)]
    for m in range(micro_batches - warm_up):
        actions += [("F", warm_up + m), ("B", m)]
    return actions + [("B", m) for m in range(micro_batches - warm_up, micro_batches)]
