"""Where the error of each program of the museum is, and the lines that mend it."""

from importlib.resources import files
from typing import NamedTuple


class Mend(NamedTuple):
    """How a program is mended.

    Attributes:
        wrong: the lines of the error, as they are in the file, once.
        right: the lines in their place.
        symptom: what a learner sees, in a few words.
    """

    wrong: str
    right: str
    symptom: str


MENDS = {
    "mean_of_means": Mend(
        "    return (losses * mask).sum() / mask.sum()\n",
        "    count = mask.sum().double()\n"
        "    ranks = 1\n"
        "    if dist.is_initialized():\n"
        "        dist.all_reduce(count)\n"
        "        ranks = dist.get_world_size()\n"
        "    return (losses * mask).sum() * ranks / count\n",
        "the sequences have different lengths, and no gradient has a constant factor",
    ),
    "clip_by_local_norm": Mend(
        "    clip_grad_norm_(model.parameters(), MAX_NORM)\n"
        "    if world_size > 1:\n"
        "        average(gradients, world_size)\n",
        "    if world_size > 1:\n"
        "        average(gradients, world_size)\n"
        "    clip_grad_norm_(model.parameters(), MAX_NORM)\n",
        "no gradient has a constant factor, and all are right if nothing is clipped",
    ),
    "pipeline_loss_scale": Mend(
        "            loss_of(outputs).backward()\n",
        "            (loss_of(outputs) / len(left)).backward()\n",
        "all gradients are x8, for any number of ranks",
    ),
    "replicated_bias": Mend(
        "    dist.all_reduce(bias.grad)\n",
        "",
        "the gradient of the bias is x2 on two ranks, and the others are right",
    ),
    "tied_weights": Mend(
        "    dist.barrier(group=pair)\n",
        "    dist.all_reduce(table.grad, group=pair)\n",
        "only the gradient of the table differs, and the first rank's and the last's add up to it",
    ),
    "last_micro_batch": Mend(
        "        with model.no_sync() if world_size > 1 and is_last else nullcontext():\n",
        "        with model.no_sync() if world_size > 1 and not is_last else nullcontext():\n",
        "the ranks have different gradients, whose mean is right",
    ),
    "sum_for_mean": Mend(
        "    dist.all_reduce(bucket)\n",
        "    dist.all_reduce(bucket)\n    bucket /= dist.get_world_size()\n",
        "all gradients are x2 on two ranks and x4 on four",
    ),
    "mean_for_sum": Mend(
        "    loss = loss_sum / len(batch)\n",
        "    loss = loss_sum * world_size / len(batch)\n",
        "all gradients are x1/2 on two ranks and x1/4 on four",
    ),
    "zero_grad_inside": Mend(
        "        model.zero_grad()\n",
        "",
        "half of the samples count in no gradient",
    ),
    "schedule_by_ranks": Mend(
        "        for _ in range(world_size):\n            schedule.step()\n",
        "        schedule.step()\n",
        "the first step is right, and later ones are too small by a factor that all weights share",
    ),
    "running_statistics": Mend(
        "            dist.broadcast(buffer, world_size - 1)\n",
        "            dist.all_reduce(buffer)\n            buffer /= world_size\n",
        "the gradients are right, and the averages are those of a part of the samples",
    ),
    "adapters_per_rank": Mend(
        "    torch.manual_seed(SEED + rank)\n    model = Adapted(layer)\n",
        "    torch.manual_seed(SEED)\n    model = Adapted(layer)\n",
        "the ranks have different weights, of which those of rank 0 are nearly right",
    ),
    "order_of_epochs": Mend(
        "        if isinstance(sampler, RandomSampler):\n"
        "            sampler.generator.manual_seed(SEED + epoch)\n",
        "        if isinstance(sampler, RandomSampler):\n"
        "            sampler.generator.manual_seed(SEED + epoch)\n"
        "        else:\n"
        "            sampler.set_epoch(epoch)\n",
        "the gradients of the first epoch are right, and come again in the others",
    ),
    "padded_last_batch": Mend(
        "    losses.mean().backward()\n",
        "    real = torch.arange(len(losses)) * world_size + rank < SAMPLES\n"
        "    (losses[real].sum() * world_size / SAMPLES).backward()\n",
        "the first samples count twice",
    ),
    "average_of_shards": Mend(
        "        for name in [*sharded, *weights]:\n",
        "        for name in weights:\n",
        "the weights are right, and one average is too near to its weight",
    ),
    "norm_of_shards": Mend(
        "    return squares.sqrt()\n",
        "    if world_size > 1:\n        dist.all_reduce(squares)\n    return squares.sqrt()\n",
        "each rank's rows have a factor of their own",
    ),
}


def source_of(name: str) -> str:
    """Return the source of a program of the museum."""
    return (files("ddp_lab.exercises.museum") / f"{name}.py").read_text()


def lines_of(name: str) -> range:
    """Return the numbers of the lines of a program's error, from 1."""
    before, wrong, _ = source_of(name).partition(MENDS[name].wrong)
    first = before.count("\n") + 1
    return range(first, first + wrong.count("\n"))
