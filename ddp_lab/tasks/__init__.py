"""What a model is trained for: one file for each task, with its losses and its metrics as sums over samples."""

from ddp_lab.tasks.base import Task
from ddp_lab.tasks.classification import Classification
from ddp_lab.tasks.multi_label import MultiLabel
from ddp_lab.tasks.regression import Regression
from ddp_lab.tasks.segmentation import Segmentation
from ddp_lab.tasks.tokens import Tokens

__all__ = ["Classification", "MultiLabel", "Regression", "Segmentation", "Task", "Tokens"]
