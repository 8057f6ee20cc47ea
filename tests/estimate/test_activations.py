"""What the traces on fake tensors predict is what autograd saves and allocates on the CPU with real tensors."""

import pytest
import torch
from own_models import Recurrent
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training import MODELS, make_model

from ddp_lab.estimate.blocks import Tracer
from ddp_lab.estimate.memory import kept_by
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.estimate.recorder import Recorder, key_of
from ddp_lab.estimate.trace import mixed_precision, trace, without_onednn
from ddp_lab.models.chain import Chain
from ddp_lab.strategies.activation_checkpointing import checkpointed
from ddp_lab.strategies.loss import CrossEntropy
from ddp_lab.strategies.share import Share
from ddp_lab.strategies.single import Single

BATCH = 6


class Tied(nn.Module):
    """A model that is no chain, with a parameter that two layers use."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3 * 16 * 16, 32)
        self.two, self.three = nn.Linear(32, 32), nn.Linear(32, 32)
        self.three.weight = self.two.weight
        self.head = nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.one(images.flatten(1)).relu()
        return self.head(self.three(self.two(hidden).tanh()).relu())


def changing() -> Chain:
    """Return blocks that change their input in place, and one that returns a view of it."""
    return Chain(
        (3, 16, 16),
        convolution=nn.Conv2d(3, 8, 3),
        relu=nn.ReLU(inplace=True),
        flatten=nn.Flatten(),
        linear=nn.Linear(8 * 14 * 14, 64),
        dropout=nn.Dropout(0.5, inplace=True),
        head=nn.Sequential(nn.ReLU(inplace=True), nn.Linear(64, 10)),
    )


def made(name: str) -> tuple[nn.Module, tuple[int, int, int]]:
    if name == "changing":
        return changing(), (3, 16, 16)
    if name == "recurrent":
        return Recurrent(16, 10), (3, 16, 16)
    if name == "tied":
        return Tied(), (3, 16, 16)
    _, channels, size = MODELS[name]
    return make_model(name, 0), (channels, size, size)


def tracer(name: str, precision: str = "float32") -> Tracer:
    model, shape = made(name)
    return Tracer(model, CrossEntropy(), shape, precision)


def predicted(name: str, precision: str = "float32", checkpointing: str = "none") -> float:
    records = tracer(name, precision).blocks(Single(PlannedRuntime(1, 1, precision)), Share(), BATCH)
    return sum(kept_by(list(records.values()), checkpointing))


def saved(name: str, precision: str) -> int:
    """Return the bytes of the storages that autograd saves, but for parameters, images and targets."""
    model, shape = made(name)
    images, targets = torch.rand(BATCH, *shape), torch.zeros(BATCH, dtype=torch.int64)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        with mixed_precision(precision == "bf16"):
            logits = model(images)
        loss = CrossEntropy()(logits, targets)
    others = {key_of(tensor) for tensor in [*model.parameters(), images, targets]}
    assert loss.requires_grad
    return sum({key_of(tensor): tensor.untyped_storage().nbytes() for tensor in kept if key_of(tensor) not in others}.values())


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["lenet", "vit", "narrow", "tied", "partly_frozen", "changing"])
def test_activations_are_what_autograd_saves(name, precision):
    assert predicted(name, precision) == pytest.approx(saved(name, precision), rel=0.05)


def test_lstm_keeps_what_its_steps_keep():
    """Without oneDNN, whose fused LSTM keeps a workspace of its own."""
    with without_onednn():
        expected = saved("recurrent", "float32")
    assert predicted("recurrent") == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("mode", ["none", "selective", "block"])
def test_checkpointed_blocks_keep_what_is_predicted(mode):
    """Compared with the bytes that are in use after a forward pass on the CPU."""
    model, shape = made("vit")
    images, targets = torch.rand(BATCH, *shape), torch.zeros(BATCH, dtype=torch.int64)
    with Recorder() as recorder:
        tokens = images
        for block in model:
            tokens = checkpointed(block, mode)(tokens)
        loss = CrossEntropy()(tokens, targets)
    assert loss.requires_grad
    assert predicted("vit", checkpointing=mode) == pytest.approx(recorder.live, rel=0.05)
    assert mode == "none" or predicted("vit", checkpointing=mode) < 0.8 * predicted("vit")


@pytest.mark.parametrize("name", ["lenet", "vit", "narrow", "changing"])
def test_peak_of_the_backward_pass_is_that_of_real_tensors(name):
    model, shape = made(name)
    records = tracer(name).blocks(Single(PlannedRuntime(1, 1, "float32")), Share(), BATCH)
    place = {block: number for number, block in enumerate(records)}
    kept = kept_by(list(records.values()), "none")
    later = [sum(record.gradients for record in list(records.values())[number + 1 :]) for number in range(len(records))]
    highest = max(sum(kept[: place[block]]) + record.backward_peak + later[place[block]] for block, record in records.items())
    images, targets = torch.rand(BATCH, *shape), torch.zeros(BATCH, dtype=torch.int64)
    with Recorder() as recorder:
        CrossEntropy()(model(images), targets).backward()
    assert highest == pytest.approx(recorder.peak, rel=0.05)


def test_norms_keep_their_inputs_in_float32_as_autocast_on_cuda_does():
    layer, tokens = nn.LayerNorm(8), torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        mixed, _ = trace(layer, list(layer.parameters()), tokens, autocast=True)
        plain, _ = trace(layer.to(torch.bfloat16), list(layer.parameters()), tokens, autocast=False)
    assert (mixed.output, plain.output) == (4 * 8 * 4, 4 * 8 * 2)
    assert mixed.saved - plain.saved >= 4 * 8 * 4
    assert (mixed.keeps_input, plain.keeps_input) == (False, True)


def test_equal_blocks_are_traced_once():
    traced = tracer("vit")
    strategy, share = Single(PlannedRuntime(1, 1, "float32")), Share()
    first = traced.blocks(strategy, share, BATCH)
    assert first["block0"] is first["block1"]
    assert traced.blocks(strategy, share, BATCH)["embed"] is first["embed"]
    assert traced.blocks(strategy, share, BATCH + 1)["embed"] is not first["embed"]
