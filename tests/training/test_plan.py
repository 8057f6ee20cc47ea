"""The line of the log about the batch sizes of a run."""

import pytest

from ddp_lab.training.plan import TrainSizes


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "replicas", "factors"),
    [
        (64, 1, 2, "2 x 32"),
        (256, 4, 1, "1 x 4 x 64"),
        (256, 4, 2, "2 x 4 x 32"),
        (64, 3, 1, "1 x (2 x 22 + 20)"),
        (8, 5, 1, "1 x 4 x 2"),
        (10, 2, 2, "2 x (3 + 2)"),
        (4, 4, 1, "1 x 4 x 1"),
    ],
)
def test_line_has_the_micro_batches_of_gradient_accumulation(
    batch_size, accumulate, replicas, factors
):
    keys = {
        "batch_size": batch_size,
        "accumulate": accumulate,
        "scaling": "strong",
        "lr_scaling": "none",
        "lr_base_batch_size": 256,
    }
    sizes = TrainSizes.make(keys, 0.1, replicas, replicas, 1000)
    assert f" global batch {batch_size} = {factors}, " in str(sizes)
