"""Which layers can be synchronised, and what they compute.

Whole models are in the matrix (test_equivalence.py).
"""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from launches import SMALL, launch, refusal_in_world
from small_networks import BatchNormAct
from torch import nn
from torch.utils.data import TensorDataset
from worlds import run_world

from ddp_lab import Lab, tasks
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.batch_norm import SyncBatchNorm, padding_ignored, set_batch_norm
from ddp_lab.strategies.ddp import DDP
from ddp_lab.strategies.single import Single
from ddp_lab.world.runtime import Runtime


class OwnBatchNorm(nn.BatchNorm2d):
    """A subclass that computes what its base class does."""


class ScaledBatchNorm(nn.BatchNorm2d):
    def forward(self, input):
        return 2 * super().forward(input)


class ActFirst(BatchNormAct):
    """The child modules of timm's BatchNormAct2d, called before the normalisation."""

    def forward(self, input):
        return nn.BatchNorm2d.forward(self, self.act(self.drop(input)))


class EvaluatedOtherwise(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) if self.training else input


class Clamped(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input.clamp(-1e4, 1e4))


class NeedsMore(nn.BatchNorm2d):
    """A layer that cannot be tried, because it needs what only its model has."""

    def forward(self, input):
        return super().forward(input) + self.offset


class OwnStatistics(nn.Module):
    """A normalization layer without a base class of torch's, as timm's EvoNorm2dB0."""

    def __init__(self, channels):
        super().__init__()
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, input):
        if self.training:
            self.running_var.lerp_(input.var((0, 2, 3)), 0.1)
        return input / self.running_var.view(-1, 1, 1).sqrt()


class Frozen(OwnStatistics):
    """A layer whose statistics never change, as torchvision's FrozenBatchNorm2d."""

    def forward(self, input):
        return input / self.running_var.view(-1, 1, 1).sqrt()


class AsksForMore(OwnStatistics):
    """A layer that cannot be tried."""

    def forward(self, input, mask):
        return super().forward(input * mask)


def act(drop: float = 0.0) -> BatchNormAct:
    return BatchNormAct(3, nn.Dropout(drop), nn.ReLU(inplace=True))


UNSUPPORTED = {
    "no running statistics": (
        nn.BatchNorm2d(3, track_running_stats=False),
        "it has no running statistics",
    ),
    "instance norm": (
        nn.InstanceNorm2d(3, track_running_stats=True),
        "its running statistics would be those of the local",
    ),
    "another result": (ScaledBatchNorm(3), "its class may compute something else"),
    "another order": (
        ActFirst(3, nn.Identity(), nn.ReLU()),
        "its class may compute something else",
    ),
    "another evaluation": (EvaluatedOtherwise(3), "its class may compute something else"),
    "another result for large inputs": (Clamped(3), "its class may compute something else"),
    "a failing trial": (NeedsMore(3), "its class may compute something else"),
    "own statistics": (OwnStatistics(3), "its running_var would be computed from the local batch"),
    "cannot be tried": (AsksForMore(3), "its running_var would be computed from the local batch"),
}


@pytest.mark.parametrize(("layer", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_cannot_be_synchronised_are_refused_by_name(layer, reason, device):
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sequential(copy.deepcopy(layer))).to(device)
    message = (
        r"^strategy\.batch_norm=sync: does not support the layer 1\.0, "
        rf"{type(layer).__name__}\(.*\): {reason}.*=local$"
    )
    with pytest.raises(ConfigError, match=message):
        set_batch_norm(model, "sync")
    with pytest.raises(ConfigError, match=message):
        DDP(Runtime("cpu"), "sync", 1.0).partition(model, 2)
    DDP(Runtime("cpu"), "local", 1.0).partition(model, 2)
    assert set_batch_norm(model, "local") is model


class Centred(nn.Module):
    """An average of the batches in a buffer, which has no name that torch uses."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean_ema", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, input):
        if self.training:
            self.steps += 1
            self.mean_ema.lerp_(input.detach().mean(0), 0.1)
        return input - self.mean_ema


class Functional(nn.Module):
    def forward(self, input):
        return F.batch_norm(input, None, None, training=True)


class Frozen1d(nn.Module):
    """Statistics of a module of its own, which do not depend on the batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, input):
        self.steps += 1
        return F.batch_norm(input, self.mean, torch.ones_like(self.mean))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Centred(), "its buffer mean_ema would be computed from the local batch"),
        (Functional(), "it calls F.batch_norm with training=True"),
    ],
)
def test_statistics_outside_of_batch_norm_layers_are_refused_by_name(module, reason):
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(module)).eval()
    before = copy.deepcopy(model.state_dict())
    strategy = DDP(Runtime("cpu"), "sync", 1.0)
    strategy.expect(example=torch.empty(2, 4, device="meta"))
    message = (
        rf"^strategy\.batch_norm=sync: does not support the module 2\.0, {type(module).__name__}: "
        f"{reason}"
    )
    with pytest.raises(ConfigError, match=message):
        strategy.partition(model, 2)
    assert not any(each.training for each in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_buffers_that_do_not_depend_on_the_batch_are_allowed():
    strategy = DDP(Runtime("cpu"), "sync", 1.0)
    strategy.expect(example=torch.empty(2, 4, device="meta"))
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))
    strategy.partition(nn.Sequential(spectral, nn.BatchNorm1d(3), Frozen1d(), nn.Dropout()), 2)


def test_synchronised_layers_of_torch_are_refused_where_nothing_is_synchronised():
    model = nn.Sequential(nn.Flatten(), nn.SyncBatchNorm(3))
    with pytest.raises(
        ConfigError,
        match=r"^strategy\.batch_norm=local: does not support the layer 1, "
        r"SyncBatchNorm\(3, .*=sync",
    ):
        DDP(Runtime("cpu"), "local", 1.0).partition(model, 2)
    DDP(Runtime("cpu"), "sync", 1.0).partition(model, 2)
    Single(Runtime("cpu")).partition(model, 2)


def test_layers_without_statistics_of_the_batch_stay_as_they_are():
    layers = [nn.InstanceNorm2d(3), nn.GroupNorm(1, 3), nn.LayerNorm(3), Frozen(3)]
    model = set_batch_norm(nn.Sequential(*copy.deepcopy(layers)), "sync")
    assert [type(layer) for layer in model] == [type(layer) for layer in layers]


SUPPORTED = {
    "1d, [b, c]": (nn.BatchNorm1d(3), ()),
    "1d, [b, c, l]": (nn.BatchNorm1d(3), (5,)),
    "2d": (nn.BatchNorm2d(3), (5, 4)),
    "3d": (nn.BatchNorm3d(3), (2, 5, 4)),
    "torch's SyncBatchNorm": (nn.SyncBatchNorm(3), (5, 4)),
    "not affine": (nn.BatchNorm1d(3, affine=False), ()),
    "without a momentum": (nn.BatchNorm2d(3, momentum=None), (5, 4)),
    "subclass": (OwnBatchNorm(3), (5, 4)),
    "with an activation": (act(), (5, 4)),
    "with dropout and an activation": (act(0.5), (5, 4)),
}


@pytest.mark.parametrize(("layer", "shape"), SUPPORTED.values(), ids=SUPPORTED)
def test_layer_computes_what_torchs_does(layer, shape):
    """Outputs, gradients and running statistics of a rank alone, in training and evaluation."""
    torch.manual_seed(0)
    layer = copy.deepcopy(layer).double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter)
    synced = set_batch_norm(copy.deepcopy(layer), "sync")
    synced.sum_over_ranks = lambda tensor: tensor
    assert isinstance(synced, (SyncBatchNorm, type(layer)))
    for _ in range(3):
        inputs = torch.randn(4, 3, *shape, dtype=torch.float64)
        results = []
        for each in (layer, synced):
            torch.manual_seed(1)
            leaf = inputs.clone().requires_grad_()
            outputs = each.train()(leaf)
            outputs.square().sum().backward()
            gradients = [parameter.grad for parameter in each.parameters()]
            results.append([outputs, leaf.grad, *gradients, *each.buffers(), each.eval()(inputs)])
        torch.testing.assert_close(*results, rtol=0, atol=1e-12)


def test_every_name_of_a_layer_is_synchronised_and_its_hooks_stay():
    layer = nn.BatchNorm2d(3)
    called = []
    layer.register_forward_hook(lambda *_: called.append(True))
    model = nn.Sequential(layer, nn.ReLU(), layer).eval()
    for _ in range(2):  # a model may be set up again
        assert set_batch_norm(model, "sync") is model
    assert isinstance(model[0], SyncBatchNorm)
    assert model[0] is model[2] is layer
    model(torch.ones(2, 3, 4, 4))
    assert called == [True, True]


def counted_on(lengths: list[int]) -> dict[str, object]:
    """Return this rank's error, or running variance, after a batch with lengths[rank] samples."""
    with Runtime("cpu", timeout=20) as runtime:
        runtime.open_group()
        layer = set_batch_norm(nn.BatchNorm1d(2), "sync")
        real = lengths[runtime.rank]
        inputs = torch.arange(2.0 * max(real, 1)).view(-1, 2).mul(1 + runtime.rank).requires_grad_()
        try:
            with nullcontext() if real else padding_ignored(layer):
                layer(inputs).sum().backward()
        except ValueError as error:
            return {"error": str(error)}
        return {
            "variance": layer.running_var.tolist(),
            "finite": inputs.grad.isfinite().all().item(),
        }


@pytest.mark.parametrize("lengths", [(1, 0), (0, 1), (0, 1, 0)])
def test_one_value_per_channel_in_the_global_batch_raises_on_every_rank_what_torch_raises(lengths):
    with pytest.raises(ValueError) as expected:  # noqa: PT011, its text is the expected one
        nn.BatchNorm1d(2)(torch.ones(1, 2))
    assert run_world(len(lengths), counted_on, [*lengths], timeout=60) == [
        {"error": str(expected.value)}
    ] * len(lengths)


@pytest.mark.parametrize("lengths", [(1, 1), (2, 0), (3, 1), (0, 1, 2), (0, 0)])
def test_several_values_or_none_are_no_error_on_any_rank(lengths):
    """A rank with several values never reads the others' number, and no rank waits for another."""
    first, *others = run_world(len(lengths), counted_on, [*lengths], timeout=60)
    assert all(other == first for other in others)
    assert first["finite"]
    assert (first["variance"] == [1, 1]) == (sum(lengths) == 0)
    batch = [
        row * (1 + rank)
        for rank, real in enumerate(lengths)
        for row in torch.arange(2.0 * real).view(-1, 2)
    ]
    if batch:
        torch.testing.assert_close(
            first["variance"], (0.9 + 0.1 * torch.stack(batch).var(0)).tolist()
        )


def test_run_that_ends_an_epoch_with_one_value_per_channel_gives_advice(tmp_path):
    line = "torchrun --standalone --nproc_per_node=2 train.py strategy=ddp strategy.batch_norm=sync"
    model = [
        "model=lenet",
        "model._target_=small_networks.normalized",
        "data.dataset.image_size=8",
        "data.dataset.train_size=49",
    ]
    overrides = [
        word for word in SMALL if not word.startswith(("model=", "data.dataset.train_size="))
    ]
    code, output = launch(line, *overrides, *model, f"runs_dir={tmp_path}")
    assert code == 1, output
    assert (
        "Expected more than 1 value per channel when training, got input size torch.Size([1, 16])"
        in output
    )
    assert "with which the ranks together need two" in output


def test_layer_is_refused_before_a_process_group_opens():
    model = "model=own model._target_=test_batch_norm.with_instance_norm"
    words = [word for word in SMALL if not word.startswith("model=")]
    line = " ".join([*words, model, "strategy=ddp strategy.batch_norm=sync"])
    (code, errors), (other, _) = run_world(2, refusal_in_world, line)
    assert (code, other) == (2, 2)
    assert "strategy.batch_norm=sync: does not support the layer 0, InstanceNorm2d(3" in errors


def with_instance_norm(in_channels, image_size, num_classes):
    norm = nn.InstanceNorm2d(in_channels, track_running_stats=True)
    return nn.Sequential(norm, nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))


def statistics(
    strategy: str, options: dict, momentum: float | None, accumulate: int = 1
) -> dict[str, torch.Tensor]:
    """Return a layer's statistics after three equal batches, without an update of weights."""
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        *(torch.randn(24, width, generator=generator).double() for width in (4, 1))
    )
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        layers = nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=momentum), nn.Tanh(), nn.Linear(4, 1)
        model = nn.Sequential(*layers).double()
        make = partial(torch.optim.SGD, lr=0.0)
        trainer = lab.trainer(
            model, tasks.Regression(), make, batch_size=8, accumulate=accumulate, example=data[0]
        )
        for batch in trainer.batches(data, 0):
            trainer.step(*batch)
        weights, _ = gather_full_state(trainer.strategy, trainer.state.weights())
        return {
            name.removeprefix("model.1."): tensor
            for name, tensor in weights.items()
            if name.startswith("model.1.")
        }


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("strategy", ["split", "pipeline"])
def test_statistics_of_micro_batches_are_as_the_documents_say(strategy, momentum, capfd):
    single = statistics("single", {}, momentum)
    assert "BatchNorm normalises" not in capfd.readouterr().out
    accumulated = statistics("single", {}, momentum, accumulate=2)
    options = {"num_microbatches": 2} | ({"devices": ["cpu", "cpu"]} if strategy == "split" else {})
    buffers = run_world(3 - len(options), statistics, strategy, options, momentum, timeout=60)[0]
    line = "BatchNorm normalises at most 4 samples of a global batch of 8 together, because of "
    assert capfd.readouterr().out.count(f"{line}strategy.num_microbatches=2") == 1
    assert (single["num_batches_tracked"], buffers["num_batches_tracked"]) == (3, 6)
    for name, expected in accumulated.items():
        assert (buffers[name] - expected).abs().max() < 1e-12, name
    same_mean = (buffers["running_mean"] - single["running_mean"]).abs().max() < 1e-12
    assert same_mean == (momentum is None)
    assert (buffers["running_var"] - single["running_var"]).abs().max() > 1e-3


class Rows(nn.Module):
    """A view that torch cannot make of an empty batch, as many models have one."""

    def forward(self, inputs):
        return inputs.view(len(inputs), -1)


def test_micro_batch_of_padding_keeps_a_sample_which_the_model_may_need():
    """The second of two micro-batches is only padding, and changes no statistics or gradients."""
    torch.manual_seed(0)
    inputs = torch.randn(4, 2, 3)
    targets = torch.tensor([0, 1, 2, 0])
    results = []
    for accumulate, real in ((2, 4), (1, 2)):
        strategy = Single(Runtime("cpu"))
        strategy.batch_norm = "sync"
        torch.manual_seed(1)
        model = nn.Sequential(Rows(), nn.Linear(6, 3), nn.BatchNorm1d(3))
        strategy.setup(set_batch_norm(model, "sync"))
        model[2].sum_over_ranks = lambda tensor: tensor
        sums = strategy.forward_backward(inputs[:real], targets[:real], 2, accumulate)
        gradients = [parameter.grad for parameter in strategy.module.parameters()]
        results.append([sums, *gradients, *strategy.module.buffers()])
    torch.testing.assert_close(*results, rtol=0, atol=1e-6)
