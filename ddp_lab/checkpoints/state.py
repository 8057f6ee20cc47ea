"""What a checkpoint holds: tensors by key, the rest as JSON, and both of all ranks together.

Keys are model.NAME, ema.NAME and optimizer.NAME.STATE, with the names of the model, and task.NAME
of buffers of the loss (loss_state.py). One file holds the full tensors, which rank 0 collects; to a
sharded checkpoint each rank writes its own.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from ddp_lab.checkpoints.files import write_file
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import full_tensor
from ddp_lab.training.optimizer import MakeOptimizer, state_copies
from ddp_lab.training.progress import Progress
from ddp_lab.training.trainer import Trainer

if TYPE_CHECKING:
    from ddp_lab.checkpoints.loss_state import LossState
    from ddp_lab.training.ema import EMA
    from ddp_lab.training.two_modes import EvaluationWeights

Shapes = Mapping[str, tuple[int, ...]]
# writes a copy to a path, after a call of the second argument
Write = Callable[[Path, Callable[[], None]], None]
KEYS = {"progress", "seed", "scheduler", "optimizer"}  # in every checkpoint, besides tensors
LOSS_SCALE = "loss_scale"  # in those of runs with precision=fp16
SET_BY_LOOP = "set_by_loop"  # of a schedule that leaves the rates to a loop (KeptRates)


@dataclass
class State:
    """What is saved and loaded.

    Attributes:
        strategy: after `Strategy.setup`.
        optimizer, scheduler: of its parameters.
        shapes: the shape of each tensor of the full model by name.
        ema: weights of evaluations, such as averages; None: they are those that train.
        seed: the seed of this launch.
    """

    strategy: Strategy
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    shapes: Shapes
    ema: "EMA | EvaluationWeights | None" = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._loss = first_state(self.strategy)

    @classmethod
    def of(cls, trainer: Trainer, shapes: Shapes) -> "State":
        """Return what is saved of a trainer. `shapes` is that of the attributes."""
        return cls(
            strategy=trainer.strategy,
            optimizer=trainer.optimizer,
            scheduler=trainer.scheduler,
            shapes=shapes,
            ema=trainer.ema,
            seed=trainer.seed,
        )

    def weights(self) -> dict[str, torch.Tensor]:
        """Return this rank's weights and their averages by key.

        Shards are DTensors, and nothing is copied.
        """
        model = self.strategy.module.state_dict()
        averages = {} if self.ema is None else self.ema.shards()
        tensors = {f"model.{name}": tensor for name, tensor in model.items()}
        return tensors | {
            f"ema.{name}": tensor for name, tensor in averages.items() if name in model
        }

    def loss_state(self) -> dict[str, torch.Tensor]:
        """Return the buffers of the loss that the steps have changed by key. Nothing is copied.

        Of a pipeline only the ranks that compute the loss have some.
        """
        if self._loss is None or not self.strategy.is_metric_rank:
            return {}
        return self._loss.changed()

    def part(self, progress: Progress) -> tuple[dict[str, torch.Tensor], str]:
        """Return this rank's part of a checkpoint: its tensors and the rest.

        The tensors are returned by key and not copied, the rest as JSON under KEYS.

        Before the first step an optimizer without a state gets its initial one.
        """
        # loads 700 modules in 0.5 s
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        # first: it reshards what an evaluation has gathered (fsdp, reshard_after_forward=false)
        weights = self.weights()
        is_empty = not self.optimizer.state
        groups_before = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        optimizer = cast(
            "dict[str, Any]", get_optimizer_state_dict(self.strategy.module, self.optimizer)
        )
        if is_empty:  # torch has taken a step with zeros, which some optimizers count
            for group, before in zip(self.optimizer.param_groups, groups_before, strict=True):
                group.update(before)
            for saved, before in zip(optimizer["param_groups"], groups_before, strict=True):
                saved.update(before)
        if is_empty and progress.step:
            # A stage of a pipeline none of whose parameters has had a gradient. torch has made a
            # state by a step with zeros.
            self.optimizer.state.clear()
            optimizer["state"] = {}

        values = {
            (name, key): value
            for name, state_of_parameter in optimizer["state"].items()
            for key, value in state_of_parameter.items()
        }
        tensors = {
            f"optimizer.{name}.{key}": value
            for (name, key), value in values.items()
            if torch.is_tensor(value)
        }

        others: dict[str, dict[str, Any]] = {}
        for (name, key), value in values.items():
            if not torch.is_tensor(value):
                others.setdefault(name, {})[key] = value
        rest: dict[str, Any] = {
            "progress": asdict(progress),
            "seed": self.seed,
            "scheduler": self.scheduler.state_dict(),
        }
        if self.strategy.loss_scale is not None:
            rest[LOSS_SCALE] = self.strategy.loss_scale.saved()
        kind = type(self.optimizer).__name__
        rest["optimizer"] = {
            "kind": kind,
            "state": others,
            "param_groups": optimizer["param_groups"],
        }
        # Learning rates are tensors on the GPU with CUDA graphs. Of options that are objects the
        # description is enough: a resume takes options from the config, and compares their names.
        plain = json.dumps(
            rest, default=lambda value: value.item() if torch.is_tensor(value) else str(value)
        )
        return weights | self.loss_state() | tensors, plain


def first_state(strategy: Strategy) -> "LossState | None":
    """Return the state of the loss before training; None if it has no buffers."""
    if not strategy.task.has_buffers:
        return None
    from ddp_lab.checkpoints.loss_state import LossState

    return LossState(strategy.task_of_steps)


def gather_full_state(
    strategy: Strategy, tensors: dict[str, torch.Tensor], rest: str = "{}"
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Return copies of all stages' full tensors in host memory, and the rest of each pipeline rank.

    Collective.

    Args:
        tensors, rest: as from `State.part`; the same keys in the same order on all ranks that share
            the tensors.

    Returns:
        Both are empty on all ranks but rank 0.
    """
    ranks = [0] if strategy.pp_group is None else dist.get_process_group_ranks(strategy.pp_group)
    keeps = 0 in ranks and strategy.runtime.rank in ranks
    full = {key: full_tensor(tensor, keeps) for key, tensor in tensors.items()}
    if not keeps:
        return {}, []
    parts: list[tuple[dict[str, torch.Tensor], str]] = [(full, rest)]
    if strategy.pp_group is not None:
        gathered = [(full, rest)] * len(ranks) if strategy.runtime.is_main else None
        dist.gather_object((full, rest), gathered, dst=0, group=strategy.pp_group)
        parts = gathered or []
    return {
        key: tensor for tensors_of_rank, _ in parts for key, tensor in tensors_of_rank.items()
    }, [json.loads(each) for _, each in parts]


def merge(rests: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is not a tensor in a checkpoint, of the same of each rank."""
    states = [rest["optimizer"]["state"] for rest in rests]
    groups = zip(*(rest["optimizer"]["param_groups"] for rest in rests), strict=True)
    optimizer = {
        "kind": rests[0]["optimizer"]["kind"],
        "state": {name: values for state in states for name, values in state.items()},
        "param_groups": [
            same[0]
            | {"params": list(dict.fromkeys(name for group in same for name in group["params"]))}
            for same in groups
        ],
    }
    others = {key: rests[0][key] for key in (*KEYS, LOSS_SCALE) if key in rests[0]}
    return others | {"optimizer": optimizer}


def content_of(tensors: Mapping[str, torch.Tensor], rest: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a checkpoint of one file.

    It has KEYS and "model", "ema" of averages, and "task" of a loss with a state.

    Args:
        tensors: full ones by key.
        rest: as from `merge`.
    """
    optimizer = rest["optimizer"]
    parts: dict[str, dict[str, torch.Tensor]] = {"model": {}, "ema": {}, "task": {}}
    state: dict[str, dict[str, Any]] = {
        name: dict(state_of_parameter) for name, state_of_parameter in optimizer["state"].items()
    }
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        if part == "optimizer":
            name, _, key_of_state = name.rpartition(".")
            state.setdefault(name, {})[key_of_state] = tensor
        else:
            parts[part][name] = tensor

    # frozen weights are no averages
    averages = {"ema": parts["model"] | parts["ema"]} if parts["ema"] else {}
    of_task = {"task": parts["task"]} if parts["task"] else {}
    optimizer = {**optimizer, "state": state}
    return rest | {"model": parts["model"], **averages, **of_task, "optimizer": optimizer}


def copy_full(state: State, progress: Progress) -> Write | None:
    """Collect a copy of the full state on rank 0; return there what writes it as one file.

    Collective.

    The other ranks get None.
    """
    full, rests = gather_full_state(state.strategy, *state.part(progress))
    if not rests:
        return None

    def write(path: Path, before: Callable[[], None]) -> None:
        before()
        write_file(path, content_of(full, merge(rests)))

    return write


def checkpoint_bytes(make_optimizer: MakeOptimizer, model: nn.Module, ema: bool) -> int:
    """Return the size in bytes of a checkpoint's tensors.

    They are the unsharded model, its averages and the optimizer's state.

    Args:
        make_optimizer: constructs the optimizer of a list of parameters.
        model: the unsharded model.
        ema: whether the weights are averaged.
    """
    weights = sum(tensor.nbytes for tensor in model.state_dict().values())
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    averages = weights if ema else 0
    return weights + averages + state_copies(make_optimizer, model.parameters()) * trained
