"""Write GPipe's schedule of a pipeline.

The layers are cut into stages, one on each rank, and a batch into micro-batches, so that stages
work at the same time. On a stage the forward pass F(m) of micro-batch m needs that of the stage
before, and its backward pass B(m) that of the stage after. GPipe (Huang et al. 2019) computes all
forward passes, then all backward passes.

    stages 3, micro-batches 4, one column for each unit of time:
    stage 0   F0 F1 F2 F3          .  .  B0 B1 B2 B3
    stage 1      F0 F1 F2 F3    .  B0 B1 B2 B3
    stage 2         F0 F1 F2 F3 B0 B1 B2 B3

With p stages and m micro-batches it takes 2 (m + p - 1) units of time. Every stage keeps the
activations of m micro-batches.
"""


def gpipe(stage: int, stages: int, micro_batches: int) -> list[tuple[str, int]]:
    """Return what a stage computes, in order.

    Args:
        stage: number of the stage, from 0.
        stages: number of stages.
        micro_batches: number of micro-batches.

    Returns:
        Pairs of "F" or "B" and the number of the micro-batch, for example [("F", 0), ("F", 1),
        ("B", 0), ("B", 1)].
    """
    return [("F", m) for m in range(micro_batches)] + [("B", m) for m in range(micro_batches)]
