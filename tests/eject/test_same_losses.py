"""`ddp-lab eject`: the plain file prints the losses of train.py to the last digit."""

import pytest
from ejected import losses_of_both

# 50 samples in batches of 24: the last batch has 2, of which one of four ranks has none
SMALL = (
    "data=synthetic data.dataset.train_size=50 data.dataset.test_size=27 data.dataset.channels=1 "
    "batch_size=24 epochs=2 optimizer.lr=0.05"
)
LENET = f"{SMALL} data.dataset.image_size=14 model=lenet"
CNN = f"{SMALL} data.dataset.image_size=8 model=simple_cnn"
VIT = f"{SMALL} model=vit model.depth=2 model.width=16 model.heads=2"
CASES = {
    1: [
        f"{LENET} strategy=single optimizer.weight_decay=0.01",
        f"{CNN} strategy=single accumulate=3 max_grad_norm=0.1 scheduler=constant model.init=by_block",
        f"{VIT} strategy=single optimizer=adamw decay_norms_and_biases=false warmup_epochs=1",
    ],
    2: [
        f"{LENET} strategy=scratch",
        f"{LENET} strategy=ddp optimizer.nesterov=true optimizer.weight_decay=0.01",
        f"{LENET} strategy=fsdp accumulate=2 max_grad_norm=0.1",
        f"{CNN} strategy=ddp accumulate=3 max_grad_norm=0.1 scheduler=trapezoid",
    ],
}


def require_same(world_size, lines, folder):
    """Check that both have printed the same losses of each line, and the right number of them."""
    for line, (expected, printed) in zip(
        lines, losses_of_both(world_size, lines, folder), strict=True
    ):
        assert expected, f"train.py has recorded no epoch: {line}"
        for epoch, (row, values) in enumerate(zip(expected, printed, strict=True), 1):
            if "train_accuracy" not in row:  # of tokens, train.py does not measure it
                values.pop("train_accuracy")
            assert row == values, f"epoch {epoch} of {line}"


@pytest.mark.parametrize("world_size", CASES)
def test_plain_file_prints_the_losses_of_the_run(world_size, tmp_path):
    require_same(world_size, CASES[world_size], tmp_path)
