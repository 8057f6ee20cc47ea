"""Groups of parameters by name, as in a loop with torch, and the same under every strategy."""

import copy
import json
import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from case import Case, reference_of
from cases import assert_equal
from launches import SMALL, main_in_world, newest, read_metrics, refusal_in_world
from torch import nn
from torch.nn.functional import cross_entropy
from training import Outcome, largest_difference, run_cases
from worlds import once, run_world

from ddp_lab.config.errors import ConfigError
from ddp_lab.run.build import build
from ddp_lab.training.groups import make_groups
from ddp_lab.training.layer_decay import layer_scales
from ddp_lab.world.runtime import Runtime

# In the form that a case needs, without spaces.
ENTRIES: list[dict[str, Any]] = [
    {"match": "head.linear.*", "lr_scale": 10, "momentum": 0.5},
    {"match": "*.bias", "weight_decay": 0.3},
    {"match": "block1.*", "lr_scale": 0.25, "nesterov": True},
]
GROUPS = f"optimizer.groups={json.dumps(ENTRIES, separators=(',', ':'))}"
DECAY = 0.5
LR = 0.05
SETTINGS = f"vit float64 samples=48 epochs=2 optimizer.lr={LR} undecayed {GROUPS} "
SETTINGS += f"optimizer.layer_decay={DECAY}"
ADAMW = f"vit float64 samples=48 epochs=2 optimizer=adamw optimizer.lr=0.002 {GROUPS}".replace(
    '"momentum":0.5', '"betas":[0.5,0.9]'
).replace('"nesterov":true', '"eps":0.01')
LAYERS = ("embed", "block0", "block1", "head")
BY_RANKS = {
    1: ["split devices=[cpu,cpu] num_microbatches=2", "dp"],
    2: [
        *("scratch", "ddp", "fsdp", "tp", "pipeline", "mesh tp=2"),
        "pipeline schedule=interleaved1f1b",
    ],
    4: ["mesh pp=2 tp=2", "ddp_pipeline"],
}
EVERY = [
    pytest.param(ranks, strategy, marks=[pytest.mark.slow] if ranks > 1 else [])
    for ranks, strategies in BY_RANKS.items()
    for strategy in strategies
]


def lines_of(ranks: int) -> list[str]:
    lines = [f"{strategy} {SETTINGS}" for strategy in BY_RANKS[ranks]]
    return lines + [f"{strategy} {ADAMW}" for strategy in BY_RANKS[ranks][2:5]]


@once
def outcomes(ranks: int) -> dict[str, Outcome]:
    return run_world(ranks, run_cases, lines_of(ranks), timeout=300)[0]


@once
def single(line: str) -> Outcome:
    return run_world(1, run_cases, [line], timeout=300)[0][line]


@pytest.mark.parametrize(("ranks", "strategy"), EVERY)
def test_groups_are_those_of_one_device_under_every_strategy(ranks, strategy):
    trained = outcomes(ranks)
    lines = [line for line in trained if line.startswith(f"{strategy} vit")]
    assert lines
    for line in lines:
        assert_equal(trained[line], single(reference_of(line)), tolerance=1e-12, relative=1e-10)


def groups_by_hand(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return a group for each parameter of the model, as a loop of one's own would choose them."""
    groups = []
    for name, parameter in model.named_parameters():
        options: dict[str, Any] = {"params": [parameter]}
        depth = LAYERS.index(name.split(".")[0])
        scale = DECAY ** (len(LAYERS) - 1 - depth)
        if parameter.dim() < 2:
            options["weight_decay"] = 0.0
        if fnmatchcase(name, "head.linear.*"):
            scale *= 10
            options["momentum"] = 0.5
        elif name.endswith(".bias"):
            options["weight_decay"] = 0.3
        elif name.startswith("block1."):
            scale *= 0.25
            options["nesterov"] = True
        groups.append({**options, "lr": lr * scale})
    return groups


def test_groups_equal_a_loop_written_by_hand():
    """The schedule is half a cosine after a warm-up of one step."""
    line = f"single {SETTINGS}"
    case = Case.of(line)
    with case.default_dtype():
        job = build(case.config(), Runtime("cpu"))
        start = job.trainer().strategy.module
        model = copy.deepcopy(start)
        lr = job.sizes.lr
        optimizer = torch.optim.SGD(
            groups_by_hand(model, lr), lr=lr, momentum=0.9, weight_decay=0.1
        )
        rates = [group["lr"] for group in optimizer.param_groups]
        loader = job.loaders["train"]
        step = 0
        for epoch in (1, 2):
            loader.set_epoch(epoch)
            for inputs, targets, size in loader:
                factor = 0.5 if step == 0 else (1 + math.cos(math.pi * (step - 1) / 3)) / 2
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate * factor
                optimizer.zero_grad()
                (cross_entropy(model(inputs), targets, reduction="sum") / size).backward()
                optimizer.step()
                step += 1
    assert step == 4
    trained = single(line).weights
    assert largest_difference(trained, model.state_dict()) <= 1e-12
    assert largest_difference(trained, start.state_dict()) > 1e-3


def weights_after(folder, *overrides: str) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights after an epoch of train.py, and the learning rate that it shows."""
    line = [*SMALL, "epochs=1", "scheduler=constant", f"runs_dir={folder}", "name=run"]
    run_world(1, main_in_world, *line, *overrides)
    return newest(folder / "run")["model"], read_metrics(folder / "run")[-1]["lr"]


@pytest.mark.covers("optimizer.groups", "optimizer.layer_decay")
def test_command_line_sets_groups_and_shows_the_rate_of_the_default_group(tmp_path):
    """With a very small rate weights stay as they were."""
    start, _ = weights_after(tmp_path / "start", "optimizer.lr=1e-9")
    scaled, rate = weights_after(
        tmp_path / "groups", "optimizer.groups=[{match: '*.bias', lr_scale: 1e-7}]"
    )
    log = (tmp_path / "groups" / "run" / "train.log").read_text()
    assert "optimizer.groups: 2 parameters match *.bias; 2 are in the default group" in log
    layers, rate_of_layers = weights_after(tmp_path / "layers", "optimizer.layer_decay=1e-7")
    assert rate == rate_of_layers == 0.01
    for trained, kept in ((scaled, "bias"), (layers, "conv")):
        for name in start:
            moved = (trained[name] - start[name]).abs().max().item()
            assert (moved < 1e-6) == (kept in name), name


REFUSED = {
    "{match: hed.*, lr_scale: 2}": "[0].match=hed.*: matches no parameter of the model. Use a name "
    "or a pattern of names, for example of head.1.bias",
    "{match: head.*, lr_scale: 0}": "[0].lr_scale=0: must be a number above 0",
    "{match: head.*, momentun: 0}": "[0].momentun=0: there is no such key; did you mean "
    "optimizer.groups[0].momentum?",
    "{match: head.*, momentum: 2}": "[0].momentum=2: must be a number from 0 to below 1",
    "{match: head.*, lr: 2}": "[0].lr=2: the learning rate of a group is a multiple of",
    "{match: head.*, fused: true}": "[0].fused=True: there is no such key",
    "{match: head.*, momentum: 0, nesterov: true}": "[0]: ValueError: Nesterov momentum requires",
    "{match: '*', lr_scale: 2}, {match: head.*, lr_scale: 3}": "[1].match=head.*: all parameters "
    "that match are in optimizer.groups[0] already",
    "{lr_scale: 2}": "=[{'lr_scale': 2}]: must be a list, each {match: PATTERN, ...}",
}


@pytest.mark.parametrize("entries", REFUSED)
def test_wrong_groups_are_one_message(entries, tmp_path):
    line = [*SMALL, f"runs_dir={tmp_path}", f"optimizer.groups=[{entries}]".replace(" ", "")]
    ((code, printed),) = run_world(1, refusal_in_world, " ".join(line))
    assert code == 2
    assert printed.startswith(f"error: optimizer.groups{REFUSED[entries]}"), printed
    assert not [*tmp_path.iterdir()]


class Layered(nn.Module):
    """A model with parameters before, between and after its blocks, and a tied one."""

    def __init__(self, count: int = 3):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(2))
        self.embed = nn.Embedding(4, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(count))
        self.norm = nn.LayerNorm(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


def test_layers_are_counted_from_the_last_parameters_of_the_model():
    scales = layer_scales(Layered(), 0.5)
    assert scales == {
        **{"token": 0.5**4, "embed.weight": 0.5**4},
        **{
            f"blocks.{block}.0.{name}": 0.5 ** (3 - block)
            for block in range(3)
            for name in ("weight", "bias")
        },
        **{"norm.weight": 1.0, "norm.bias": 1.0},
    }
    with pytest.raises(ConfigError, match=r"layer_decay=0.5: Linear has no blocks"):
        layer_scales(nn.Linear(2, 2), 0.5)


def test_tied_parameter_is_matched_by_any_of_its_names():
    groups = make_groups(Layered(), [{"match": "head.*", "lr_scale": 2.0}], None, 0.1)
    assert groups.options == [{}, {"lr": 0.2}]
    assert groups.places["embed.weight"] == groups.places["head.weight"] == 1
    assert groups.places["token"] == 0


def test_first_matching_entry_counts():
    entries = [{"match": "*.bias", "weight_decay": 0}, {"match": "blocks.*", "lr_scale": 2.0}]
    groups = make_groups(Layered(), entries, None, 0.1)
    assert groups.options == [{}, {"weight_decay": 0}, {"lr": 0.2}]
    assert groups.places["blocks.0.0.bias"] == 1
    assert groups.places["blocks.0.0.weight"] == 2
