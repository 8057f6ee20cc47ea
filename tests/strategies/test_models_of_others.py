"""Models of other libraries, as they are: equal to one device under every strategy, or refused."""

import pytest
from models_of_others import MODELS, train_all
from worlds import once, run_world

STRATEGIES = ["ddp", "fsdp", "pipeline"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    run_world(1, train_all, "single", list(MODELS), folder, timeout=600)
    return folder


@once
def differences(strategy, folder) -> dict[str, str | float]:
    return run_world(2, train_all, strategy, list(MODELS), folder, timeout=900)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_model_of_another_library_equals_single(strategy, name, folder):
    difference = differences(strategy, folder)[name]
    assert isinstance(difference, float), difference
    assert difference < 1e-6
