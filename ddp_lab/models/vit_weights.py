"""Weights of torchvision's Vision Transformers under the names of `ddp_lab.models.vit`."""

import re

import torch

RENAMED = {
    r"^class_token$": "embed.class_token",
    r"^conv_proj\.": "embed.patches.",
    r"^encoder\.pos_embedding$": "embed.positions",
    r"^encoder\.ln\.": "head.norm.",
    r"^heads\.head\.": "head.linear.",
    r"^encoder\.layers\.encoder_layer_(\d+)\.": r"block\1.",
    r"^(block\d+)\.ln_([12])\.": r"\1.norm\2.",
    r"^(block\d+)\.self_attention\.(in_)?(out_)?proj": r"\1.attn.\2proj",
    r"^(block\d+)\.mlp\.(0|linear_1)\.": r"\1.fc1.",  # linear_1 and linear_2 in torchvision's older files
    r"^(block\d+)\.mlp\.(3|linear_2)\.": r"\1.fc2.",
}


def from_torchvision(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a torchvision VisionTransformer under the names of `vit`; other weights stay as they are.

    torchvision's in_proj has the rows of query, key and value one after the other.

    Args:
        state: the weights by name.
    """
    if "conv_proj.weight" not in state:
        return state
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        for pattern, new in RENAMED.items():
            name = re.sub(pattern, new, name)
        if joint := re.fullmatch(r"(block\d+\.attn)\.in_proj_(weight|bias)", name):
            renamed |= {f"{joint[1]}.{key}.{joint[2]}": part for key, part in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            renamed[name] = tensor
    return renamed
