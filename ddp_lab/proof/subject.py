"""The training that a proof is about: a run of a config, which each strategy trains."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ddp_lab.config.build import Config, plain
from ddp_lab.config.change import changed
from ddp_lab.config.errors import ConfigError, count
from ddp_lab.data.batch import apply
from ddp_lab.data.collated import Collated
from ddp_lab.data.dataset import Dataset, Indexed, InMemory, Samples
from ddp_lab.data.trees import Tree
from ddp_lab.models.make import make_model
from ddp_lab.proof.plans import Plan, batch_size_for, samples_for
from ddp_lab.proof.recording import Recording, record, without_dropout
from ddp_lab.proof.reference import RunFacts
from ddp_lab.run.build import prepare
from ddp_lab.run.build_data import load_dataset
from ddp_lab.run.build_model import model_spec
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import has_batch_norm
from ddp_lab.strategies.dtensor import forget_layouts
from ddp_lab.world.runtime import Runtime

TIMEOUT = 60.0  # seconds of a collective
# What does not change what a step computes, or cannot be seen on a CPU: the rest of the run's
# config stays as it is.
PLAIN = {
    "device": "cpu",
    "precision": "float32",
    "speed": "off",
    "compile": False,
    "cuda_graph": False,
    "memory_limit": None,
    "timeout": TIMEOUT,
    "epochs": 1,
    "max_steps": None,
    "max_tokens": None,
    "max_minutes": None,
    "warmup_epochs": 0,
    "warmup_steps": None,
    "scaling": "strong",
    "lr_scaling": "none",
    "resume": "never",
    "name": None,
    "profile": False,
    "inject": None,
    "callbacks": [],
    "metrics": [],
    "tracker": "none",
    "check_replicas": None,
    "patience": None,
    "optimize": "auto",
    "evaluate_every": None,
}
OF_GROUPS = {
    "data": {"num_workers": 0},
    "checkpoint": {"mirror": None, "best": None, "every_minutes": None},
}


@dataclass(frozen=True)
class ConfigRun:
    """A run of a config, for some steps on the CPU.

    Attributes:
        cfg: the config, in which the batch has a size that every strategy can divide.
        dataset: of which three steps read each sample once.
    """

    cfg: Config
    dataset: Dataset

    @classmethod
    def of(cls, cfg: Config) -> "ConfigRun":
        """Return the run of a checked config.

        Raises:
            ConfigError: the data cannot be loaded, or are too few.
        """
        accumulate = 1 if cfg.accumulate == "auto" else cfg.accumulate
        batch_size = batch_size_for(accumulate, cfg.strategy.get("num_microbatches", 1))
        sizes = {"batch_size": batch_size, "accumulate": accumulate}
        plain = {key: value for key, value in PLAIN.items() if key in cfg}
        cfg = changed(cfg, plain | OF_GROUPS | sizes)
        with Runtime("cpu") as runtime:
            dataset = load_dataset(cfg, runtime)
        return cls(cfg, few_samples(dataset, samples_for(batch_size)))

    def record(
        self, plan: Plan, dtype: torch.dtype, reverses: bool, max_grad_norm: float | None
    ) -> Recording:
        """Train with a strategy, and return what its steps have computed. Collective.

        Args:
            plan: the strategy; this process is one of its ranks.
            dtype: of the computation.
            reverses: as for `RecordedStep`.
            max_grad_norm: largest norm of the gradients; None: no clipping.

        Raises:
            ConfigError: the run is refused.
        """
        values: dict[str, Any] = {"max_grad_norm": max_grad_norm}
        if plan.accumulate is not None:
            values["accumulate"] = plan.accumulate
        cfg = changed(self.cfg, values)
        cfg.strategy = plan.strategy  # merged, it would keep options of another one
        return in_group(partial(train, cfg, self.dataset, reverses), dtype)

    def strategy_options(self) -> dict[str, Any]:
        """Return the config group `strategy` of the run."""
        return plain(self.cfg)["strategy"]

    def facts(self) -> RunFacts:
        """Return what a comparison must know of the run.

        Raises:
            ConfigError: the model cannot be made.
        """
        values = plain(self.cfg)
        return RunFacts(values["max_grad_norm"], values["accumulate"], self.has_batch_norm())

    def has_batch_norm(self) -> bool:
        """Return whether the model has a layer whose statistics depend on the batch.

        It makes the model, so that ranks that are forked after it need not import its library. It
        is not tried: a process that has computed gradients cannot fork ranks that do so where there
        is a GPU.

        Raises:
            ConfigError: the model cannot be made.
        """
        spec = model_spec(self.cfg.model, self.dataset.model_shape())
        with Runtime("cpu") as runtime:
            built = make_model(spec, runtime, self.cfg.seed, None, with_weights=False)
        return has_batch_norm(built.model)


def in_group(work: Callable[[Runtime], Recording], dtype: torch.dtype) -> Recording:
    """Run `work` with a process group of its own, in a dtype. Collective.

    Nothing that it has made outlives it: the next strategy begins as in a new process.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with Runtime("cpu", timeout=TIMEOUT) as runtime:
            try:
                recording = work(runtime)
                problem = ""
            except ConfigError as error:  # its traceback would keep the process group alive
                recording = Recording(0)
                problem = str(error)
            leave_group()
    finally:
        torch.set_default_dtype(before)
    if problem:
        raise ConfigError(problem)
    return recording


def leave_group() -> None:
    """Forget what the process knows of the last strategy, before its process group closes."""
    Strategy.active = None
    forget_layouts()


def train(cfg: Config, dataset: Dataset, reverses: bool, runtime: Runtime) -> Recording:
    """Prepare the run as train.py does, and train for an epoch. Collective.

    Args:
        cfg: the config.
        dataset: to train on.
        reverses: as for `RecordedStep`.
        runtime: the ranks.
    """
    data = in_dtype(dataset, torch.get_default_dtype())
    job = runtime.succeed("checks", partial(prepare, cfg, runtime, dataset=data))
    dropout = without_dropout(job.model)
    with job.options.backend_flags(runtime):
        trainer = job.trainer()
        recording = record(trainer.eager_step, job.loaders["train"], reverses)
        return replace(recording, dropout=dropout)


def few_samples(dataset: Dataset, number: int) -> Dataset:
    """Return the dataset with some of its training samples; of a stream with the first ones.

    Raises:
        ConfigError: it has fewer.
    """
    size = dataset.train.size
    train: Any = dataset.train
    if train.is_endless:
        return replace(dataset, train=InMemory(*train.batch(0, range(number))))
    if size < number:
        raise ConfigError(
            f"data: the training set has {count(size, 'sample')}, but three steps with a partial "
            f"last batch need {number}. Use a larger one, for example data=synthetic for images, "
            "or a smaller accumulate"
        )
    # at random, because a folder is in the order of its classes
    order = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    return replace(dataset, train=dataset.train.subset(order[:number].sort()[0], augment=True))


def in_dtype(dataset: Dataset, dtype: torch.dtype) -> Dataset:
    """Return the dataset with training samples whose floating-point numbers have a dtype."""
    return replace(dataset, train=samples_in_dtype(dataset.train, dtype))


def samples_in_dtype(samples: Samples, dtype: torch.dtype) -> Samples:
    """Return samples whose floating-point numbers have a dtype. Images and tokens have none."""
    convert = partial(tree_in_dtype, dtype=dtype)
    if isinstance(samples, InMemory):
        return InMemory(convert(samples.inputs), convert(samples.targets))
    if isinstance(samples, Indexed):
        return replace(samples, read=partial(read_in_dtype, samples.read, dtype))
    if isinstance(samples, Collated):
        values = {name: getattr(samples, name) for name in Collated.__dataclass_fields__}
        return CollatedInDtype(**values, dtype=dtype)
    return samples


def tree_in_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """Return a tree whose floating-point tensors have a dtype; None stays None."""
    if tree is None:
        return None
    return apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def read_in_dtype(read: Callable[[int], tuple[Any, Tree]], dtype: torch.dtype, number: int) -> Any:
    """Read a sample; its floating-point tensors get a dtype, an image stays as it is."""
    inputs, targets = read(number)
    is_tree = isinstance(inputs, (torch.Tensor, tuple, dict))
    return tree_in_dtype(inputs, dtype) if is_tree else inputs, tree_in_dtype(targets, dtype)


@dataclass(frozen=True)
class CollatedInDtype(Collated):
    """Samples of any form, whose batches get a dtype.

    Attributes:
        dtype: of floating-point numbers.
    """

    dtype: torch.dtype = torch.float32

    def batch(self, epoch: int, indices: Any) -> tuple[Tree, Tree]:
        inputs, targets = super().batch(epoch, indices)
        return tree_in_dtype(inputs, self.dtype), tree_in_dtype(targets, self.dtype)
