"""The name of the model in the name of a run and in the first line of its log."""

import pytest
from launches import OWN

from ddp_lab.commands import train
from ddp_lab.run.build_settings import model_label


@pytest.mark.parametrize(
    ("choice", "node", "label"),
    [
        ("lenet", {"_target_": "ddp_lab.models.lenet.LeNet"}, "lenet"),
        ("timm", {"name": "convnext_tiny"}, "convnext_tiny"),
        ("timm", {"name": "hf-hub:timm/vit base"}, "vit-base"),
        ("transformers", {"name": "/models/llama-2.7b/"}, "llama-2.7b"),
        ("transformers", {"name": "../"}, "transformers"),
        ("own", {"_target_": "mine.mlp"}, "mlp"),
        ("own", {"_target_": "mine.mlp", "name": "large"}, "mlp"),
        ("mine", {"_target_": "mine.mlp", "name": 3}, "mine"),
    ],
)
def test_model_is_called_by_its_name(choice, node, label):
    assert model_label(choice, node) == label


def test_label_of_a_run_has_the_name_of_the_model(command, tmp_path):
    line = [*OWN, "model._target_=own_models.Plain", "max_steps=1", "tracker=none"]
    code, output, errors = command(train.main, *line, f"runs_dir={tmp_path}")
    assert (code, errors) == (0, ""), output
    (run_dir,) = tmp_path.iterdir()
    assert run_dir.name.startswith("Plain-synthetic-single-")
    assert f"{run_dir}: Plain on synthetic, float32\n" in output
