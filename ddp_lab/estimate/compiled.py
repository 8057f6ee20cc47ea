"""What torch.compile makes of a block: the kernels that are left after fusion, and what they keep for the backward pass.

The graphs of both passes are those that Inductor would get. AOTAutograd traces them on fake tensors. Its min-cut partitioner
decides what is kept and what is computed again in the backward pass (torch/_functorch/partitioners.py). fusion.py imitates the
rest.
"""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.func import functional_call

from ddp_lab.estimate.fusion import Kernel, kernels_of, nbytes_of, value_of
from ddp_lab.estimate.trace import Traced, layout_of, mixed_precision, on_meta, output_of_another_block
from ddp_lab.strategies.activation_checkpointing import kept


class Graphs(NamedTuple):
    """The graphs of a block.

    Attributes:
        forward: it returns changed buffers, the output, and what is kept.
        backward: it takes what is kept and the gradient of the output; None if nothing is trained.
    """

    forward: fx.Graph
    backward: fx.Graph | None

    def kept(self) -> dict[str, fx.Node]:
        """Return which node of the forward graph has allocated each input that the backward graph takes from it, by name."""
        made = {node.name: value_of(node) for node in self.forward.nodes}
        return {name: made[name] for name in inputs_of(self.backward) if name in made} if self.backward else {}

    def output(self) -> fx.Node:
        """Return the node that allocated the output."""
        (end,) = self.forward.find_nodes(op="output")
        return value_of(end.args[0][-len(self.kept()) - 1])


def trace_compiled(block: nn.Module, given: torch.Tensor, autocast: bool) -> tuple[Traced, torch.Tensor]:
    """Trace a block as torch.compile runs it. Call it within a FakeTensorMode. The result is that of `trace`.

    Args:
        block: a block whose parameters and buffers are fake.
        given: its input, fake, which requires a gradient unless nothing before it is trained.
        autocast: whether the forward pass runs in bf16 by autocast.
    """
    with mixed_precision(autocast):
        graphs, result = graphs_of(block, output_of_another_block(given))
    made, output = graphs.kept(), graphs.output()
    stored = {value: nbytes_of(value) for value in made.values() if value.op != "placeholder"}
    forward, backward = kernels_of(graphs.forward), [] if graphs.backward is None else kernels_of(graphs.backward)
    given_back = result.untyped_storage().nbytes()
    record = Traced(
        input=given.untyped_storage().nbytes(),
        output=given_back,
        saved=sum(size for value, size in stored.items() if value is not output),
        keeps_input=next(iter(inputs_of(graphs.forward).values())) in made.values(),
        keeps_output=output in stored,
        in_place=False,
        selective=sum(nbytes_of(node) for node in graphs.forward.nodes if node.target in kept() and value_of(node) is node),
        gradients=sum(tensor.grad.nbytes for tensor in block.parameters() if tensor.grad is not None),
        forward_peak=peak_of(forward, {}, {}, stored.keys() | {output}),
        backward_peak=peak_of(backward, {None: given_back} | stored, made, returned_by(graphs.backward)),
        forward=tuple(kernel.operation for kernel in forward),
        backward=tuple(kernel.operation for kernel in backward),
    )
    return record, on_meta(layout_of(result))


def graphs_of(block: nn.Module, given: torch.Tensor) -> tuple[Graphs, torch.Tensor]:
    """Return the graphs of a block and its output. It leaves gradients in the block's parameters."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition  # loads 400 modules
    from torch._inductor.decomposition import select_decomp_table

    import_module("torch._inductor.lowering")  # decompositions, such as that of max pooling, use it and do not import it
    found = list[fx.Graph]()
    own = dict(block.named_parameters()) | dict(block.named_buffers())

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        found.append(gm.graph)
        return make_boxed_func(gm.forward)

    def run(given: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return functional_call(block, dict(zip(own, tensors, strict=True)), (given,))

    compiled = aot_function(
        run, keep, keep, partition_fn=min_cut_rematerialization_partition, decompositions=select_decomp_table()
    )
    output = compiled(given, *own.values())
    if output.requires_grad:
        output.backward(torch.empty_like(output))
    return Graphs(found[0], found[1] if output.requires_grad else None), output


def inputs_of(graph: fx.Graph) -> dict[str, fx.Node]:
    """Return the inputs of a graph, by name."""
    return {node.name: node for node in graph.find_nodes(op="placeholder")}


def returned_by(graph: fx.Graph | None) -> set[fx.Node]:
    """Return the nodes that allocated what a graph returns."""
    if graph is None:
        return set()
    (end,) = graph.find_nodes(op="output")
    return {value_of(node) for node in end.all_input_nodes}


def peak_of(kernels: list[Kernel], live: Mapping[Any, int], kept: Mapping[str, fx.Node], stay: Collection[fx.Node]) -> int:
    """Return the most bytes that are in use while kernels run. What no later kernel reads is freed.

    Args:
        live: bytes that are in use before, by what has allocated them.
        kept: what has allocated the inputs of the graph, by their names.
        stay: what is not freed.
    """
    held, reads = dict(live), [{kept.get(value.name, value) for value in kernel.reads} for kernel in kernels]
    last = {value: place for place, values in enumerate(reads) for value in values}
    peak = sum(held.values())
    for place, kernel in enumerate(kernels):
        held |= {value: nbytes_of(value) for value in kernel.writes}
        peak = max(peak, sum(held.values()))
        for value in reads[place]:
            if last[value] == place and value not in stay:
                held.pop(value, None)
    return peak
