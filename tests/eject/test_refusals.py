"""What `ddp-lab eject` refuses, by name, and what it leaves out."""

from pathlib import Path

import pytest
from configs import config
from omegaconf import OmegaConf

from ddp_lab.commands import eject
from ddp_lab.config.build import leaves
from ddp_lab.eject.keys import (
    CONSTRUCTED,
    FOLLOWED,
    LEFT_OUT,
    LEFT_OUT_GROUPS,
    NEUTRAL,
    check_keys,
)

# what a file follows by its templates' names, or refuses by the choice of a group
CHOSEN = ("_target_", "_partial_")
CONFIGS = [
    [],
    ["strategy=scratch", "scheduler=trapezoid", "model=vit"],
    ["strategy=ddp", "scheduler=multi_step", "model=resnet18", "optimizer=adamw"],
    ["strategy=fsdp", "task=tokens", "data=text", "data.root=x", "model=gpt"],
]


@pytest.mark.parametrize("overrides", CONFIGS, ids=" ".join)
def test_every_key_has_a_template_or_a_reason(overrides):
    values = OmegaConf.to_container(config(*overrides), resolve=True)
    known = {*NEUTRAL, *FOLLOWED, *LEFT_OUT}
    unknown = [
        key
        for key, _ in leaves(values)
        if key not in known
        and not key.startswith((*LEFT_OUT_GROUPS, *CONSTRUCTED))
        and key.rpartition(".")[2] not in CHOSEN
    ]
    assert not unknown
    check_keys(values, {})


def test_message_lists_every_key_without_a_template(tmp_path, command):
    line = "ema=0.9 mixup=0.2 strategy=pipeline model.weights=w.pt data.crop_padding=2 name=mine"
    file = tmp_path / "plain.py"
    code, _, errors = command(eject.main, *line.split(), "-o", file)
    assert code == 2
    assert errors.count("error:") == 1
    assert (
        "there is no template for strategy=pipeline (use single, scratch, ddp, fsdp), ema=0.9, "
        "mixup=0.2, model.weights=w.pt. Leave out"
    ) in " ".join(errors.split())
    assert not file.exists()


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("batch_size=auto", "batch_size=auto"),
        ("task=regression", "task=regression (use classification, tokens)"),
        ("scheduler=plateau", "scheduler=plateau (use constant, cosine, multi_step, trapezoid)"),
        ("data=folder", "data=folder (use digits, mnist, cifar10, synthetic, text and data=own)"),
        ("model=torchvision model.name=resnet50", "model=torchvision (use lenet"),
        ("strategy=scratch strategy.algorithm=ring", "strategy.algorithm=ring"),
        ("optimizer.groups=[{match: fc2.*, lr_scale: 10}]", "optimizer.groups="),
        ("model=resnet18 model.init=by_block", "model.init=by_block"),
        ("precision=bf16", "precision=bf16"),
        ("model=vit model.drop_path=0.1", "model.drop_path=0.1"),
        ("callbacks=[mine.Hook]", "callbacks"),
        ("task=tokens task.head_chunks=2", "task.head_chunks=2"),
    ],
)
def test_key_without_a_template_is_named(line, named, tmp_path, command):
    overrides = [line] if "{" in line else line.split()
    code, _, errors = command(eject.main, *overrides, "-o", tmp_path / "plain.py")
    assert code == 2
    assert named in " ".join(errors.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "plain.txt"], "--output plain.txt: must be the name of a .py file"),
        (["-o", "plain.py", "--nproc", "0"], "--nproc 0: must be at least 1"),
        (["epochs=1"], "the following arguments are required: --output/-o"),
        (["-o", "plain.py", "epochs=0"], "epochs=0: must be an integer of at least 1"),
    ],
)
def test_mistake_is_one_message(arguments, message, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, errors = command(eject.main, *arguments)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.covers("eject --output", "eject --force", "eject --nproc", "eject --config-dir")
def test_file_is_written_once_and_replaced_by_force(tmp_path, command):
    (tmp_path / "own" / "model").mkdir(parents=True)
    tiny = "_target_: ddp_lab.models.simple_cnn.simple_cnn\n"
    (tmp_path / "own" / "model" / "tiny.yaml").write_text(tiny)
    file = tmp_path / "plain.py"
    line = ["model=tiny", "strategy=ddp", "--config-dir", tmp_path / "own", "--nproc", "3"]
    code, output, errors = command(eject.main, *line, "--output", file)
    assert (code, errors) == (0, "")
    assert output.startswith(f"{file}: ")
    assert "torchrun --standalone --nproc_per_node=3 plain.py" in file.read_text()
    file.write_text("mine")
    code, _, errors = command(eject.main, *line, "--output", file)
    assert code == 2
    assert f"--output {file}: already exists" in errors
    assert file.read_text() == "mine"
    assert command(eject.main, *line, "--output", file, "--force")[0] == 0
    assert "class" not in file.read_text()


def test_dataset_that_draws_its_samples_is_refused(tmp_path, command):
    line = "data=own data.dataset._target_=plain_nets.Points +data.dataset.noise=0.1"
    line += " data.num_workers=0 model=own model._target_=plain_nets.dense"
    code, _, errors = command(eject.main, *line.split(), "-o", tmp_path / "plain.py")
    assert code == 2
    assert "plain_nets.Points: sample 0 differs between epochs" in " ".join(errors.split())


def test_stream_is_refused(tmp_path, command):
    line = "data=own data.dataset._target_=own_streams.ending max_steps=3 data.num_classes=10"
    line += " data.num_workers=0 data.mean=[0.5] data.std=[0.2] model=simple_cnn"
    code, _, errors = command(eject.main, *line.split(), "-o", tmp_path / "plain.py")
    assert code == 2
    assert "own_streams.ending, which is a stream. Use a data" in " ".join(errors.split())


def test_model_that_no_plain_file_can_hold_is_refused(tmp_path, command):
    line = "model=own data=synthetic data.dataset.image_size=8 data.dataset.channels=1"
    for target, reason in {
        "plain_nets.frozen": "parameters that no step uses or that are frozen, as 0.weight",
        "plain_nets.lazy": "layers whose shapes follow from the first batch, as 1.weight",
    }.items():
        code, _, errors = command(
            eject.main, *line.split(), f"model._target_={target}", "-o", tmp_path / "plain.py"
        )
        assert code == 2, errors
        assert reason in " ".join(errors.split())
    assert not Path(tmp_path / "plain.py").exists()
