"""Tensor parallelism of any module by a plan: what it computes, and which plans are refused."""

from functools import partial
from pathlib import Path
from typing import Any

import models_of_others
import pytest
import torch
from launches import OWN, launch
from planned_models import FULL, PAIRS, Base, Pairs, Planned, WrongBlock
from safetensors.torch import load_file
from small_networks import make_model
from torch import nn
from torch.utils.data import TensorDataset
from worlds import once, run_world

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.models.chain import Chain
from ddp_lab.models.vit import Block
from ddp_lab.strategies.mesh import Mesh
from ddp_lab.strategies.module_plans import chosen_plan, own_plan
from ddp_lab.world.runtime import Runtime

WORDS = 12
# What is trained, with its plan: a class, its options, and the plan; None: that of the model.
EQUAL: dict[str, tuple[type[nn.Module], dict, dict | None]] = {
    "full": (Pairs, {}, FULL),
    "tied": (Pairs, {"tied": True}, FULL),
    "one layer": (Pairs, {}, {"layers.1.down": "row_divided", "head": "replicated"}),
    "own": (Planned, {}, None),
    "own, tied": (Planned, {"tied": True}, None),
    "config": (Base, {}, None),
    "none": (Planned, {}, {}),
    "dropout of what is complete": (Pairs, {"dropout": 0.5}, PAIRS),
}
FURTHER = ["own, tied", "config", "none"]  # slow
QUICK = [name for name in EQUAL if name not in FURTHER]
# The same of plans that are refused by the trial, with the message.
WRONG: dict[str, tuple[dict, dict, str]] = {
    "row in place of column": ({}, {"layers.*.up": "row"}, "layers.0.up fails: RuntimeError: "),
    "half a pair": ({}, {"layers.1.up": "column"}, "layers.1.down fails: RuntimeError: "),
    "q alone": ({}, {"layers.*.attn.q": "column"}, "layers.0.attn fails: RuntimeError: "),
    "norm of some heads": (
        {},
        {name: word for name, word in PAIRS.items() if word != "summed"},
        "the gradient of layers.0.attn.norm.weight differs by ",
    ),
    "sum of complete parts": (
        {},
        {"layers.1.attn.norm": "summed"},
        "the gradient of layers.1.attn.norm.weight differs by ",
    ),
    "dropout of some heads": (
        {"dropout_of_heads": 0.5},
        PAIRS,
        "the model draws random numbers, as dropout does, for a part that is divided: in training "
        "the output of layers.0.attn.out differs by ",
    ),
}


def texts() -> TensorDataset:
    """Return 21 texts with their classes, of which the last batch of eight has five."""
    generator = torch.Generator().manual_seed(3)
    numbers = partial(torch.randint, 0, WORDS, generator=generator)
    return TensorDataset(numbers((21, 5)), numbers((21,)))


def trained(
    strategy: str,
    make: type[nn.Module],
    options: dict,
    plan: dict | None,
    folder: Path,
    resumed: Path | None = None,
    **keys: Any,
) -> dict[str, torch.Tensor] | str:
    """Train for an epoch; return rank 0's weights, or why the plan is refused.

    Args:
        folder: for the weights and a checkpoint.
        resumed: folder of a checkpoint with which training begins.
        keys: other options of the strategy.
    """
    torch.set_default_dtype(torch.float64)
    data = texts()
    if strategy != "single":
        keys["plan"] = plan
    with Lab(strategy, device="cpu", timeout=30, **keys) as lab:
        model = make(words=WORDS, num_classes=WORDS, **options)
        sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
        try:
            trainer = lab.trainer(
                model, tasks.Classification(), sgd, 8, 2, max_grad_norm=0.05, example=data[0]
            )
        except ConfigError as error:
            return str(error)
        if resumed is not None:
            assert trainer.resume(resumed) == (1, 0)
        for batch in trainer.batches(data, trainer.progress.epoch):
            trainer.step(*batch)
        trainer.checkpoint(folder)
        trainer.save(folder / "weights.safetensors")
        return load_file(folder / "weights.safetensors") if lab.is_main else {}


def train_all(strategy: str, folder: Path, names: list[str]) -> dict[str, Any]:
    return {name: trained(strategy, *EQUAL[name], folder / strategy / name) for name in names}


def try_wrong(folder: Path) -> dict[str, Any]:
    return {
        name: trained("tp", Pairs, options, plan, folder)
        for name, (options, plan, _) in WRONG.items()
    }


def continue_all(strategy: str, folder: Path) -> list[Any]:
    """Train for another epoch after each of two strategies; return the weights."""
    return [
        trained(strategy, *EQUAL["tied"], folder / strategy / "more", folder / first / "tied")
        for first in ("single", "tp")
    ]


@once
def outcomes(
    strategy: str, ranks: int, folder: Path, is_slow: bool = False
) -> list[dict[str, Any]]:
    return run_world(ranks, train_all, strategy, folder, FURTHER if is_slow else QUICK)


@once
def refusals(folder: Path) -> list[dict[str, Any]]:
    return run_world(2, try_wrong, folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("weights")


def assert_same(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, atol=1e-12, rtol=0, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *FURTHER])
def test_model_with_a_plan_equals_single(name, folder):
    is_slow = name in FURTHER
    outcome = outcomes("tp", 2, folder, is_slow)[0][name]
    assert isinstance(outcome, dict), outcome
    assert_same(outcome, outcomes("single", 1, folder, is_slow)[0][name])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_plan_is_found_before_the_first_step(name, folder):
    *_, message = WRONG[name]
    for rank in refusals(folder):
        assert isinstance(rank[name], str), "it was trained"
        assert rank[name].startswith("strategy.plan: ")
        assert message in rank[name]


@pytest.mark.slow
def test_checkpoints_resume_with_and_without_a_plan(folder):
    outcomes("single", 1, folder)
    outcomes("tp", 2, folder)
    expected, *others = [
        *run_world(1, continue_all, "single", folder)[0],
        *run_world(2, continue_all, "tp", folder)[0],
    ]
    for weights in others:
        assert_same(weights, expected)


class UsersBlock(Block):
    """A block with a plan, of a file of the user."""


class MixingBlock(Block):
    """A block whose plan divides the tokens where they are mixed, which only some ranks see."""

    def forward(self, tokens):
        return super().forward(tokens) + self.fc2(self.fc1(self.norm2(tokens))).mean(1, True)


def train_blocks(strategy: str, options: dict) -> list[str]:
    """Train a step with each kind of block; return "", or why the plan is refused."""
    messages = []
    images = torch.rand(4, 3, 16, 16)
    with Lab(strategy, device="cpu", timeout=30, **options) as lab:
        for kind in (WrongBlock, UsersBlock, MixingBlock):
            model = make_model("vit", 0)
            model.block1 = kind(16, 4, 32, 0.0, "block1")
            assert isinstance(model, Chain)
            sgd = partial(torch.optim.SGD, lr=0.1)
            try:
                trainer = lab.trainer(model, tasks.Classification(), sgd, 4, example=images[0])
            except ConfigError as error:
                messages.append(str(error))
                continue
            trainer.step(images, torch.arange(4))
            messages.append("")
    return messages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("tp", {}),
        ("mesh", {"tp": 2}),
        ("mesh", {"tp": 2, "sequence_parallel": True}),
    ],
)
def test_wrong_plan_of_a_block_is_found_before_the_first_step(strategy, options):
    for wrong, right, mixing in run_world(2, train_blocks, strategy, options):
        assert right == ""
        divides_tokens = "sequence_parallel" in options
        expected = "the attribute tensor_parallel of MixingBlock: the divided model does not "
        assert mixing.startswith(expected) == divides_tokens
        assert wrong.startswith(
            "the attribute tensor_parallel of WrongBlock: the divided model does not compute what "
            "the model does: block1.fc2 fails: RuntimeError: "
        )


MLP = {
    "model.layers.*.mlp.gate_proj": "column",
    "model.layers.*.mlp.up_proj": "column",
    "model.layers.*.mlp.down_proj": "row",
}
BERT = {
    "bert.encoder.layer.*.attention.self.[qkv]*": "column",
    "bert.encoder.layer.*.attention.output.dense": "row",
    "bert.encoder.layer.*.intermediate.dense": "column",
    "bert.encoder.layer.?.output.dense": "row",
}
LIBRARIES: list[tuple[str, dict | None]] = [
    ("transformers Llama of two key heads, tied", None),
    ("transformers Llama of two key heads, tied", {}),
    ("transformers Llama", MLP),
    ("transformers BERT with a mask", BERT),
    ("timm vit_tiny", {"blocks.*.mlp.fc1": "column", "blocks.*.mlp.fc2": "row"}),
]


def train_libraries(strategy: str, folder: Path) -> list[str | float]:
    """Return the largest difference of a weight from single's, or why the model is refused."""
    options: list[dict] = [{} if strategy == "single" else {"plan": plan} for _, plan in LIBRARIES]
    return [
        models_of_others.trained(strategy, name, folder, **each)
        for (name, _), each in zip(LIBRARIES, options, strict=True)
    ]


@pytest.mark.slow
def test_models_of_libraries_with_a_plan_equal_single(tmp_path):
    run_world(1, train_libraries, "single", tmp_path)
    for (name, _), difference in zip(
        LIBRARIES, run_world(2, train_libraries, "tp", tmp_path)[0], strict=True
    ):
        assert isinstance(difference, float), (name, difference)
        assert difference < 1e-12, name


def train_on_meshes(folder: Path) -> list[dict[str, torch.Tensor] | str]:
    """Train the model with tied weights under meshes; the last plan is wrong."""
    return [
        trained("mesh", *EQUAL["tied"], folder / "mesh", tp=2),
        trained("mesh", *EQUAL["dropout of what is complete"], folder / "mesh", tp=2),
        trained("mesh", *EQUAL["tied"], folder / "mesh", folder / "tp" / "tied", shard=None),
        trained("mesh", Pairs, {}, {"layers.1.up": "column"}, folder, tp=2),
    ]


@pytest.mark.slow
def test_meshes_with_a_plan_equal_single_and_resume_from_tp(folder):
    expected = outcomes("single", 1, folder)[0]
    outcomes("tp", 2, folder)
    tied, dropout, resumed, wrong = run_world(2, train_on_meshes, folder)[0]
    assert_same(tied, expected["tied"])
    assert_same(dropout, expected["dropout of what is complete"])
    assert_same(resumed, run_world(1, continue_all, "single", folder)[0][0])
    assert wrong.startswith("strategy.plan: the divided model does not compute what the model does")


@pytest.mark.parametrize(
    ("key", "value"), [("pp", 2), ("cut", ["head"]), ("sequence_parallel", True)]
)
def test_mesh_with_a_plan_has_no_stages(key, value, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    keys: dict[str, Any] = {
        "shard": 1,
        "tp": 1,
        "pp": 1,
        "sequence_parallel": False,
        "schedule": "1f1b",
        "num_microbatches": 4,
        "cut": None,
        "plan": PAIRS,
    }
    with pytest.raises(ConfigError) as caught:
        Mesh(Runtime("cpu"), "local", **(keys | {key: value}))
    assert str(caught.value).startswith(
        f"strategy.{key}={value}: is not supported with strategy.plan, which divides the layers of "
        "a complete module. Use strategy."
    )


def text_model(**options: Any) -> Pairs:
    return Pairs(words=WORDS, num_classes=WORDS, **options)


@pytest.mark.parametrize(
    ("model", "plan", "tp", "message"),
    [
        (
            text_model(),
            {"layers.*.upp": "column"},
            2,
            "layers.*.upp matches no module. Did you mean layers.*.up",
        ),
        (
            text_model(),
            {"layers.*.up": "colum"},
            2,
            "layers.*.up: colum: there is no such word; did you mean column? allowed: column, "
            "column_gathered, row, row_divided, replicated, summed; and of transformers colwise, ",
        ),
        (
            text_model(),
            {"head": "moe_tp_experts"},
            2,
            "head: moe_tp_experts is not supported: it divides a mixture of experts",
        ),
        (
            text_model(),
            {"head": "sequence_parallel"},
            2,
            "head: sequence_parallel is not supported: it divides the tokens between the layers, "
            "which no word of a plan does here. Leave such layers out, so that every rank computes "
            "all tokens, or use strategy.sequence_parallel=true of strategy=mesh with a Chain of "
            "blocks with a plan. Allowed: column, column_gathered, row, row_divided, replicated, "
            "summed; and of transformers colwise, ",
        ),
        (
            text_model(),
            {"head.weight": "column"},
            2,
            "head.weight matches no module. It is a parameter: name its module, head",
        ),
        (
            text_model(),
            {"layers.*.up": "column", "layers.1.*": "row"},
            2,
            "says both layers.*.up: column and layers.1.*: row of layers.1.up",
        ),
        (
            text_model(),
            {"layers.*.drop": "column"},
            2,
            "cannot divide layers.0.drop (layers.*.drop: column): it is a Dropout, and torch",
        ),
        (text_model(), {"head": "column"}, 5, "strategy.tp=5 must divide its 12 units"),
        (text_model(), {"layers.0.down": "row"}, 3, "strategy.tp=3 must divide its 32 inputs"),
        (
            text_model(heads=2),
            {"layers.*.attn.q": "column"},
            4,
            "strategy.tp=4 must divide its 2 heads of 8 units",
        ),
        (
            text_model(padding=3),
            {"entry": "row"},
            2,
            "cannot divide entry (entry: row): each rank would have some words, and its "
            "padding_idx=3 would",
        ),
        (
            text_model(tied=True),
            {"head": "colwise_rep"},
            2,
            "entry.weight and head.weight are one parameter (tied weights)",
        ),
        (
            text_model(tied=True),
            {"head": "colwise_rep", "entry": "embedding_colwise"},
            2,
            "entry.weight and head.weight are one parameter (tied weights)",
        ),
    ],
)
def test_plan_that_does_not_fit_the_model_is_refused(model, plan, tp, message):
    with pytest.raises(ConfigError) as caught:
        chosen_plan(model, plan, tp)
    assert str(caught.value).startswith("strategy.plan: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (Pairs(), {}),
        (Planned(), Planned._tp_plan),
        (Base(), {f"inner.{name}": word for name, word in Base.config.base_model_tp_plan.items()}),
        (
            nn.ModuleDict({"part": Planned()}),
            {f"part.{name}": word for name, word in Planned._tp_plan.items()},
        ),
    ],
)
def test_plan_of_a_model_is_found(model, expected):
    assert own_plan(model) == expected


@pytest.mark.parametrize(
    ("options", "tp", "complete"),
    [({}, 2, False), ({"num_classes": 11}, 2, True), ({"words": WORDS, "tied": True}, 2, True)],
)
def test_head_of_a_models_own_plan_stays_complete_if_it_cannot_be_divided(options, tp, complete):
    plan = chosen_plan(Planned(**{"num_classes": WORDS, **options}), None, tp)
    assert plan is not None
    assert ("head" not in plan.layers) == complete


def test_models_own_plan_that_tp_does_not_divide_is_refused_with_the_way_out():
    with pytest.raises(ConfigError) as caught:
        chosen_plan(Planned(heads=2), None, 4)
    assert str(caught.value) == (
        "the tensor-parallel plan of Planned: cannot divide layers.0.attn.q (layers.*.attn.[qkv]: "
        "column): strategy.tp=4 must divide its 2 heads of 8 units. Give another plan by "
        "strategy.plan={NAME: WORD, ...}, or use strategy=tp with strategy.plan={}, which divides "
        "the model layer by layer"
    )


def test_plan_without_an_example_is_refused():
    with Lab("tp", device="cpu", plan=PAIRS) as lab:
        message = r"^strategy\.plan: is tried with a sample before the first step: lab\.trainer"
        with pytest.raises(ConfigError, match=message):
            lab.trainer(Pairs(), tasks.Classification(), torch.optim.SGD, batch_size=4)


@pytest.mark.parametrize(
    ("plan", "code", "text"),
    [
        (
            "{layers.*.up: column, layers.*.down: row}",
            0,
            "tp on 2 x cpu: dp 1 x tp 2; 4 layers sharded by strategy.plan, entry,",
        ),
        pytest.param(
            "{layers.*.up: column}",
            2,
            "error: strategy.plan: the divided model does not compute what the model does: "
            "layers.0.down fails: RuntimeError: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_plan_of_the_command_line(plan, code, text, tmp_path):
    exit_code, output = launch(
        f"ddp-lab train --nproc 2 device=cpu runs_dir={tmp_path} strategy=tp epochs=1",
        f"strategy.plan={plan}",
        *OWN,
        "model._target_=planned_models.Pairs",
    )
    assert exit_code == code, output
    assert text in output
    assert output.count("error: ") == (code > 0), "one message"
    assert "Traceback" not in output
    assert any(tmp_path.iterdir()) == (code == 0), "a refused plan leaves no directory"


def test_wrong_plan_of_a_block_without_data_leaves_no_directory(tmp_path):
    code, output = launch(
        f"ddp-lab train --nproc 2 device=cpu runs_dir={tmp_path} strategy=mesh strategy.tp=2",
        *OWN,
        "model._target_=planned_models.wrong_vit",
        "model.init=by_block",
    )
    assert code == 2, output
    assert (
        "error: the attribute tensor_parallel of WrongBlock: the divided model does not " in output
    )
    assert output.count("error: ") == 1
    assert not any(tmp_path.iterdir())
