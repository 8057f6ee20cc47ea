"""Which layers' weights other modules read."""

import torch
from torch import nn

from ddp_lab.models.make import build_model
from ddp_lab.models.read_weights import read_outside

READ = {"1.attention.out_proj", "1.again", "2.self_attn.out_proj"}


def layers(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def test_layers_whose_weights_other_modules_read_are_found_on_cpu_and_meta():
    node, shape = {"_target_": "own_models.attention"}, {"in_channels": 1, "image_size": 8, "num_classes": 10}
    model = build_model(node, shape)
    assert len(layers(model)) == 10
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    assert read_outside(model, layers(model)) == READ
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    with torch.device("meta"):
        model = build_model(node, shape)
    assert read_outside(model, layers(model)) == READ


def test_what_a_failing_model_has_read_is_kept():
    model = build_model({"_target_": "own_models.attention"}, {"in_channels": 1, "image_size": 8, "num_classes": 10})
    model[3] = nn.Linear(1, 1)
    assert read_outside(model, layers(model)) == READ
