"""Any module, cut into stages by torch's tracer.

torch.distributed.pipelining traces a forward pass (torch.export) and divides its operations where a
named module begins. The stages are graphs, whose parameters keep their names. A trace has static
shapes and one mode, so there is one for each form of a micro-batch in training, and in evaluation.
All of them are made of a copy without data, and are bound to the same parameters and buffers.
"""

import copy
import random
import re
import warnings
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ddp_lab.config.errors import ConfigError, advice, count, place_of
from ddp_lab.data.trees import Tree, apply, size
from ddp_lab.models.calls import arguments_of
from ddp_lab.models.cut_points import CutPoints
from ddp_lab.models.python_state import describe, plain_attributes
from ddp_lab.models.trial import copy_in
from ddp_lab.strategies.stage_weights import names_in
from ddp_lab.strategies.traced_values import TracedStage, constants_of, stages_of

INNER = "inner"  # the attribute of Flat that is the model
OF_TRACES = "the model is no Chain, and its stages are traces, with which it was never tested"


class Flat(nn.Module):
    """A model whose inputs and outputs are the tensors of its own, in their order.

    Args:
        model: the model.
        inputs: form of its arguments and keywords.
        calls: a list, to which each call adds the form of the outputs, and what Python then has.
    """

    def __init__(
        self, model: nn.Module, inputs: TreeSpec, calls: list[tuple[TreeSpec, dict[str, Any]]]
    ):
        super().__init__()
        self.inner = model
        self._inputs = inputs
        self._add = calls.append

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        arguments, keywords = tree_unflatten([*tensors], self._inputs)
        output_tensors, form = tree_flatten(self.inner(*arguments, **keywords))
        self._add((form, python_state(self.inner)))  # torch restores it after the trace
        return tuple(output_tensors)


class Traced(NamedTuple):
    """A trace of the model for micro-batches of one form, in one mode.

    Attributes:
        stages: of the model, with parameters and buffers without data.
        outputs: of the model for a micro-batch, as tensors without data, in their order.
        form: of the outputs.
    """

    stages: list[TracedStage]
    outputs: list[torch.Tensor]
    form: TreeSpec


class Blueprint:
    """A copy of a model without data, of which traces are made.

    Args:
        model: the complete model. It may be changed afterwards.
        device: on which the stages run.
        autocast: returns the context of the forward pass.
        strategy: its name, for messages.

    Attributes:
        names: of the parameters and buffers of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        autocast: Callable[[], AbstractContextManager[object]],
        strategy: str,
    ):
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.device = device
        self.autocast = autocast
        self.strategy = strategy
        self.model = copy_in(self.mode, model, device)
        self.names = names_in(self.model)
        self._kept: dict[Any, Traced] = {}

    def inputs(self, like: Tree, samples: int) -> Tree:
        """Return inputs of `samples` samples without data, with the shapes and dtypes of others."""

        def empty(tensor: torch.Tensor) -> torch.Tensor:
            shape = (samples, *tensor.shape[1:])
            return torch.empty(shape, dtype=tensor.dtype, device=self.device)

        with self.mode:
            return apply(empty, like)

    def trace(
        self, inputs: Tree, starts: list[str], training: bool, is_kept: bool = False
    ) -> Traced:
        """Trace a forward pass, and divide it into stages.

        Args:
            inputs: of a micro-batch, from `inputs`.
            starts: paths of the modules with which the second stage, the third and so on begin.
            training: whether in training mode.
            is_kept: whether the next call for such inputs returns the same stages, which takes no
                time.

        Raises:
            ConfigError: torch cannot trace the model, or its outputs are not [b, ...].
        """
        tensors, form = tree_flatten(arguments_of(inputs))
        key = (str(form), tuple((tensor.shape, tensor.dtype) for tensor in tensors), training)
        made = self._kept.pop(key, None) or self._trace(tensors, form, starts, training)
        self._require_samples(made.outputs, size(inputs))
        if is_kept:
            self._kept[key] = made
        return made

    def used_by_stages(self, inputs: Tree, starts: list[str]) -> list[set[str]]:
        """Return the names of the parameters and buffers that each stage uses, in either mode.

        Arguments and errors as in `trace`, whose next call for such inputs takes no time.
        """
        used: list[set[str]] = [set() for _ in range(len(starts) + 1)]
        for training in (True, False):
            traced = self.trace(inputs, starts, training, is_kept=True)
            for names, stage in zip(used, traced.stages, strict=True):
                names |= names_of(stage.graph, self.names)
        return used

    def _trace(
        self, tensors: list[torch.Tensor], form: TreeSpec, starts: list[str], training: bool
    ) -> Traced:
        from torch.distributed.pipelining import SplitPoint, pipeline

        # fresh, because torch changes the forward of the modules where it cuts
        model = copy.deepcopy(self.model, self._same_tensors()).train(training)
        calls: list[tuple[TreeSpec, dict[str, Any]]] = []
        flat = Flat(model, form, calls)
        cuts = {f"{INNER}.{start}": SplitPoint.BEGINNING for start in starts}
        before = python_state(model)
        try:
            with self.autocast(), warnings.catch_warnings():
                # torch copies the parameters that several stages use
                warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
                pipe = pipeline(flat, tuple(tensors), {}, cuts)
        except Exception as error:
            raise self._cannot_trace(error) from None
        outputs_form, after = calls[-1]
        self._require_same_state(before, after)
        self._require_samples(constants_of(pipe), len(tensors[0]))
        stages = stages_of(pipe)
        if len(stages) != len(starts) + 1:
            raise ConfigError(
                f"strategy={self.strategy}: cutting the model before {', '.join(starts)} gives "
                f"{count(len(stages), 'stage')}. Name other modules in strategy.cut"
            )
        return Traced(stages, stages[-1].outputs, outputs_form)

    def cut(self, example: Tree, cut_at: int | list[str]) -> CutPoints:
        """Return where the model is cut; the arguments and errors are those of `CutPoints`.

        Args:
            example: inputs, of which only the shapes and dtypes are used.
            cut_at: number of stages, or paths.
        """
        try:
            return CutPoints(self.model, self.inputs(example, 2), cut_at)
        except ConfigError:
            raise
        except Exception as error:
            raise self._cannot_trace(error) from None

    def _cannot_trace(self, error: Exception) -> ConfigError:
        cause = error.__cause__ or error
        todo = advice(str(cause)).strip()
        if not todo:
            todo = (
                "A model that is no Chain is cut by a trace, which has no values. Return a Chain "
                "of blocks (docs/your-own.md), or use a strategy that does not cut the model, for "
                "example ddp or fsdp"
            )
        return ConfigError(
            f"strategy={self.strategy}: torch.export cannot trace the model: {first_line(cause)}"
            f"{place_of(cause)}. {todo}"
        )

    def _require_same_state(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        changed = [name for name, value in after.items() if before.get(name, value) != value]
        changed += [name for name in after if name not in before]
        if changed:
            raise ConfigError(
                f"strategy={self.strategy}: cuts a model that is no Chain by a trace, which runs "
                f"Python only once, but a forward pass changes {changed[0]}. Keep it in a buffer, "
                "or use a strategy that does not cut the model, for example ddp"
            )

    def _same_tensors(self) -> dict[int, Any]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return {id(tensor): tensor for tensor in tensors}

    def _require_samples(self, outputs: list[Any], samples: int) -> None:
        for output in outputs:
            if not isinstance(output, torch.Tensor) or output.shape[:1] != (samples,):
                kind = type(output).__name__
                got = list(output.shape) if isinstance(output, torch.Tensor) else kind
                raise ConfigError(
                    f"strategy={self.strategy}: divides a batch into micro-batches, so all outputs "
                    f"of the model must be [b, ...], with a row for each sample; got {got} for "
                    f"{count(samples, 'sample')}. Let forward return others (for example "
                    "use_cache=False), or use a strategy without a pipeline, for example ddp"
                )


def python_state(model: nn.Module) -> dict[str, Any]:
    """Return what a forward pass may change outside of tensors: numbers, texts, random states."""
    attributes = {describe(place): value for place, value in plain_attributes(model).items()}
    return {"the random state of Python": random.getstate(), **attributes}


def first_line(error: BaseException) -> str:
    """Return the line of an error of torch.export that says what it does not support."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"\s+", " ", text).rstrip(".")


def name_in_model(name: str, names: Container[str]) -> str:
    """Return the name in the model of a parameter or buffer of a stage.

    torch.export numbers the calls of a module: the weight that is encoder.weight in the first call
    is encoder@1.weight in the second one.

    Args:
        name: in the stage.
        names: of the model. A constant that the trace has made has none of them.
    """
    in_stage = name.removeprefix(f"{INNER}.")
    if in_stage in names:
        return in_stage
    return re.sub(r"@\d+(?=\.)", "", in_stage)


def names_of(stage: nn.Module, names: Container[str]) -> set[str]:
    """Return the names in the model of the parameters and buffers of a stage.

    Args:
        stage: of torch's Pipe.
        names: of the model.
    """
    return {name_in_model(name, names) for name in names_in(stage)}


def bind(stage: nn.Module, model: nn.Module, device: torch.device) -> None:
    """Let a stage use the parameters and buffers of a model in place of those without data.

    Args:
        stage: of torch's Pipe.
        model: that has them, on the device.
        device: for constants that the trace has made.
    """
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    for path, module in stage.named_modules():
        for key, tensor in [*module.named_parameters("", False), *module.named_buffers("", False)]:
            name = name_in_model(f"{path}.{key}" if path else key, tensors)
            setattr(module, key, tensors[name] if name in tensors else tensor.to(device))
