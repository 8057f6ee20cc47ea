"""What a model is trained for: a file for each task, with its losses and metrics as sums."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddp_lab.tasks.base import Task
    from ddp_lab.tasks.classification import Classification
    from ddp_lab.tasks.multi_label import MultiLabel
    from ddp_lab.tasks.regression import Regression
    from ddp_lab.tasks.segmentation import Segmentation
    from ddp_lab.tasks.tokens import Tokens

__all__ = ["Classification", "MultiLabel", "Regression", "Segmentation", "Task", "Tokens"]

FILES = {
    "Classification": "classification",
    "MultiLabel": "multi_label",
    "Regression": "regression",
    "Segmentation": "segmentation",
    "Task": "base",
    "Tokens": "tokens",
}


def __getattr__(name: str) -> Any:
    """Import a task when it is first used: a run has one of them."""
    if name in FILES:
        return getattr(importlib.import_module(f"ddp_lab.tasks.{FILES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
