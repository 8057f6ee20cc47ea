"""Models of other libraries, as they are: equal to one device under every strategy, or refused."""

import pytest
from models_of_others import MODELS, PLANS, WORLDS, train_all, train_planned
from worlds import once, run_world

STRATEGIES = ["ddp", "fsdp", "pipeline"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    run_world(1, train_all, "single", list(MODELS), folder, timeout=600)
    return folder


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    run_world(1, train_all, "single", list(PLANS), folder, timeout=300)
    return folder


@once
def differences(strategy, folder) -> dict[str, str | float]:
    return run_world(2, train_all, strategy, list(MODELS), folder, timeout=900)[0]


@once
def outcomes(world, folder) -> dict[str, str | float]:
    return run_world(WORLDS[world].ranks, train_planned, WORLDS[world], folder, timeout=600)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_model_of_another_library_equals_single(strategy, name, folder):
    difference = differences(strategy, folder)[name]
    assert isinstance(difference, float), difference
    assert difference < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("world", WORLDS)
def test_model_under_every_strategy_equals_single_or_is_refused(world, name, planned):
    outcome = outcomes(world, planned)[name]
    if reason := WORLDS[world].reason:
        assert reason in str(outcome)
    else:
        assert isinstance(outcome, float), outcome
        assert outcome < 1e-6
