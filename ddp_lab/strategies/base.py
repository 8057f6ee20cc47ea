"""The base class of all strategies: a training step as on one device.

Each strategy overrides what differs. What most steps do not need has a file each, which is loaded
by the first step that does:

    requirements.py   what of a launch and of inputs a strategy refuses
    model_checks.py   what of a model a strategy refuses before it divides it
    micro_batches.py  gradient accumulation, and batches with padding
    nested.py         inputs or outputs that are a tuple or dict

What of a step is compiled is in speed/compile.py, and what of it is saved in checkpoints/state.py.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from ddp_lab.config.types import BatchNorm, Checkpointing
from ddp_lab.models.chain import has_hooks
from ddp_lab.strategies.dtensor import put
from ddp_lab.tasks.base import Measure, Task, measure
from ddp_lab.tasks.classification import Classification
from ddp_lab.world.runtime import Runtime

# The imports within methods below are of files that a plain run does not use: one tensor as input,
# one rank, no option of the strategy. tests/test_startup.py limits how many files it may load, and
# there is none to spare. Whatever imports such a file at the top of this one adds it to every run.
if TYPE_CHECKING:
    from ddp_lab.data.trees import Tree
    from ddp_lab.models.initial_weights import Weights
    from ddp_lab.strategies.checkpointing import Recomputed
    from ddp_lab.strategies.head_losses import HeadLosses
    from ddp_lab.strategies.loss_scale import LossScale
    from ddp_lab.strategies.parameter_hooks import Hooked, Key
    from ddp_lab.strategies.work_time import WorkTimer

Module = TypeVar("Module", bound=nn.Module)

ALL_PERFORMANCE_OPTIONS = frozenset({"cuda_graph", "compile", "channels_last", "fused"})


class Strategy(ABC):
    """One way of distributing a training step over devices.

    The methods are called in this order. A strategy must have `setup` and overrides what differs of
    the others:

        strategy = SomeStrategy(runtime, ...)   before the data: which local batch this rank reads
        strategy.expect(example=..., ...)       what is known of the model and its inputs
        strategy.partition(model, samples)      which rank holds what
        strategy.time_work()                    if the ranks are compared
        strategy.place(model, task)             the process group opens; model and task to devices
          setup(model)                            moves, wraps, cuts; sets `module` and `forward`
        strategy.use_compiled(...)              if the step is compiled
        strategy.refuse_bare_calls()            if a loop of the user may call the model
        optimizer = SGD(strategy.module.parameters())
        strategy.train()
        strategy.forward_backward(...)          all of a training step but the optimizer's:
          no_sync                                 of all gradient-accumulation steps but the last:
            add_gradient                            forward, loss and backward of one of them
          reduce_gradients                        communication after the last one
        strategy.gradient_norm()                for clipping; then the optimizer's step
        strategy.predict(...)                   logits of a batch, in evaluation

    Args:
        runtime: of this rank.
        mesh_axes: sizes of the mesh axes within a replica, by name; the axis dp has the other
            ranks. Consecutive ranks share a replica, because they are the closest: with tp=2,
            ranks 0 and 1 are replica 0.
        batch_norm: ranks over which BatchNorm computes its statistics in training: each rank
            separately (local), or all ranks that read different local batches together (sync).

    Attributes, besides those of the class:
        axes: size of each axis of the device mesh by name; the last one varies fastest with the
            rank.
        dp_rank, dp_size: a global batch consists of `dp_size` local batches, of which this rank
            reads number `dp_rank`.
        pp_rank: number of this rank in its pipeline; 0 without one.
        pp_group: ranks of this rank's pipeline, each with its own stages; None: every rank has all
            blocks.
        dp_group: ranks that hold the same part of the model and read different local batches; None:
            all ranks.
        replicas: number of copies of the model that share a global batch.
        num_devices: number of devices in use, over all ranks.
        is_metric_rank: whether this rank's sums count; True on one rank of each replica.
        device: device that this rank's batches must be on.
        devices: those that this rank uses; split may name one several times.
        task: what the model is trained for, with its loss, on `device`; known in `setup`.
        initial_weights: of a model that is on the meta device; None if the model has its weights,
            and after `setup`.
        autocast: returns the context of the forward pass.
        measure: returns the loss to backpropagate and the sums of a micro-batch:
            `tasks.base.measure`, or what it was compiled to.
        parameter_hooks: of the user, taken before `setup`; called at the end of a step.
        bubble: fraction of a step in which the ranks of a balanced pipeline are idle; None: it is
            no pipeline.
        unsupported: why options of the strategy exclude a performance option, by its name. Known
            after `partition`.
        written: by the name of a parameter that a forward pass changes, the name of the module that
            does so; None: not known. Set by `partition`.
        calls_blocks: whether the blocks of a Chain are called, and not the model.
        watches_writes: whether the model has code that may change a parameter in a later forward
            pass. Set by `partition`.
        idle: names of the parameters that a trial has found to be unused.
        watched: those of them that are frozen, by name, because the strategy needs a gradient of
            every parameter that is not.
        check_first: gets the inputs of the first local batch, of which the shapes were not known
            before; None: nothing is left to be checked.
        active: the strategy whose batch was begun last in this process; None: there is none.
        global_size: number of samples in the GLOBAL batch that was begun last, without padding.
        accumulate: number of gradient-accumulation steps of that batch.
        in_loop: whether a loop of the user calls the model with that batch.
        head_losses: computes the losses in the model's last layer; None: the model returns logits.
            Known after `setup`.
        loss_scale: the scale of the loss with precision=fp16; else None. Known in `setup`.
        timer: of this rank's work in a step; None: it is not timed.

    Raises:
        ConfigError: a one-process strategy was started with several ranks, the device is not
            supported by the strategy or the precision, or the number of ranks is not divisible by
            the mesh axes.
    """

    # by shards, so that hooks on those of the user's model would be lost
    replaces_parameters: bool = False
    one_process: ClassVar[bool] = False  # one process drives all devices, without a process group
    cuts_model: bool = False  # into stages; a Chain between its blocks
    divides_blocks: bool = False  # of a Chain, so that a plain nn.Sequential becomes one
    num_microbatches: int = 1  # into which the strategy divides a batch by itself
    supports_mps: ClassVar[bool] = False  # can train on a Mac's GPU
    fp16_devices: ClassVar[frozenset[str]] = frozenset({"cuda"})  # that train with precision=fp16
    # a loop may call the complete model and the backward pass (Trainer.forward)
    supports_own_steps: ClassVar[bool] = False
    # the complete model is called on one device, so that its last layer may compute the losses
    computes_head_losses: bool = False
    # the supported ones of ALL_PERFORMANCE_OPTIONS
    supported_options: ClassVar[frozenset[str]] = frozenset()
    compiled_by_block: bool = False  # every block of the model is compiled alone
    # bytes that are sent during the backward pass: the arguments of `Chain.pieces`
    bucket_sizes: tuple[float, ...] = ()
    # whether steps may leave parameters unused; None: there is no such key
    find_unused_parameters: bool | None = None
    copies_weights: bool = False  # a forward pass has copies of the parameters, as those of fsdp
    sharded: bool = False  # the ranks of dp_group hold shards of the model instead of replicas
    # whether `setup` compares the divided model with the complete one, and may refuse the plan;
    # known after `partition`
    tries_plan: bool = False
    # the ranks have the same work, and wait for each other only after their last gradients
    has_equal_work: ClassVar[bool] = False

    # A loss that needs the complete batch (gathering.py) has no other way to its strategy.
    active: ClassVar["Strategy | None"] = None
    global_size: int = 0
    accumulate: int = 1
    in_loop: bool = False
    loss_scale: "LossScale | None" = None
    head_losses: "HeadLosses | None" = None

    # These four by `expect`, which describes them.
    example: "Tree" = None
    sample: "Callable[[], Tree] | None" = None
    checkpoint_activations: Checkpointing = "none"
    initial_weights: "Weights | None" = None
    recomputed: "Recomputed | None" = None  # the blocks; known after `partition`
    # before the forward pass, because the outputs are no tensor from which it could be cut
    cuts_padding: bool = False
    # this rank's part of the model, unwrapped, so that its parameters keep their plain names
    module: nn.Module
    forward: nn.Module  # computes the logits: `module` or a wrapper around it

    def __init__(
        self,
        runtime: Runtime,
        mesh_axes: Mapping[str, int] | None = None,
        batch_norm: BatchNorm = "local",
    ):
        mesh_axes = mesh_axes or {}
        is_plain = (
            runtime.world_size == 1
            and not mesh_axes
            and runtime.device.type != "mps"
            and runtime.precision != "fp16"
        )
        if not is_plain:
            from ddp_lab.strategies.requirements import check_launch

            check_launch(self, runtime, mesh_axes)

        self.runtime = runtime
        self.device = runtime.device
        self.devices = [self.device]
        self.num_devices = runtime.world_size

        ranks_per_replica = math.prod(mesh_axes.values())
        self.dp_rank = runtime.rank // ranks_per_replica
        self.dp_size = runtime.world_size // ranks_per_replica
        self.replicas = self.dp_size
        self.axes = {"dp": self.dp_size, **mesh_axes}

        self.dp_group: dist.ProcessGroup | None = None
        self.pp_group: dist.ProcessGroup | None = None
        self.is_metric_rank = True
        self.pp_rank = 0
        self.batch_norm: BatchNorm = batch_norm
        self.task: Task = Classification()
        self.autocast: Callable[[], AbstractContextManager[object]] = runtime.autocast
        self.measure: Measure = measure

        self.parameter_hooks: list[Hooked] = []
        self.bubble: float | None = None
        self.unsupported: dict[str, str] = {}
        self.written: Mapping[str, str] | None = {}
        self.watches_writes = False
        self.calls_blocks = False
        self.idle: frozenset[str] = frozenset()
        self.watched: dict[str, nn.Parameter] = {}
        self.check_first: Callable[[Tree], object] | None = None
        self.timer: WorkTimer | None = None

    @property
    def name(self) -> str:
        """The value of `strategy=` that selects it; of a class from outside its name."""
        package, _, file = type(self).__module__.rpartition(".")
        return file if package == __package__ else type(self).__name__

    @property
    def where(self) -> str:
        """Number and kind of the devices, for the log, for example "2 x cpu"."""
        if self.device.type == "cuda":
            kind = torch.cuda.get_device_name(self.device)
        else:
            kind = self.device.type
        return f"{self.num_devices} x {kind}"

    @property
    def may_leave_unused(self) -> bool:
        """Whether a step may leave parameters unused, on all ranks alike, without a message."""
        return self.dp_size == 1 or bool(self.find_unused_parameters)

    @property
    def modules_by_device(self) -> list[nn.Module]:
        """The part of the model on each device that this process drives. Known after `setup`."""
        return [self.module]

    def expect(
        self,
        *,
        example: "Tree" = None,
        sample: "Callable[[], Tree] | None" = None,
        idle: frozenset[str] = frozenset(),
        checkpoint_activations: Checkpointing = "none",
        initial_weights: "Weights | None" = None,
        unsupported: Mapping[str, str] | None = None,
    ) -> None:
        """Take what is known of the model and its inputs. Called before `partition`.

        Args:
            example: inputs of two samples, on the meta device; None: they are not known.
            sample: returns inputs of some samples, on the CPU, for the trial of a plan; None: there
                are none.
            idle: names of the parameters that a trial has found to be unused.
            checkpoint_activations: what the backward pass computes again.
            initial_weights: of a model that is on the meta device; None: the model has its weights.
            unsupported: why the inputs exclude a performance option, by its name.
        """
        self.example = example
        self.sample = sample
        self.idle = idle
        self.checkpoint_activations = checkpoint_activations
        self.initial_weights = initial_weights
        self.unsupported |= unsupported or {}

    def partition(self, model: nn.Module, samples: int) -> None:
        """Decide which rank holds which part of the model. Called before the process group opens.

        This implementation decides nothing, and checks that BatchNorm can have the statistics it
        should. Overrides call it.

        Args:
            model: the complete model, on the CPU.
            samples: size of a full local batch or, with gradient accumulation, of one of its
                micro-batches.

        Raises:
            ConfigError: the model or the batch cannot be divided as the strategy's options require.
        """
        if self.example is not None:
            self.require_inputs(self.example)
        self.require_called_hooks(model)
        if self.checkpoint_activations != "none":
            from ddp_lab.strategies.checkpointing import choose_blocks

            self.recomputed = choose_blocks(self, model)
            self.unsupported |= self.recomputed.unsupported
            # torch compiles a block, and what is around it runs in eager mode
            self.compiled_by_block = True
        is_divided = self.runtime.world_size > 1 or self.num_microbatches > 1
        is_like_one_device = self.batch_norm == "local" and self.one_process
        if is_divided or self.copies_weights or not is_like_one_device:
            from ddp_lab.strategies.model_checks import check_model

            writes = check_model(self, model)
            self.watches_writes = writes.may_come_later
            self.written = writes.written
            self.check_first = writes.check_first

    def time_work(self) -> None:
        """Time this rank's work in each step, where that can be compared. Called before `place`.

        With batch_norm=sync the ranks wait for each other in the forward pass, so that the times of
        all are those of the slowest one.
        """
        if self.has_equal_work and self.batch_norm == "local":
            from ddp_lab.strategies.work_time import make_timer

            self.timer = make_timer(self.device)

    def place(self, model: nn.Module, task: Task, channels_last: bool = False) -> None:
        """Connect the ranks, and place the model and the task on their devices. Collective.

        Args:
            model: as for `setup`.
            task: what it is trained for, with the loss.
            channels_last: whether its convolutions use this memory format.
        """
        if not self.one_process:
            self.runtime.open_group()
        self.task = task.to(self.device)
        if task.has_buffers:
            from ddp_lab.models.memory import give_own_memory

            give_own_memory(task, "the loss")
        self.take_parameter_hooks(model)
        if channels_last:
            from ddp_lab.models.channels_last import to_channels_last

            model = to_channels_last(model)

        if self.runtime.precision == "fp16":
            from ddp_lab.strategies.loss_scale import LossScale

            self.loss_scale = LossScale(self.device)
        self.setup(model)
        if task.head_chunks > 1:
            from ddp_lab.strategies.head_losses import HeadLosses

            self.head_losses = HeadLosses(self.module, self.task)
        if self.recomputed is not None:
            from ddp_lab.strategies.checkpointing import recompute_blocks

            head = None if self.head_losses is None else self.head_losses.path
            recompute_blocks(self.module, self.recomputed, head)
        if self.idle and not self.may_leave_unused:
            from ddp_lab.strategies.idle import watch_idle

            self.watched = watch_idle(self)
        if self.watches_writes and not self.copies_weights:
            from ddp_lab.strategies.later_writes import watch_parts

            # a strategy that cuts the model calls its blocks
            parts = self.module.children() if self.calls_blocks else [self.module]
            watch_parts(parts, self.module, self)
        self.initial_weights = None  # the tensors of a file are not needed any more

    def take_parameter_hooks(self, model: nn.Module, known: "Set[Key]" = frozenset()) -> None:
        """Take the user's hooks on parameters from them, to call the hooks at the end of a step.

        Args:
            model: the complete model, or this rank's part of it.
            known: hooks that are not the user's.
        """
        if any(map(has_hooks, model.parameters())):
            from ddp_lab.strategies.parameter_hooks import take_hooks

            self.parameter_hooks = take_hooks(model, known)

    @abstractmethod
    def setup(self, model: nn.Module) -> None:
        """Move `model` to the devices, and wrap or cut it. Collective; sets `module` and `forward`.

        Args:
            model: the complete model, the same on every rank: on the CPU, or with `initial_weights`
                on the meta device.
        """

    def replace_wrapper(  # noqa: B027, most strategies wrap the model in none
        self, wrapper_class: type[nn.parallel.DistributedDataParallel]
    ) -> None:
        """Let `setup` use another class in place of torch's DistributedDataParallel.

        A plan does so, because torch's needs data.
        """

    def use_device(self, device: torch.device) -> None:
        """Let `setup` place everything on one device. A plan does so, which needs no GPU."""
        self.device = device

    def use_compiled(self, measure: Measure, forward: nn.Module | None = None) -> None:
        """Call what torch.compile has made of the loss and the model. Called after `setup`.

        Args:
            measure: of `tasks.base.measure`.
            forward: of the complete model; None: its blocks are compiled in place.
        """
        self.measure = measure
        if forward is not None:
            self.forward = forward

    def refuse_bare_calls(self) -> None:  # noqa: B027, most call the model as a loop does
        """Let calls of the model in training that do not pass through the strategy raise an error.

        Called after `setup`, by a trainer whose loop has the model.
        """

    def to_device(self, blocks: Module, device: torch.device | None = None) -> Module:
        """Move blocks of the model to a device, or draw their initial weights there; return them.

        Args:
            blocks: its children are blocks of the model under their names.
            device: None: `self.device`.
        """
        device = device or self.device
        if self.initial_weights is None:
            return blocks.to(device)
        self.initial_weights.fill(blocks, device, put)
        return blocks

    def train(self, mode: bool = True) -> None:
        """Switch between training and evaluation mode. Collective.

        In training mode every replica keeps its own buffers: BatchNorm's running statistics, and
        the state of a loss. When training mode ends, all replicas receive those of replica 0, so
        that every replica evaluates and saves the same model.
        """
        was_training = self.task.training
        self.module.train(mode)
        self.task.train(mode)
        if not mode and self.dp_size > 1:
            from ddp_lab.strategies.contiguous import broadcast

            for buffer in self.module.buffers():
                broadcast(buffer, self.dp_group)
            if was_training and self.task.has_buffers:
                from ddp_lab.strategies.loss_buffers import broadcast_loss

                broadcast_loss(self.task, self.device, self.dp_group)

    @property
    def task_of_steps(self) -> Task:
        """The task that training steps call, whose buffers they may change."""
        return self.task

    @property
    def device_of_loss(self) -> torch.device:
        """The device on which training steps compute the loss."""
        return self.device

    @property
    def roots(self) -> dict[str, nn.Module]:
        """What has a state that a training step may change: this rank's model, and the loss."""
        return {"model": self.module, "loss": self.task_of_steps}

    def buffers(self) -> "dict[str, torch.Tensor | None]":
        """Return the buffers that a training step may change, by name.

        For example model.bn.running_mean. None has no value yet, and gets one that is a state.
        """
        from ddp_lab.models.buffers import state_of

        return {
            f"{root}.{name}": buffer
            for root, module in self.roots.items()
            for name, buffer in state_of(module).items()
        }

    def valid_samples(self, global_size: int) -> int:
        """Return how many samples of this rank's local batch are no padding.

        A rank reads every `dp_size`-th of `global_size`, those of the GLOBAL batch.
        """
        return len(range(self.dp_rank, global_size, self.dp_size))

    def prepare_step(self) -> None:  # noqa: B027, a single device has nothing to prepare
        """Prepare for the forward passes of a training step. Collective."""

    def begin_batch(self, global_size: int, accumulate: int = 1, in_loop: bool = False) -> None:
        """Begin a batch, in training or in an evaluation.

        Args:
            global_size: number of samples in the GLOBAL batch, without padding.
            accumulate: number of gradient-accumulation steps.
            in_loop: whether a loop of the user calls the model, on all ranks.
        """
        Strategy.active = self
        self.in_loop = in_loop
        self.global_size = global_size
        self.accumulate = accumulate

    def forward_backward(
        self, inputs: "Tree", targets: "Tree", global_size: int, accumulate: int = 1
    ) -> torch.Tensor:
        """Compute `.grad` of the mean loss over the GLOBAL batch, the same on every replica.

        Collective.

        Args:
            inputs: local batch, [b, ...]; or a tuple or dict of such tensors, the arguments of the
                model.
            targets: [b, ...], as the task's losses take them; or a tuple or dict of such tensors;
                or None.
            global_size: number of samples in the GLOBAL batch, without padding, which is at the end
                of the local batch.
            accumulate: number of gradient-accumulation steps. Only one micro-batch's activations
                are in memory at a time.

        Returns:
            [loss_sum, *task.train_metrics, weight] of the local batch.
        """
        if self.check_first is not None:
            check = self.check_first
            self.check_first = None
            check(inputs)
        self.prepare_step()
        self.begin_batch(global_size, accumulate)
        micro_batches = self._divide(inputs, targets, global_size, accumulate)
        divisor = self.divisor(global_size)
        *early, last = micro_batches
        results: list[torch.Tensor] = []
        if early:
            with self.no_sync():
                results += [self._add_gradient(*micro_batch, divisor) for micro_batch in early]
        results.append(self._add_gradient(*last, divisor))
        self.reduce_gradients()
        sums = reduce(torch.add, results)
        if self.task.weighted:
            self._divide_by_weight(sums[-1], global_size)
        if self.loss_scale is not None:
            self.loss_scale.unscale(gradients_of(self.module.parameters()))

        self.call_parameter_hooks()
        return sums

    def divisor(self, global_size: int) -> float | torch.Tensor:
        """Return what the sum of the losses of a GLOBAL batch is divided by, for a backward pass.

        With precision=fp16 it is a tensor, [], which contains the scale of the loss.
        """
        if self.loss_scale is not None:
            return self.loss_scale.divisor(global_size)
        return float(global_size)

    def call_parameter_hooks(self) -> None:
        """Call the user's hooks on parameters, with the gradients of the GLOBAL batch."""
        if self.parameter_hooks:
            from ddp_lab.strategies.parameter_hooks import call_hooks

            call_hooks(self.parameter_hooks)

    def _divide(
        self, inputs: "Tree", targets: "Tree", global_size: int, accumulate: int
    ) -> "Sequence[tuple[Tree, Tree, int]]":
        """Return the micro-batches of a local batch: inputs, targets, and samples without padding.

        The arguments are those of `forward_backward`.
        """
        num_valid = self.valid_samples(global_size)
        may_cut = (
            self.cuts_padding or self.batch_norm == "sync" or bool(self.find_unused_parameters)
        )
        if accumulate == 1 and isinstance(inputs, torch.Tensor) and not may_cut:
            return [(inputs, targets, min(num_valid, len(inputs)))]
        from ddp_lab.strategies.micro_batches import divide

        return divide(self, (inputs, targets), num_valid, accumulate)

    def _add_gradient(
        self, inputs: "Tree", targets: "Tree", num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        """Call `add_gradient`, within what a micro-batch of padding and frozen parameters need."""
        if num_valid and not self.watched:
            return self.add_gradient(inputs, targets, num_valid, divisor)
        from ddp_lab.strategies.micro_batches import surroundings

        with surroundings(self, inputs, num_valid):
            return self.add_gradient(inputs, targets, num_valid, divisor)

    def _divide_by_weight(self, weight: torch.Tensor, global_size: int) -> None:
        """Divide the gradients by the weight of the GLOBAL batch in place of its size. Collective.

        The weights are known only after the forward passes: of ignored pixels and padded tokens
        they are 0.

        Args:
            weight: of the local batch, [].
        """
        over_all = total(self, weight)
        # without any weight all gradients are 0
        self.scale_gradients(torch.where(over_all == 0, 0, global_size / over_all))

    def scale_gradients(self, scale: torch.Tensor) -> None:
        """Multiply all gradients by a number, []."""
        from ddp_lab.strategies.gradients import multiply

        multiply(gradients_of(self.module.parameters()), scale)

    def no_sync(self) -> AbstractContextManager[object]:
        """Return the context of all gradient-accumulation steps but the last.

        Gradients accumulate and are not communicated.
        """
        return nullcontext()

    def add_gradient(
        self, inputs: "Tree", targets: "Tree", num_valid: int, divisor: float | torch.Tensor
    ) -> torch.Tensor:
        """Add the gradient of one micro-batch to `.grad`; return its sums.

        Args:
            inputs, targets: [b, ...], or trees of such tensors.
            num_valid: number of samples without padding, which is at the end.
            divisor: what the summed loss is divided by, as from `divisor`.

        Returns:
            [loss_sum, *task.train_metrics, weight] of the micro-batch.
        """
        if self.head_losses is not None:
            forward = partial(self._outputs, inputs)
            loss, results = self.head_losses.measure(forward, targets, num_valid, divisor)
            loss.backward()
            return results

        outputs = self._outputs(inputs)
        if (
            not isinstance(inputs, torch.Tensor)
            or not isinstance(outputs, torch.Tensor)
            or outputs.shape[:1] != inputs.shape[:1]
        ):
            from ddp_lab.strategies.nested import outputs_of_samples

            # the loss could cut padding only from a tensor
            self.cuts_padding = self.cuts_padding or not isinstance(outputs, torch.Tensor)
            outputs = outputs_of_samples(self, outputs, inputs, num_valid)
        loss, results = self.measure(self.task, outputs, targets, num_valid, divisor)
        loss.backward()
        return results

    def pass_context(self, inputs: Any, has_samples: bool) -> AbstractContextManager[object]:
        """Return the context of a forward pass, a backward pass, or both, of a training step.

        Args:
            inputs: of the forward pass; None: there is none.
            has_samples: whether they have a sample that is no padding.
        """
        return nullcontext()

    def reduce_gradients(self) -> None:  # noqa: B027, a single device has nothing to communicate
        """Communicate the gradients that the last backward pass of the step has not."""

    def forget_passes(self) -> None:  # noqa: B027, most strategies note nothing
        """Forget what was noted of passes whose gradients are dropped."""

    def gradient_norm(self) -> torch.Tensor:
        """Return the L2 norm of the complete model's gradient, [], the same on every rank.

        Collective. Called after `forward_backward`. Parameters that the step has not used do not
        count.
        """
        gradients = gradients_of(self.counted_parameters())
        if not gradients:  # all parameters here are frozen; torch's zero would be on the host
            return torch.zeros((), device=self.device)
        return get_total_norm(gradients).to(self.device)

    def require_called_hooks(self, model: nn.Module) -> None:
        """Check that the strategy calls all hooks on modules, also those registered after `setup`.

        Args:
            model: the complete model of the user.

        Raises:
            ConfigError: the model has a hook, and only its blocks are called.
        """
        if self.calls_blocks:
            from ddp_lab.models.module_hooks import require_no_hook

            require_no_hook(model, self.name)

    def counted_parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters whose gradients this rank adds to the norm of all."""
        return self.module.parameters()

    @torch.no_grad()
    def predict(self, inputs: "Tree") -> Any:
        """Return the outputs of a local batch, such as logits [b, classes], without a gradient."""
        return self._outputs(inputs)

    def _mixed_precision(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass.

        Without mixed precision most often nothing has to be done, and nothing is called.
        """
        if self.runtime.half is None and not torch.is_autocast_enabled(self.device.type):
            return nullcontext()
        return self.autocast()

    def _outputs(self, inputs: "Tree") -> Any:
        """Return the outputs of the model, in mixed precision if the run has it."""
        with self._mixed_precision():
            return self._call(inputs)

    def _call(self, inputs: "Tree") -> Any:
        """Return the outputs of the model."""
        if isinstance(inputs, torch.Tensor):
            return self.forward(inputs)
        from ddp_lab.models.calls import call

        return call(self.forward, inputs)

    def require_inputs(self, inputs: "Tree") -> None:
        """Check that the strategy supports inputs of this type, in training and in evaluation.

        Raises:
            ConfigError: they are a tuple or a dict, and the strategy cuts the model into blocks.
        """
        if self.calls_blocks and not isinstance(inputs, torch.Tensor):
            from ddp_lab.strategies.requirements import refuse_several

            refuse_several(self, inputs)

    def describe(self) -> str:
        """Return a line for the log: which part of the model is on which device.

        Called after `setup`.
        """
        return f"{self.name} on {self.where}"


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of those of the parameters that took part in the step."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def total(strategy: Strategy, sums: torch.Tensor) -> torch.Tensor:
    """Return sums of local batches, of any shape, over the global batch, the same on every rank.

    Collective.
    """
    own_sums = sums.clone(memory_format=torch.contiguous_format)  # NCCL refuses others
    return strategy.runtime.all_reduce(own_sums if strategy.is_metric_rank else own_sums.zero_())
