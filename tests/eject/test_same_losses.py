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
POINTS = (
    "data=own data.dataset._target_=plain_nets.Points +data.dataset.number=50 data.num_workers=0 "
    "model=own model._target_=plain_nets.dense batch_size=24 epochs=2"
)
CASES = {
    1: [
        f"{LENET} strategy=single optimizer.weight_decay=0.01",
        f"{CNN} strategy=single accumulate=3 max_grad_norm=0.1 scheduler=constant "
        "model.init=by_block",
        f"{VIT} strategy=single optimizer=adamw decay_norms_and_biases=false warmup_epochs=1",
    ],
    2: [
        f"{LENET} strategy=scratch",
        f"{LENET} strategy=ddp optimizer.nesterov=true optimizer.weight_decay=0.01",
        f"{LENET} strategy=fsdp accumulate=2 max_grad_norm=0.1",
        f"{CNN} strategy=ddp accumulate=3 max_grad_norm=0.1 scheduler=trapezoid",
        f"{POINTS} strategy=fsdp",
    ],
}

TEXT = (
    "task=tokens data=text data.context=12 batch_size=8 epochs=2 model=gpt model.depth=2 "
    "model.width=16 model.heads=2 optimizer.lr=0.05"
)
OWN = f"{SMALL} data.dataset.image_size=8 model=own model._target_=plain_nets"
AUGMENTED = "data.crop_padding=2 data.flip=true data.val_fraction=0.2 evaluate_test=end"
MORE = {
    1: [
        f"{LENET} {AUGMENTED} loss.label_smoothing=0.1 accumulate=2 model.init_std=0.1",
        f"{LENET} model.init=by_block max_steps=7 scheduler=multi_step scheduler.milestones=[1,2]",
        f"{TEXT} data.root=text.txt model.tied=true max_grad_norm=0.5 accumulate=2",
        f"{VIT} model.pool=token model.init=default seed=3 scheduler=constant warmup_steps=3",
        f"{SMALL} data.dataset.image_size=12 model=resnet18 epochs=1 optimizer.lr=0.01",
        f"{OWN}.Dropping",
    ],
    2: [
        f"{TEXT} data.root=text.txt strategy=ddp optimizer=adamw",
        f"{TEXT} data.root=text.txt strategy=fsdp model.tied=true max_grad_norm=0.5",
        f"{LENET} {AUGMENTED} strategy=scratch lr_scaling=linear",
        f"{OWN}.Dropping strategy=fsdp max_steps=5",
        f"{OWN}.dropping +model.width=5 strategy=ddp accumulate=3",
        f"{SMALL} data.dataset.image_size=12 model=book_resnet18 strategy=ddp epochs=1",
    ],
    4: [
        f"{LENET} strategy=scratch",
        f"{LENET} strategy=ddp accumulate=3 max_grad_norm=0.1",
        f"{LENET} strategy=fsdp max_grad_norm=0.1",
        f"{VIT} strategy=ddp optimizer=adamw",
        f"{VIT} strategy=fsdp optimizer=adamw strategy.reshard_after_forward=false",
        f"{TEXT} data.root=text.txt strategy=ddp",
        f"{OWN}.Dropping strategy=ddp",
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


@pytest.mark.parametrize(
    "world_size",
    [pytest.param(size, marks=pytest.mark.slow if size > 1 else ()) for size in CASES],
)
def test_plain_file_prints_the_losses_of_the_run(world_size, tmp_path):
    require_same(world_size, CASES[world_size], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size",
    [pytest.param(size, marks=pytest.mark.extra if size > 1 else ()) for size in MORE],
)
def test_plain_file_of_other_options_prints_the_losses_of_the_run(
    world_size, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "text.txt")
    lines = [line.replace("text.txt", str(tmp_path / "text.txt")) for line in MORE[world_size]]
    require_same(world_size, lines, tmp_path)


def write_text(path):
    """Write 41 samples of 12 bytes, so that the last batch of 8 is partial."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
    text = " ".join(words[i * i % 9] for i in range(200))
    path.write_text(text[: 41 * 12 + 1])
