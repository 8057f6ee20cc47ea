"""Models of other libraries, as they are: equal to one device under every strategy, or refused."""

import pytest
from models_of_others import MODELS, PLANS, WORLDS, train_all, train_planned
from slow_rows import extra
from worlds import once, run_world

STRATEGIES = ["ddp", "fsdp", "pipeline"]
# A quarter of the models, so that each package has some. The others are rows of the same test.
CHOSEN = ["timm swin_tiny", "transformers Llama", "transformers T5", "torchvision resnet50"]
OTHERS = [name for name in MODELS if name not in CHOSEN]
# Worlds that combine what other worlds have, most of them on four ranks.
COMBINED = [
    "split, 4 stages",
    "tp, layer by layer",
    "scratch on 4",
    "ddp on 4",
    "fsdp on 4",
    "pipeline on 4",
    "tp=2 on 4",
    "mesh, tp=2 on 4",
    "mesh, tp=2 shard=null on 4",
    "ddp_pipeline on 4",
    "mesh, shard=2 on 4",
    "mesh, pp=2 on 4",
    "mesh, pp=2 shard=2 on 4",
]

# Worlds that trace the model, which takes seconds for each rank and model.
TRACED = ["split", "mesh, pp=2", "mesh, pp=2 tp=2 on 4"]
# Of the slow tests, one model of transformers meets every world that combines nothing, one of timm
# those of them that trace nothing, and nanoGPT's layout one of each kind.
CHOSEN_WORLDS = {
    "timm vit_tiny": [world for world in WORLDS if world not in [*COMBINED, *TRACED]],
    "transformers Llama of two key heads, tied": [
        world for world in WORLDS if world not in COMBINED
    ],
    "nanoGPT's layout, tied": ["tp", "split"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("weights")


@once
def references(folder, is_chosen: bool) -> None:
    run_world(1, train_all, "single", CHOSEN if is_chosen else OTHERS, folder, timeout=600)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    run_world(1, train_all, "single", list(PLANS), folder, timeout=300)
    return folder


def chosen(strategy: str) -> list[str]:
    """Return the models of the slow tests. A pipeline traces them, which takes seconds for each."""
    return CHOSEN[::2] if strategy == "pipeline" else CHOSEN


@once
def differences(strategy, folder, is_chosen: bool) -> dict[str, str | float]:
    references(folder, is_chosen)
    references(folder, True)  # of CHOSEN, some of which are extra under a pipeline
    names = [name for name in MODELS if (name in chosen(strategy)) == is_chosen]
    return run_world(2, train_all, strategy, names, folder, timeout=900)[0]


@once
def outcomes(world, is_chosen: bool, folder) -> dict[str, str | float]:
    names = [name for name in PLANS if (world in CHOSEN_WORLDS[name]) == is_chosen]
    ranks = WORLDS[world].ranks
    return run_world(ranks, train_planned, WORLDS[world], names, folder, timeout=600)[0]


def worlds_and_models() -> list:
    """Return the parameters (world, name), of which those that are not chosen are extra."""
    return [
        pytest.param(world, name, marks=[] if world in CHOSEN_WORLDS[name] else [pytest.mark.extra])
        for world in WORLDS
        for name in PLANS
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "name"),
    [
        row
        for strategy in STRATEGIES
        for row in (
            *((strategy, name) for name in chosen(strategy)),
            *extra((strategy, name) for name in MODELS if name not in chosen(strategy)),
        )
    ],
)
def test_model_of_another_library_equals_single(strategy, name, folder):
    difference = differences(strategy, folder, name in chosen(strategy))[name]
    assert isinstance(difference, float), difference
    assert difference < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), worlds_and_models())
def test_model_under_every_strategy_equals_single_or_is_refused(world, name, planned):
    outcome = outcomes(world, world in CHOSEN_WORLDS[name], planned)[name]
    if reason := WORLDS[world].reason:
        assert reason in str(outcome)
    else:
        assert isinstance(outcome, float), outcome
        assert outcome < 1e-6
