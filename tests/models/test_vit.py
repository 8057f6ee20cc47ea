"""The Vision Transformer: its parameters, its logits against torchvision's, and the sizes that it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from configs import CONF, config
from omegaconf import OmegaConf
from torch import nn
from torchvision.models import VisionTransformer

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import build_model, make_model
from ddp_lab.models.partition import Partition, trace
from ddp_lab.models.vit import vit
from ddp_lab.world.runtime import Runtime

SMALL = {"depth": 2, "width": 16, "heads": 4, "mlp_ratio": 2.0, "patch_size": 7, "drop_path": 0.0}


def make(group: str, image_size: int = 224, num_classes: int = 1000, **changed) -> Chain:
    """Return the model of a config group without weights, on the meta device."""
    node = OmegaConf.load(CONF / f"model/{group}.yaml")
    with torch.device("meta"):
        return build_model({**node, **changed}, {"in_channels": 3, "image_size": image_size, "num_classes": num_classes})


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def formula(depth: int, width: int, hidden: int, patch: int, token: bool) -> int:
    """Return the number of parameters for 224x224 colour images of 1000 classes."""
    norm, attention, mlp = 2 * width, 4 * (width + 1) * width, (width + 1) * hidden + (hidden + 1) * width
    embed = (3 * patch**2 + 1) * width + ((224 // patch) ** 2 + 2 * token) * width
    return embed + depth * (2 * norm + attention + mlp) + norm + (width + 1) * 1000


@pytest.mark.parametrize("pool", ["mean", "token"])
@pytest.mark.parametrize(
    ("group", "sizes", "published"),
    [
        ("vit_s16", (12, 384, 1536, 16), 22_050_664),  # timm's vit_small_patch16_224
        ("vit_b16", (12, 768, 3072, 16), 86_567_656),  # torchvision's vit_b_16
        ("vit_l16", (24, 1024, 4096, 16), 304_326_632),  # torchvision's vit_l_16
        ("vit_h14", (32, 1280, 5120, 14), 632_045_800),  # torchvision's vit_h_14 for 224x224 pixels
        ("vit_g14", (48, 1664, 8192, 14), 1_843_000_000),  # Zhai et al. 2021, table 2, to three digits, without a linear head
    ],
)
def test_presets_have_the_published_number_of_parameters(group, sizes, published, pool):
    assert check(config(f"model={group}", "data=folder")).model["_target_"] == "ddp_lab.models.vit.vit"
    model = make(group, pool=pool)
    assert count(model) == formula(*sizes, token=pool == "token")
    if group == "vit_g14":
        assert count(model) == pytest.approx(published, rel=2e-3)
    elif pool == "token":
        assert count(model) == published


def test_default_model_has_tokens_of_28_pixel_images():
    model = make("vit", 28, 10)
    assert count(model) == 211_210
    assert [name for name, _ in model.named_children()] == ["embed", "block0", "block1", "block2", "block3", "head"]
    assert trace(model)[1] == [(3, 28, 28), *[(16, 64)] * 5, (10,)]


@torch.no_grad()
@pytest.mark.parametrize("old_names", [False, True])
def test_weights_of_torchvision_give_its_logits(old_names, tmp_path):
    torch.manual_seed(0)
    source, images = VisionTransformer(28, 7, 2, 4, 16, 32, num_classes=10).eval(), torch.randn(5, 3, 28, 28)
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = source.state_dict()
    if old_names:  # those of torchvision's first files
        state = {name.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): value for name, value in state.items()}
    torch.save(state, tmp_path / "vit.pt")
    node = {"_target_": "ddp_lab.models.vit.vit", **SMALL, "pool": "token", "weights": f"{tmp_path}/vit.pt"}
    shape = {"in_channels": 3, "image_size": 28, "num_classes": 10}
    model, _, notes = make_model(node, shape, Runtime("cpu"), 0)
    assert notes == [f"model.weights={tmp_path}/vit.pt: loaded"]
    expected = source(images)
    assert expected.std() > 0.1
    torch.testing.assert_close(model.eval()(images), expected, atol=1e-5, rtol=1e-5)


def logits_of(state: dict[str, torch.Tensor], images: torch.Tensor, heads: int, token: bool) -> torch.Tensor:
    """Return the logits as the paper's equations 1 to 4 define them, one head at a time."""

    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def norm(name: str, inputs: torch.Tensor) -> torch.Tensor:
        centred = inputs - inputs.mean(-1, keepdim=True)
        scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return scaled * state[f"{name}.weight"] + state[f"{name}.bias"]

    weight = state["embed.patches.weight"]
    patches = F.unfold(images, weight.size(-1), stride=weight.size(-1)).transpose(1, 2)
    tokens = patches @ weight.flatten(1).T + state["embed.patches.bias"]
    if token:
        tokens = torch.cat([state["embed.class_token"].expand(len(images), 1, -1), tokens], 1)
    tokens = tokens + state["embed.positions"]
    for block in sorted({name.split(".")[0] for name in state if name.startswith("block")}):
        inputs = norm(f"{block}.norm1", tokens)
        of_heads = zip(*(linear(f"{block}.attn.{key}", inputs).chunk(heads, -1) for key in "qkv"), strict=True)
        mixed = [(q @ k.mT / math.sqrt(q.size(-1))).softmax(-1) @ v for q, k, v in of_heads]
        tokens = tokens + linear(f"{block}.attn.proj", torch.cat(mixed, -1))
        hidden = linear(f"{block}.fc1", norm(f"{block}.norm2", tokens))
        tokens = tokens + linear(f"{block}.fc2", hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2)
    tokens = norm("head.norm", tokens)
    return linear("head.linear", tokens[:, 0] if token else tokens.mean(1))


@torch.no_grad()
@pytest.mark.parametrize("pool", ["mean", "token"])
def test_logits_are_those_of_the_papers_equations(pool):
    model = vit(1, 28, 10, **SMALL, pool=pool).double()
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(3, 1, 28, 28, dtype=torch.float64)
    expected = logits_of(model.state_dict(), images, 4, pool == "token")
    torch.testing.assert_close(model(images), expected, atol=1e-12, rtol=1e-12)


def test_initial_weights_follow_the_paper():
    torch.manual_seed(0)
    model = vit(3, 224, 10, depth=1, width=192, heads=3, mlp_ratio=4.0, patch_size=16, pool="token", drop_path=0.0)
    state = model.state_dict()
    for name, tensor in state.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.full_like(tensor, float("weight" in name))), name
        elif name in ("embed.class_token", "embed.patches.bias", "head.linear.weight", "head.linear.bias"):
            assert not tensor.any(), name
        elif name.endswith("bias"):
            assert tensor.std().item() == pytest.approx(1e-6 * ("fc" in name), rel=0.2), name
        elif name.startswith("block0"):
            bound = math.sqrt(6 / sum(tensor.shape))
            assert tensor.abs().max().item() == pytest.approx(bound, rel=1e-2), name
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02), name
    assert state["embed.patches.weight"].std().item() == pytest.approx(math.sqrt(1 / (3 * 16 * 16)), rel=0.02)
    assert state["embed.positions"].std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 3}, "model.heads=3: must divide the width, 16; use one of 1, 2, 4, 8, 16"),
        ({"patch_size": 16}, "model.patch_size=16: must divide the image size, 28; use one of 1, 2, 4, 7, 14, 28"),
        ({"mlp_ratio": 0.001}, "model.mlp_ratio=0.001: gives blocks without units for the width 16; use at least 0.0625"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ConfigError) as error:
        vit(1, 28, 10, **SMALL | changed, pool="mean")
    assert str(error.value) == message


def test_partition_balances_the_blocks():
    assert Partition(make("vit_b16"), 4).shares == pytest.approx([0.25] * 4, abs=0.01)
