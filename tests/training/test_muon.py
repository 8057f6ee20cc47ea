"""Muon: the numbers of torch.optim.Muon and AdamW, under every strategy."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from launches import SMALL, launch, only_run, read_metrics
from slow_rows import slow_but
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab
from ddp_lab.checkpoints.state import gather_full_state
from ddp_lab.training.default_group import DefaultGroup
from ddp_lab.training.groups import make_groups
from ddp_lab.training.muon import Muon
from ddp_lab.training.orthogonal import orthogonal

WORLDS = {
    "single": (1, {}),
    "scratch": (2, {}),
    "ddp": (2, {}),
    "fsdp": (2, {}),
    "pipeline": (2, {"num_microbatches": 2}),
    "mesh pp": (2, {"pp": 2, "num_microbatches": 2}),
    "mesh hybrid": (4, {"shard": 2}),
    "tp": (2, {"tp": 2}),
    "split": (1, {"devices": ["cpu", "cpu"], "num_microbatches": 2}),
}
LOSSES = partial(cross_entropy, reduction="none")
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
MAX_NORM = 0.05


class Tokens(nn.Module):
    """An embedding, three linear layers and a head.

    On two ranks the shards are uneven, and in the second round a rank has no matrix.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.blocks = nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 8), nn.Linear(8, 5, bias=False)
        )
        self.head = nn.Linear(5, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def network() -> nn.Module:
    torch.manual_seed(3)
    return Tokens().double()


def samples() -> TensorDataset:
    tokens = torch.arange(25) % 9
    return TensorDataset(tokens, tokens % 3)


def plain_optimizers(model: Tokens) -> list[torch.optim.Optimizer]:
    matrices = [layer.weight for layer in model.blocks if isinstance(layer, nn.Linear)]
    chosen = {*map(id, matrices)}
    others = [each for each in model.parameters() if id(each) not in chosen]
    return [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **OPTIONS),
        torch.optim.AdamW(others, betas=(0.9, 0.95), **OPTIONS),
    ]


@once
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the last weights of a loop with torch's optimizers."""
    with Lab("single", device="cpu") as lab:
        trainer = lab.trainer(network(), LOSSES, partial(Muon, **OPTIONS), 12)
        batches = [batch for epoch in range(2) for batch in trainer.batches(samples(), epoch)]
    model = network()
    optimizers = plain_optimizers(model)
    losses = []
    for inputs, targets in batches:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        assert norm > MAX_NORM
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


def train(strategy: str, options: dict) -> tuple[list[float], dict[str, torch.Tensor]]:
    with Lab(strategy, device="cpu", timeout=60, **options) as lab:
        make = partial(Muon, **OPTIONS)
        trainer = lab.trainer(
            network(), LOSSES, make, 12, example=samples()[0], max_grad_norm=MAX_NORM
        )
        losses = [
            float(trainer.step(*batch))
            for epoch in range(2)
            for batch in trainer.batches(samples(), epoch)
        ]
        full, _ = gather_full_state(trainer.strategy, trainer.state.weights())
        return losses, {name: tensor.clone() for name, tensor in (full or {}).items()}


@pytest.mark.parametrize(
    "world",
    slow_but(["single", "ddp", "pipeline"], WORLDS),
)
def test_strategy_has_the_weights_of_torchs_optimizers(world):
    ranks, options = WORLDS[world]
    results = run_world(ranks, train, world.split()[0], options, timeout=120)
    expected_losses, expected = plain()
    for losses, _ in results:
        assert losses == pytest.approx(expected_losses, abs=1e-12)
    weights = results[0][1]
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[f"model.{name}"], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_orthogonal_matrix_has_singular_values_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = orthogonal(matrix, 5, torch.float64)
    assert torch.linalg.svdvals(result).sub(1).abs().max() < 0.4
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert (result - u @ v).abs().max() < 0.3


def test_matrices_of_hidden_layers_are_muons_and_all_else_is_adamws():
    options, names = Muon.default_groups(Tokens())
    assert options == {"use_muon": False}
    assert names == {
        "embedding.weight",
        "blocks.0.bias",
        "blocks.2.bias",
        "head.weight",
        "head.bias",
    }


class Tied(Tokens):
    def __init__(self):
        super().__init__()
        self.between = nn.Linear(6, 9)
        self.between.weight = self.embedding.weight


def test_matrix_that_is_an_embedding_too_is_adamws():
    _, names = Muon.default_groups(Tied())
    assert {"embedding.weight", "between.weight"} <= names


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("optimizer.ns_steps=0", "ns_steps must be from 1 to 99, got 0"),
        ("optimizer.ns_dtype=fp8", "ns_dtype"),
        ("+optimizer.betas=[0.9,1.0]", "betas must be from 0 to below 1, got 1.0"),
        ("+optimizer.adjust_lr=rms", "adjust_lr"),
        (
            "optimizer.groups=[{match:conv1.*,use_muon:true}]",
            "optimizer.groups[0]: use_muon=true: Muon updates matrices, and none is matched: "
            "conv1.0.weight has the shape [20, 1, 3, 3]. Match the weights of linear layers",
        ),
    ],
)
def test_option_out_of_its_range_is_one_message(option, message, tmp_path):
    code, output = launch(f"ddp-lab train optimizer=muon {option}", f"runs_dir={tmp_path}")
    assert code == 2
    assert output.count("error: ") == 1
    assert message in output
    assert "Traceback" not in output


def test_log_says_what_adamw_updates_by_default_and_against_an_entry():
    entries = [{"match": "head.*", "use_muon": True}, {"match": "blocks.0.*", "lr_scale": 2.0}]
    model = Tokens()
    by_default = DefaultGroup.of(Muon, model)
    assert make_groups(model, entries, None, 0.1, by_default).notes[-2:] == [
        "optimizer.groups[0]: AdamW updates head.bias, because Muon updates matrices: head.bias "
        "has the shape [3]",
        "optimizer: 3 of 8 parameters get use_muon=False",
    ]
    everything = [{"match": "*", "use_muon": True}]
    notes = make_groups(model, everything, None, 0.1, by_default).notes
    assert not any("get use_muon=False" in note for note in notes)


@pytest.mark.slow
def test_run_with_muon_resumes_to_the_last_digit_and_says_what_is_adamws(tmp_path):
    line = "ddp-lab train --nproc 2 strategy=fsdp optimizer=muon name=one"
    keys = [*SMALL, "model=vit", "model.depth=2", "checkpoint.every_steps=1", "tracker=none"]
    code, output = launch(line, *keys, f"runs_dir={tmp_path}/a", "epochs=3")
    assert code == 0, output
    assert "get use_muon=False" in output
    fault = "inject=crash@rank=1,step=5"
    code, _ = launch(line, *keys, f"runs_dir={tmp_path}/b", "epochs=3", fault)
    assert code != 0
    code, output = launch(line, *keys, f"runs_dir={tmp_path}/b", "epochs=3")
    assert code == 0, output
    rows = [read_metrics(only_run(tmp_path / each))[-1] for each in "ab"]
    assert rows[0]["test_loss"] == rows[1]["test_loss"]


def orthogonalised_by_each_rank() -> int:
    """Return how many matrices this rank orthogonalises in a step."""
    calls = []

    def counted(matrix, **options):
        calls.append(matrix)
        return orthogonal(matrix, **options)

    with Lab("fsdp", device="cpu", timeout=60) as lab:
        trainer = lab.trainer(network(), LOSSES, partial(Muon, **OPTIONS), 12)
        (batch, *_) = trainer.batches(samples(), 0)
        with patch("ddp_lab.training.muon.orthogonal", counted):
            trainer.step(*batch)
    return len(calls)


def test_each_matrix_in_shards_is_orthogonalised_by_one_rank():
    assert run_world(2, orthogonalised_by_each_rank, timeout=120) == [2, 1]
