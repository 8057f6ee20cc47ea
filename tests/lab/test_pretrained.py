"""Models of transformers and PEFT in a Lab: adapters on a frozen base, and directories of them."""

import json
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_of_others import LENGTH, WORDS, Texts
from safetensors.torch import load_file
from torch.optim import SGD
from worlds import once, run_world

from ddp_lab import Lab
from ddp_lab.lab.pretrained import Pretrained
from ddp_lab.models.transformers_models import transformers_model

LAYERS = 2
SIZES = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {},
    "pipeline": {"schedule": "gpipe", "num_microbatches": 2},
}
# ddp has complete models, as single
DIVIDED = [
    pytest.param("fsdp", marks=pytest.mark.slow),
    pytest.param("pipeline", marks=pytest.mark.extra),  # whose traces take 30 s of a core
    pytest.param("ddp", marks=pytest.mark.slow),
]


def last_token(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses of the last token's logits, [b]."""
    return F.cross_entropy(outputs["logits"][:, -1], targets, reduction="none")


def llama(**others: Any) -> Any:
    return transformers_model("llama", [LENGTH], WORDS, WORDS, **SIZES, **others)


def base() -> Any:
    """Return a Llama in float64 whose weights depend neither on the seed nor the default dtype."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = llama()
    torch.set_default_dtype(dtype)
    return model.double()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    # adapters are drawn by the seed of the Lab
    options = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    return get_peft_model(base(), options)


def gpt2() -> Any:
    sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": 2, "n_positions": LENGTH}
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    return transformers_model("gpt2", [LENGTH], WORDS, WORDS, **sizes, **dropout)


MODELS = {"adapters": adapted, "tied": gpt2, "llama": llama}


def train(strategy: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Train each model for three steps, and save it; return its predictions and its weights."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    results = {}
    data = Texts()
    for name, make in MODELS.items():
        with Lab(strategy, device="cpu", timeout=120, **STRATEGIES.get(strategy, {})) as lab:
            trainer = lab.trainer(
                make(),
                last_token,
                partial(SGD, lr=0.5, momentum=0.9),
                batch_size=8,
                accumulate=2,
                max_grad_norm=0.5,
                example=data[0],
                targets="label",
            )
            for epoch in range(2):
                for inputs, targets in trainer.batches(data, epoch):
                    trainer.step(inputs, targets)
            (inputs, _), *_ = trainer.batches(data, 0, shuffle=False)
            logits = trainer.predict(inputs)["logits"]
            trainer.save(folder / f"{strategy}-{name}")
            trainer.save(folder / f"{strategy}-{name}.safetensors")
            results[name] = {"inputs": inputs["input_ids"], "logits": logits}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pretrained")


@once
def trained(strategy: str, folder: Path) -> list[dict[str, dict[str, Any]]]:
    return run_world(1 if strategy == "single" else 2, train, strategy, folder, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", DIVIDED)
def test_model_and_adapters_equal_single(strategy, name, folder):
    trained("single", folder)
    trained(strategy, folder)
    expected = load_file(folder / f"single-{name}.safetensors")
    weights = load_file(folder / f"{strategy}-{name}.safetensors")
    assert weights.keys() == expected.keys()
    assert (
        max((weights[key] - tensor).abs().max().item() for key, tensor in expected.items()) < 1e-12
    )


def test_only_adapters_are_collected():
    names = Pretrained(adapted()).names
    assert len(names) == LAYERS * 2 * 2 + 1
    assert all("lora_" in name or "modules_to_save" in name for name in names)
    assert Pretrained(llama()).names == {*llama().state_dict()}
    assert Pretrained.of(torch.nn.Linear(2, 2)) is None


def test_base_of_adapters_stays_frozen(folder):
    trained("single", folder)
    weights = load_file(folder / "single-adapters.safetensors")
    begun = adapted().state_dict()
    changed = {name for name, tensor in begun.items() if not torch.equal(weights[name], tensor)}
    assert len(changed) == LAYERS * 2 * 2 + 1
    assert all("lora_" in name or "modules_to_save" in name for name in changed)


@pytest.mark.parametrize("strategy", ["single", *DIVIDED])
def test_directory_is_read_by_transformers_with_equal_outputs(strategy, folder):
    from transformers import AutoModelForCausalLM

    rank = trained(strategy, folder)[0]
    for name in ("tied", "llama"):
        path = folder / f"{strategy}-{name}"
        assert {each.name for each in path.iterdir()} >= {"config.json", "model.safetensors"}
        kind = json.loads((path / "config.json").read_text())["architectures"]
        assert kind == ["GPT2LMHeadModel" if name == "tied" else "LlamaForCausalLM"]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
        logits = model(rank[name]["inputs"]).logits
        assert torch.allclose(logits, rank[name]["logits"], atol=1e-12), name
    saved = load_file(folder / f"{strategy}-tied" / "model.safetensors")
    assert "lm_head.weight" not in saved, "the tied weight is stored twice"


@pytest.mark.parametrize("strategy", ["single", *DIVIDED])
def test_directory_of_adapters_has_them_alone_and_is_read_by_peft(strategy, folder):
    from peft import PeftModel

    rank = trained(strategy, folder)[0]["adapters"]
    path = folder / f"{strategy}-adapters"
    assert not (path / "model.safetensors").exists()
    assert (path / "adapter_config.json").exists()
    saved = load_file(path / "adapter_model.safetensors")
    assert all("lora_" in name or name.endswith("lm_head.weight") for name in saved)
    assert len(saved) == LAYERS * 2 * 2 + 1
    model = PeftModel.from_pretrained(base(), path).double().eval()
    assert torch.allclose(model(rank["inputs"]).logits, rank["logits"], atol=1e-12)
