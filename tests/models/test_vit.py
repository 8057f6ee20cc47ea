"""The Vision Transformer: its parameters, its logits against torchvision's, and refused sizes."""

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
from ddp_lab.models.make import build_model
from ddp_lab.models.vit import vit
from ddp_lab.run.build_model import model_spec

SMALL = {"depth": 2, "width": 16, "heads": 4, "mlp_ratio": 2.0, "patch_size": 7, "drop_path": 0.0}


def make(group: str, image_size: int = 224, num_classes: int = 1000, **changed) -> Chain:
    """Return the model of a config group without weights, on the meta device."""
    node = OmegaConf.load(CONF / f"model/{group}.yaml")
    with torch.device("meta"):
        return build_model(
            model_spec(
                {**node, **changed},
                {"in_channels": 3, "image_size": image_size, "num_classes": num_classes},
            ),
        )


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("group", "published"),
    [
        ("vit_s16", 22_050_664),  # timm's vit_small_patch16_224
        ("vit_b16", 86_567_656),  # torchvision's vit_b_16
        ("vit_l16", 304_326_632),  # torchvision's vit_l_16
        ("vit_h14", 632_045_800),  # torchvision's vit_h_14 for 224x224 pixels
        # Zhai et al. 2021, table 2, without a linear head
        ("vit_g14", pytest.approx(1_843_000_000, rel=2e-3)),
    ],
)
def test_presets_have_the_published_number_of_parameters(group, published):
    assert (
        check(config(f"model={group}", "data=folder")).model["_target_"] == "ddp_lab.models.vit.vit"
    )
    token = make(group, pool="token")
    mean = make(group, pool="mean")
    assert count(token) == published
    assert count(token) - count(mean) == 2 * token.head.linear.in_features, (
        "the class token and its position"
    )


def in_our_order(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the weights of torchvision's VisionTransformer in the order of `vit`.

    Its query, key and value are separate.
    """
    tensors = [
        state.pop(name)
        for name in ("class_token", "encoder.pos_embedding", "conv_proj.weight", "conv_proj.bias")
    ]
    for name, tensor in state.items():
        if name.endswith("in_proj_weight"):
            biases = state[name.replace("weight", "bias")]
            tensors += [
                part for pair in zip(tensor.chunk(3), biases.chunk(3), strict=True) for part in pair
            ]
        elif not name.endswith("in_proj_bias"):
            tensors.append(tensor)
    return tensors


@torch.no_grad()
def test_network_is_that_of_torchvision():
    torch.manual_seed(0)
    source = VisionTransformer(28, 7, 2, 4, 16, 32, num_classes=10).eval()
    images = torch.randn(5, 3, 28, 28)
    for parameter in source.parameters():
        nn.init.normal_(parameter, std=0.3)
    model = vit(3, 28, 10, **SMALL, pool="token")
    model.load_state_dict(
        dict(zip(model.state_dict(), in_our_order(source.state_dict()), strict=True))
    )
    expected = source(images)
    assert expected.std() > 0.1
    torch.testing.assert_close(model.eval()(images), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_mean_pooling_makes_logits_of_the_mean_of_all_tokens():
    model = vit(1, 28, 10, **SMALL, pool="mean")
    tokens = torch.randn(3, 16, 16)
    nn.init.normal_(model.head.linear.weight)
    torch.testing.assert_close(
        model.head(tokens), model.head.linear(F.layer_norm(tokens, (16,), eps=1e-6).mean(1))
    )
    assert model(torch.rand(3, 1, 28, 28)).shape == (3, 10)


def test_initial_weights_follow_the_paper():
    torch.manual_seed(0)
    model = vit(
        3,
        224,
        10,
        depth=1,
        width=192,
        heads=3,
        mlp_ratio=4.0,
        patch_size=16,
        pool="token",
        drop_path=0.0,
    )
    state = model.state_dict()
    for name, tensor in state.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.full_like(tensor, float("weight" in name))), name
        elif name in (
            "embed.class_token",
            "embed.patches.bias",
            "head.linear.weight",
            "head.linear.bias",
        ):
            assert not tensor.any(), name
        elif name.endswith("bias"):
            assert tensor.std().item() == pytest.approx(1e-6 * ("fc" in name), rel=0.2), name
        elif name.startswith("block0"):
            bound = math.sqrt(6 / sum(tensor.shape))
            assert tensor.abs().max().item() == pytest.approx(bound, rel=1e-2), name
            assert tensor.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02), name
    assert state["embed.patches.weight"].std().item() == pytest.approx(
        math.sqrt(1 / (3 * 16 * 16)), rel=0.02
    )
    assert state["embed.positions"].std().item() == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"heads": 3}, "model.heads=3: must divide the width, 16; use 1 or 2 or 4 or 8 or 16"),
        (
            {"patch_size": 16},
            "model.patch_size=16: must divide the image size, 28; use 1 or 2 or 4 or 7 or 14 or 28",
        ),
        (
            {"mlp_ratio": 0.001},
            "model.mlp_ratio=0.001: gives blocks without units for width=16; use at least 0.0625",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changed, message):
    with pytest.raises(ConfigError) as error:
        vit(1, 28, 10, **SMALL | changed, pool="mean")
    assert str(error.value) == message
