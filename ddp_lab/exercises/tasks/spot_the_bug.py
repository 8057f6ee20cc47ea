"""Find the line of the error in each program of `museum/`, which is beside this file.

The programs train wrongly on several ranks and rightly on one, and none of them raises an error or
looks wrong in its loss. On one device the gradient of a step is that of the mean over the global
batch. It differs on several as soon as a rank divides by a number of its own, a sum is missing or
made twice, samples are lost or count twice, or something that all ranks should share, such as a
seed, an order or a schedule, is one rank's own. The numbers tell these apart: a factor that is the
number of ranks, ranks that disagree, one tensor among right ones, a step after right ones.
`python museum/NAME.py` shows them.
"""


def wrong_lines() -> dict[str, int]:
    """Return by the name of each program the number of the line of its error, counted from 1.

    If an error has several lines, each of them is right.
    """
    return {
        "mean_of_means": 32,
        "clip_by_local_norm": 38,
        "pipeline_loss_scale": 50,
        "replicated_bias": 54,
        "tied_weights": 52,
        "last_micro_batch": 31,
        "sum_for_mean": 18,
        "mean_for_sum": 21,
        "zero_grad_inside": 20,
        "schedule_by_ranks": 33,
        "running_statistics": 50,
        "adapters_per_rank": 36,
        "order_of_epochs": 36,
        "padded_last_batch": 26,
        "average_of_shards": 48,
        "norm_of_shards": 35,
    }
