"""What an optimizer needs besides torch: fused kernels, local shards, tensors of its state.

torch's fused SGD does not support DTensors, and a learning rate on the device, as a CUDA graph
needs it, is a plain tensor. Optimizers that update each element by itself get the same result from
the shards, without DTensor's work for each tensor.
"""

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from ddp_lab.config.build import begin_training, for_cpu, has_modes, require_no_closure
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.strategies.dtensor import local, sharded_as

# makes the optimizer of a list of parameters, or of groups of them
MakeOptimizer = Callable[..., torch.optim.Optimizer]
FEW = 1_000_000  # elements of an optimizer
# with fused kernels for GPUs; others may compute norms of complete tensors
ELEMENTWISE = (SGD, Adam, AdamW)


def param_groups(
    parameters: Iterable[nn.Parameter],
    decay_norms_and_biases: bool,
    kept: Iterable[nn.Parameter] | None = None,
) -> list[dict[str, Any]]:
    """Return those of the parameters that are not frozen, in the form that optimizers accept.

    Args:
        parameters: DTensors, tensors or, under tp, both; DTensors of several meshes, under mesh
            with a plan of any module. The optimizers' foreach kernels support one kind.
        decay_norms_and_biases: whether weight decay applies to all parameters. Otherwise those with
            fewer than two dimensions, which are biases and the weights of normalization layers,
            form a second group, as in timm. Every rank has both groups, which may be empty.
        kept: those of them that the optimizer will keep; None: all.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    kinds = by_mesh(kept or parameters)
    options: dict[str, Any] = {"foreach": False} if len(kinds) > 1 else {}
    if decay_norms_and_biases:
        return [{"params": parameters, **options}]
    decayed = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    return [{"params": decayed, **options}, {"params": others, "weight_decay": 0.0, **options}]


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters by the mesh of ranks that share them, in order; tensors are one group.

    torch's foreach functions support one kind, and tp has both.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def construct_optimizer(
    make: Callable[..., torch.optim.Optimizer], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    """Return the optimizer of some groups of parameters.

    One group is passed as a list of parameters, as loops do.

    A function of the user's may then iterate over the parameters, and make groups of its own. Where
    this rank has no parameter the group is passed, because torch's optimizers refuse an empty list.

    Args:
        make: the user's function of parameters.
        groups: from `param_groups`.

    Raises:
        ConfigError: the function returns no optimizer, or its step needs a closure.
    """
    first = groups[0]
    is_list = len(groups) == 1 and bool(first["params"])
    optimizer = make(first["params"] if is_list else groups)
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(
            "optimizer: the function of parameters must return an optimizer, for example "
            f"torch.optim.AdamW(parameters, lr=1e-3), got {type(optimizer).__name__}"
        )
    if is_list:
        options = {key: value for key, value in first.items() if key != "params"}
        for group in optimizer.param_groups:
            group |= {key: value for key, value in options.items() if key in group}
    require_no_closure(optimizer)
    begin_training(optimizer)
    return optimizer


def require_own_parameters(
    optimizer: torch.optim.Optimizer, modules: Iterable[torch.nn.Module]
) -> None:
    """Check that an optimizer updates parameters of the model alone.

    Args:
        optimizer: from the user's function of parameters.
        modules: of which each of its parameters must be one.

    Raises:
        ConfigError: one belongs to something else, for example to another model, or to this one
            before the strategy replaced its parameters.
    """
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in known:
                raise ConfigError(
                    f"optimizer: has a parameter of the shape {list(parameter.shape)} that is none "
                    "of this trainer's model, whose own parameters would not be trained in its "
                    "place. Let the function make the optimizer of the parameters that it gets, "
                    "for example lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"
                )


def has_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether DTensors are among the optimizer's parameters."""
    return any(
        hasattr(parameter, "to_local")
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def can_be_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch has a fused kernel of the optimizer for GPUs.

    A subclass may need the complete tensors of shards.
    """
    return type(optimizer) in ELEMENTWISE or (
        isinstance(optimizer, ELEMENTWISE) and not has_shards(optimizer)
    )


def configure_optimizer(
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    fused: bool | None,
    captured: bool,
    compiled: bool,
    skips: bool = False,
) -> torch.optim.Optimizer:
    """Set the optimizer's options that are left to this launch, and return it.

    Called before the optimizer has a state.

    A CUDA graph requires that it reads its learning rate and step counters on the GPU. AdamW is
    fused in all runs on GPUs: torch's default, foreach, needs temporary memory of the size of all
    parameters.

    Args:
        optimizer: of the strategy's parameters.
        device: the device of this rank.
        fused: whether to use torch's fused kernel; None leaves it to torch.
        captured, compiled: whether the step is. The optimizer of a captured step is fused, too,
            unless it is compiled.
        skips: whether a step is skipped if the gradient is not finite (precision=fp16), which fused
            kernels do without a wait for the device.
    """
    if skips:
        from ddp_lab.training.skipped_step import can_skip_on_device

        skips = can_skip_on_device(optimizer)
    compiled = captured and compiled and not skips and compiles_optimizer(optimizer)
    wanted = (captured or fused or skips) and can_be_fused(optimizer)
    adamw = isinstance(optimizer, AdamW) and device.type == "cuda"
    for group in optimizer.param_groups:
        if captured and "capturable" in group:
            group["capturable"] = True
        left = adamw and group["fused"] is None and group["foreach"] is None  # tp sets foreach
        if not compiled and (wanted or left):
            group["fused"] = True
    return optimizer


def compiles_optimizer(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a captured and compiled step compiles its optimizer, too.

    Otherwise it uses torch's fused kernel.

    A fused kernel of few elements does not fill a GPU: LeNet's 129,068 take 20 us in place of 2.
    With ResNet-18's 11 million a compiled optimizer saves 0.5 % of a step, but compiling it takes 5
    s, from the cache 1 s (an H200, docs/log/benchmarks.md).
    """
    elements = sum(
        parameter.numel() for group in optimizer.param_groups for parameter in group["params"]
    )
    return can_be_fused(optimizer) and not has_shards(optimizer) and elements < FEW


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Return the optimizer's step, on shards if it has DTensors and updates each element by itself.

    One that is not torch's gets DTensors, of which `.item()` then is the value over all shards.
    So do hooks on the optimizer's step.
    """
    if not has_shards(optimizer):
        return optimizer.step
    is_elementwise = type(optimizer) in ELEMENTWISE
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")

    def step() -> None:
        hooked = has_step_hooks(optimizer)
        if is_elementwise and not hooked:
            with on_shards(optimizer):
                optimizer.step()
        elif is_torchs and not hooked:
            optimizer.step()
        else:
            from ddp_lab.training.divided_optimizer import WholeScalars

            with WholeScalars():
                optimizer.step()

    return step


class StepObserver(NamedTuple):
    """A hook on an optimizer's step that reads no parameters: it may see shards."""

    function: Callable[[], None]

    def __call__(self, *_: Any) -> None:
        self.function()


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether functions but observers are registered that run before or after a step."""
    private: Any = optimizer
    hooks = [
        *private._optimizer_step_pre_hooks.values(),
        *private._optimizer_step_post_hooks.values(),
    ]
    return any(not isinstance(hook, StepObserver) for hook in hooks)


@contextmanager
def on_shards(optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Let the optimizer have this rank's shards as its parameters and state.

    Its new state becomes DTensors at the end.
    """
    groups = optimizer.param_groups
    state = optimizer.state
    wholes: list[list[nn.Parameter]] = [group["params"] for group in groups]
    shards = {whole: shard_of(whole) for group in wholes for whole in group}
    for group, parameters in zip(groups, wholes, strict=True):
        group["params"] = [shards[whole] for whole in parameters]

    optimizer.state = defaultdict(dict)
    for whole, values in cast("dict[nn.Parameter, dict[str, Any]]", state).items():
        optimizer.state[shards[whole]] = {key: local(value) for key, value in values.items()}
    try:
        yield
    finally:
        for whole, shard in shards.items():
            for key, value in optimizer.state[shard].items():
                if key not in state[whole]:
                    same = (
                        isinstance(value, torch.Tensor)
                        and value.shape == shard.shape
                        and value.dim() > 0
                    )
                    state[whole][key] = sharded_as(whole, value) if same else value
        for group, parameters in zip(groups, wholes, strict=True):
            group["params"] = parameters
        optimizer.state = state


def shard_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return this rank's shard of a parameter with its gradient; it shares their memory."""
    shard = nn.Parameter(local(parameter.detach()), parameter.requires_grad)
    shard.grad = None if parameter.grad is None else local(parameter.grad)
    return shard


def state_tensors(
    optimizer: torch.optim.Optimizer,
) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Yield the parameter, the name and the value of each tensor of the optimizer's state."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield parameter, key, value


def state_copies(make_optimizer: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> int:
    """Return how many tensors of a parameter's shape an optimizer keeps for it, at most.

    The weights of evaluations count, if the optimizer has others than those that train. A step with
    small parameters finds it out.

    Args:
        make_optimizer: constructs the optimizer of a list of parameters.
        parameters: of the model.

    Raises:
        ConfigError: it cannot be made, or its step fails or needs a closure.
    """
    probes = probes_of(parameters)
    try:
        optimizer = for_cpu(make_optimizer(probes))
        require_no_closure(optimizer)
        optimizer.step()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"optimizer: {describe_error(error)}") from None
    counts = [
        sum(
            isinstance(value, torch.Tensor) and value.shape == probe.shape
            for value in optimizer.state[probe].values()
        )
        for probe in probes
    ]
    others = 1 if has_modes(optimizer) else 0
    return max(counts, default=0) + others


def probes_of(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return a small parameter on the CPU, with a gradient, for each one that is not frozen.

    It has as many dimensions, of at most two elements. One of no dimensions gets one.
    """
    probes: list[nn.Parameter] = []
    for parameter in parameters:
        if parameter.requires_grad:
            shape = [min(size, 2) for size in parameter.shape] or [1]
            probe = nn.Parameter(torch.zeros(shape, device="cpu"))
            probe.grad = torch.zeros_like(probe)
            probes.append(probe)
    return probes


def require_plain_step(make_optimizer: MakeOptimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Check that a step of a user's optimizer computes no loss, by a step with small parameters.

    Args:
        make_optimizer: constructs the optimizer of a list of parameters.
        parameters: of the model.

    Raises:
        ConfigError: it does not step without a closure, or has other methods for that.
    """
    from ddp_lab.models.kept_state import state_kept

    probes = probes_of(parameters)
    optimizer = None
    problem = None
    with state_kept(make_optimizer, weights=False), suppress(Exception):
        optimizer = for_cpu(make_optimizer(probes))
        in_groups = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if not in_groups <= {*map(id, probes)}:  # those of the model, which must not be changed
            return
        try:
            optimizer.step()
        except (AssertionError, NotImplementedError) as error:
            problem = error
        except TypeError as error:
            problem = error if "'NoneType' object is not callable" in str(error) else None
    if problem is not None:
        raise ConfigError(
            f"optimizer: the step of {type(optimizer).__name__} fails without a closure, by which "
            f"it would compute the loss several times in a step: {describe_error(problem)}. Here a "
            "step computes the gradient once, over the ranks and micro-batches of the global "
            "batch. Use an optimizer whose step needs no argument, for example torch.optim.AdamW"
        )
