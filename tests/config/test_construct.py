"""Constructors of the user that raise: one message with the file and the line."""

import re

import pytest

from ddp_lab.config.build import construct, options
from ddp_lab.config.errors import ConfigError
from ddp_lab.run.build import build_shape


class Wrong:
    def __init__(self, error: str):
        raise {
            "bug": TypeError("a bug."),
            "mistake": ConfigError("size=3: must be even"),
            "memory": MemoryError(),
        }[error]


def test_constructor_that_raises_is_reported_with_key_type_text_and_place():
    with pytest.raises(ConfigError) as error:
        construct("task", {"_target_": f"{__name__}.Wrong", "error": "bug"})
    expected = (
        rf"task\._target_={__name__}\.Wrong: cannot be constructed: TypeError: a bug "
        r"\(test_construct\.py, line \d+\)"
    )
    assert re.fullmatch(expected, str(error.value))
    assert error.value.__suppress_context__, "a traceback of Hydra would follow"


@pytest.mark.parametrize(("error", "kind"), [("mistake", ConfigError), ("memory", MemoryError)])
def test_what_says_all_itself_is_raised_unchanged(error, kind):
    with pytest.raises(kind, match=r"^(size=3: must be even)?$"):
        construct("task", {"_target_": f"{__name__}.Wrong", "error": error})


def test_exception_of_a_class_of_ours_keeps_its_traceback():
    with pytest.raises(TypeError):
        construct("strategy", {"_target_": "ddp_lab.strategies.ddp.DDP", "no_such": 1})


def test_shape_of_a_scheduler_that_cannot_be_constructed_is_reported():
    with pytest.raises(
        ConfigError, match=r"^scheduler\._target_=.*Wrong: cannot be constructed: TypeError: a bug"
    ):
        build_shape({"_target_": f"{__name__}.Wrong", "error": "bug"}, 3)


@pytest.mark.parametrize("group", ["callbacks", "loss", "model", "data.dataset"])
def test_constructor_whose_arguments_python_does_not_know_is_refused(group):
    message = re.escape(f"{group}._target_=builtins.dict: Python does not know its arguments")
    with pytest.raises(ConfigError, match=f"^{message}"):
        options(group, {"_target_": "builtins.dict"})
