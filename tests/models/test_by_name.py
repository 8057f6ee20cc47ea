"""Models of timm and transformers by name, from the command line."""

import json

import pytest
import torch
from launches import launch, main_in_world, only_run, read_metrics, refusal_in_world
from slow_rows import extra
from worlds import once, run_world

from ddp_lab.config import packages
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.timm_models import timm_model
from ddp_lab.models.transformers_models import transformers_model

LAYERS = [
    "+model.hidden_size=32",
    "+model.num_hidden_layers=2",
    "+model.num_attention_heads=2",
    "+model.intermediate_size=64",
]
IMAGES = [
    "data=synthetic",
    "data.dataset.train_size=20",
    "data.dataset.test_size=8",
    "data.dataset.image_size=32",
    "data.val_fraction=0",
    "batch_size=8",
    "epochs=1",
    "speed=off",
    "optimizer.lr=0.01",
]
TEXT = ["data=text", "data.context=16", "task=tokens", "epochs=1", "batch_size=8", "speed=off"]
MODELS = {
    "convnext": [*IMAGES, "model=timm", "model.name=convnext_atto", "+model.depths=[1,1,2,1]"],
    "vit": [
        *IMAGES,
        "model=transformers",
        "model.name=ViTConfig",
        *LAYERS,
        "+model.patch_size=8",
        "+model.hidden_dropout_prob=0",
    ],
    "llama": [*TEXT, "model=transformers", "model.name=llama", *LAYERS, "optimizer.lr=0.1"],
    "gpt2": [*TEXT, "model=transformers", "model.name={folder}/gpt2"],
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
GPT2 |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
STRATEGIES = {
    "ddp": [],
    "fsdp": [],
    "pipeline": ["strategy.schedule=gpipe", "strategy.num_microbatches=2"],
}
# A pipeline traces its model several times, which takes seconds.
CHOSEN = [("convnext", "ddp"), ("vit", "fsdp"), ("llama", "fsdp"), ("gpt2", "pipeline")]
ALL = [(name, strategy) for name in MODELS for strategy in STRATEGIES]
EXTRA = [case for case in ALL if case not in CHOSEN]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("by_name")
    (folder / "gpt2").mkdir()
    (folder / "gpt2" / "config.json").write_text(json.dumps(GPT2))
    (folder / "text.txt").write_bytes(b"to be or not, " * 30)
    return folder


def train(folder, cases: list[tuple[str, str]]) -> None:
    for name, strategy in cases:
        overrides = MODELS[name]
        root = [f"data.root={folder}/text.txt"] if "data=text" in overrides else []
        chosen = [override.format(folder=folder) for override in overrides]
        where = [f"runs_dir={folder}", f"name={name}-{strategy}", "device=cpu"]
        options = STRATEGIES.get(strategy, [])
        main_in_world(*chosen, *root, *where, f"strategy={strategy}", *options)


@once
def references(folder):
    run_world(1, train, folder, [(name, "single") for name in MODELS], timeout=300)


@once
def trained(folder, is_chosen: bool):
    run_world(2, train, folder, CHOSEN if is_chosen else EXTRA, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [*CHOSEN, *extra(EXTRA)],
)
def test_model_by_name_trains_as_on_one_device(name, strategy, folder):
    references(folder)
    trained(folder, (name, strategy) in CHOSEN)
    (expected,) = read_metrics(folder / f"{name}-single")
    (row,) = read_metrics(folder / f"{name}-{strategy}")
    assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-5)


@pytest.mark.slow
def test_model_by_name_is_launched(tmp_path):
    code, output = launch(
        "ddp-lab train --nproc 2",
        *MODELS["convnext"],
        "strategy=ddp",
        f"runs_dir={tmp_path}",
        "device=cpu",
    )
    assert code == 0, output
    assert read_metrics(only_run(tmp_path))[-1]["epoch"] == 1


def test_head_has_the_classes_and_the_channels_of_the_data():
    convnext = timm_model(1, 32, 7, "convnext_atto")
    assert convnext(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert timm_model(3, 48, 7, "vit_tiny_patch16_224").pos_embed.shape[1] == 9 + 1
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8}
    vit = transformers_model("vit", [1, 32, 32], 7, **sizes, patch_size=8)
    assert vit(torch.zeros(2, 1, 32, 32)).logits.shape == (2, 7)
    bert = transformers_model("bert", (), 7, **sizes)
    assert type(bert).__name__ == "BertForSequenceClassification"
    assert bert.config.num_labels == 7
    llama = transformers_model("llama", [6], 11, 11, **sizes)
    assert llama.config.num_key_value_heads == 2, "sizes that follow from others"
    assert llama(torch.zeros(2, 6, dtype=torch.int64)).logits.shape == (2, 6, 11)
    chosen = transformers_model("gpt2", [6], 11, 11, "GPT2LMHeadModel", n_layer=1, n_head=2)
    assert type(chosen).__name__ == "GPT2LMHeadModel"


TRANSFORMERS = "model=transformers data=text data.root=README.md data.context=16 task=tokens"
MISTAKES = {
    "model=timm model.name=convnext_tinny": "model.name=convnext_tinny: must be one of timm's ",
    "model=timm model.name=hf_hub:timm/vit": "model.name=hf_hub:timm/vit: must be one of timm's ",
    "model=timm model.name=convnext_atto +model.pretrained=true": "nothing is downloaded, and pick",
    "model=timm model.name=convnext_atto +model.colour=red": "does not accept 28x28 pixels of 3 ch",
    f"{TRANSFORMERS} model.name=lama": "must be a directory with a config.json, a model type of tr",
    f"{TRANSFORMERS} model.name=conf": "model.name=conf: has no config.json of transformers: Unrec",
    f"{TRANSFORMERS} model.name=llama +model.hiden_size=8": "model.hiden_size: is not one of the k",
    f"{TRANSFORMERS} model.name=llama +model.vocab_size=8": "model.vocab_size=8: follows from the ",
    f"{TRANSFORMERS} model.name=gpt2 +model.n_positions=8": "has 8 positions, but a sample has 16 ",
    f"{TRANSFORMERS} model.name=vit": "model.name=vit: AutoModelForCausalLM cannot be constructed ",
    f"{TRANSFORMERS} model.name=gpt2 model.architecture=GPT": "must be a class of transformers",
}


@pytest.fixture(scope="module")
def refusals():
    return dict(zip(MISTAKES, run_world(1, refuse, [*MISTAKES])[0], strict=True))


def refuse(lines: list[str]) -> list[tuple[object, str]]:
    images = "data=synthetic data.dataset.channels=3 data.dataset.image_size=28"
    return [
        refusal_in_world(line if line.startswith(TRANSFORMERS) else f"{images} {line}")
        for line in lines
    ]


@pytest.mark.slow
@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_in_names_and_sizes_are_refused_in_one_message(line, refusals):
    code, errors = refusals[line]
    text = " ".join(errors.split())
    assert code in (1, 2)
    assert MISTAKES[line] in text
    assert "Traceback" not in text


@pytest.mark.parametrize(("model", "extra"), [("timm", "timm"), ("transformers", "hf")])
def test_missing_package_is_named_with_its_extra(model, extra, monkeypatch):
    def import_module(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(packages.importlib, "import_module", import_module)
    make = timm_model if model == "timm" else transformers_model
    arguments = (3, 32, 7, "resnet18") if model == "timm" else ("llama",)
    message = rf"needs the package {model}; pip install 'ddp_lab\[{extra}\]'"
    with pytest.raises(ConfigError, match=message):
        make(*arguments)
