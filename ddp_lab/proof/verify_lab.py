"""The proof of a model, a loss and a dataset of a script: `Lab.verify`."""

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from ddp_lab.config.build import find_target
from ddp_lab.config.errors import ConfigError, count
from ddp_lab.lab.lab import Lab
from ddp_lab.proof.compare import RunReport, compare
from ddp_lab.proof.plans import (
    Plan,
    batch_size_for,
    check_names,
    check_ranks,
    is_chosen,
    make_plans,
    samples_for,
    single,
)
from ddp_lab.proof.recording import RecordedStep, Recording, without_dropout
from ddp_lab.proof.reference import RunFacts
from ddp_lab.proof.subject import TIMEOUT, leave_group
from ddp_lab.proof.verify_run import preload
from ddp_lab.proof.workers import Workers
from ddp_lab.strategies.batch_norm import has_batch_norm
from ddp_lab.tasks.base import LossFunction, Task


@dataclass(frozen=True)
class LabRun:
    """A training in a Lab, for some steps on the CPU.

    Attributes:
        model: on the CPU. It is copied, and stays as it is.
        loss, optimizer, accumulate, targets, collate_fn: as for `Lab.trainer`.
        dataset: with as many samples as three steps have.
        seed: of the Lab.
    """

    model: nn.Module
    loss: LossFunction | Task
    dataset: Any
    optimizer: Callable[..., torch.optim.Optimizer]
    accumulate: int
    targets: str | int | None
    collate_fn: Callable[[list[Any]], Any] | None
    seed: int

    def record(
        self, plan: Plan, dtype: torch.dtype, reverses: bool, max_grad_norm: float | None
    ) -> Recording:
        """Train with a strategy, as `reference.Subject`. Collective."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        recording = Recording(0)
        problem = ""
        Lab.forget_open()  # that of the process from which this one was forked
        try:
            with Lab(**lab_arguments(plan), device="cpu", seed=self.seed, timeout=TIMEOUT) as lab:
                try:
                    recording = self._train(lab, plan, dtype, reverses, max_grad_norm)
                except ConfigError as error:  # its traceback would keep the process group alive
                    problem = str(error)
                leave_group()
        finally:
            torch.set_default_dtype(before)
        if problem:
            raise ConfigError(problem)
        return recording

    def _train(
        self,
        lab: Lab,
        plan: Plan,
        dtype: torch.dtype,
        reverses: bool,
        max_grad_norm: float | None,
    ) -> Recording:
        """Train for an epoch by a loop over `batches`, as scripts do. Collective."""
        model = copy.deepcopy(self.model)
        dropout = without_dropout(model)
        if dtype == torch.float64:
            model = model.double()
        dataset = in_dtype(self.dataset, dtype)
        collate_fn = self.collate_fn and partial(collate_in_dtype, self.collate_fn, dtype)
        trainer = lab.trainer(
            model,
            copy.deepcopy(self.loss),
            self.optimizer,
            batch_size_for(self.accumulate),
            self.accumulate if plan.accumulate is None else plan.accumulate,
            max_grad_norm,
            dataset[0],
            targets=self.targets,
            collate_fn=collate_fn,
        )
        step = RecordedStep(trainer.eager_step, reverses)
        trainer.eager_step = step
        for inputs, targets in trainer.batches(dataset, 0):
            trainer.step(inputs, targets)
        return replace(step.end(), dropout=dropout)


def verify_lab(
    lab: Lab,
    run: LabRun,
    max_grad_norm: float | None = None,
    nproc: int = 4,
    only: tuple[str, ...] = (),
) -> RunReport:
    """Compare the strategies with `single`; the arguments are those of `Lab.verify`.

    Raises:
        ConfigError: an argument is not allowed, ranks cannot be forked here, the trainer is refused
            on one device, or is not the same twice.
    """
    require_one_process()
    check_ranks(nproc, "nproc=")
    check_names(only, "only=")
    node = lab.strategy_options
    options = {key: value for key, value in node.items() if key != "_target_"}
    own_plan = None
    if node != single().strategy:
        target = find_target("strategy._target_", node["_target_"])
        ranks = 1 if target.one_process else nproc
        name = f"{target.__name__} of the Lab" + (f" on {ranks}" if ranks > 1 else "")
        own_plan = Plan(name, ranks, node)
    synchronises = has_batch_norm(run.model)
    facts = RunFacts(max_grad_norm, run.accumulate, synchronises)
    plans = make_plans(own_plan, options, nproc, run.accumulate, synchronises)
    plans = [plan for plan in plans if is_chosen(plan, only)]
    preload(plans)
    with Workers(run, nproc) as workers:
        return compare(workers, single(), plans, facts)


def require_one_process() -> None:
    """Check that ranks can be forked from this process.

    Raises:
        ConfigError: they cannot.
    """
    if "RANK" in os.environ:
        raise ConfigError(
            "lab.verify: starts ranks itself, but this process is a rank already; call it in a "
            "script that is started by python"
        )
    if torch.cuda.is_initialized() or dist.is_initialized():
        raise ConfigError(
            "lab.verify: ranks cannot be forked from a process that has used a GPU or opened a "
            "process group; call it before lab.trainer and before anything is on a GPU"
        )


def lab_arguments(plan: Plan) -> dict[str, Any]:
    """Return the arguments of a Lab that are those of the plan's strategy."""
    options = {key: value for key, value in plan.strategy.items() if key != "_target_"}
    return {"strategy": find_target("strategy._target_", plan.strategy["_target_"]), **options}


def few_samples(dataset: Any, accumulate: int) -> Any:
    """Return as many samples of a map-style dataset as three steps have.

    Raises:
        ConfigError: it has fewer.
    """
    number = samples_for(batch_size_for(accumulate))
    size = len(dataset)
    if size < number:
        raise ConfigError(
            f"dataset: has {count(size, 'sample')}, but three steps with a partial last batch need "
            f"{number}. Use a larger one, or a smaller accumulate"
        )
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(tensor[:number] for tensor in dataset.tensors))
    return torch.utils.data.Subset(dataset, range(number))


def in_dtype(dataset: Any, dtype: torch.dtype) -> Any:
    """Return a dataset whose floating-point tensors have a dtype."""
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(sample_in_dtype(tensor, dtype) for tensor in dataset.tensors))
    return DatasetInDtype(dataset, dtype)


@dataclass(frozen=True)
class DatasetInDtype:
    """A map-style dataset whose floating-point tensors have a dtype.

    Attributes:
        dataset: map-style.
        dtype: of its floating-point tensors.
    """

    dataset: Any
    dtype: torch.dtype

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> Any:
        return sample_in_dtype(self.dataset[number], self.dtype)


def sample_in_dtype(sample: Any, dtype: torch.dtype) -> Any:
    """Return a sample, or a part of one, whose floating-point tensors have a dtype."""
    if isinstance(sample, torch.Tensor):
        return sample.to(dtype) if sample.is_floating_point() else sample
    if type(sample) in (tuple, list):
        return type(sample)(sample_in_dtype(part, dtype) for part in sample)
    if isinstance(sample, dict):
        return {key: sample_in_dtype(part, dtype) for key, part in sample.items()}
    return sample


def collate_in_dtype(
    collate_fn: Callable[[list[Any]], Any], dtype: torch.dtype, samples: list[Any]
) -> Any:
    """Return the batch of a collate_fn, whose floating-point tensors get a dtype."""
    return sample_in_dtype(collate_fn(samples), dtype)
