"""The kernels into which Inductor fuses a graph of operations, imitated: what each of them computes, reads and writes.

Elementwise operations and row reductions that depend on each other, with nothing else between them, become one kernel. It
reads every tensor from outside once, and writes only what is used outside. Matrix multiplications, convolutions, attention and
pooling remain kernels of their own. So do reductions over the first dimension, such as the gradient of a bias, whose loops are
others; they compute again what they reduce, from what the kernel before them has read.
"""

from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map

from ddp_lab.estimate.recorder import COMPUTED, REDUCTIONS, Operation, flops_of, kind_of, tensors_in

VIEWS = "view permute alias expand unsqueeze squeeze slice select t transpose as_strided detach split"
LIBRARIES = ("pool", "index", "scatter", "rand")  # parts of the names of other operations that are not fused


class Kernel(NamedTuple):
    """A kernel of a compiled graph, and the nodes whose tensors it reads and writes."""

    operation: Operation
    reads: frozenset[fx.Node]
    writes: frozenset[fx.Node]


def kernels_of(graph: fx.Graph) -> list[Kernel]:
    """Return the kernels of a graph of aten's operations, in an order in which they can run."""
    groups = groups_of(graph)
    number = {node: place for place, group in enumerate(groups) for node in group}
    returned = set(map(value_of, inputs_of([next(iter(reversed(graph.nodes)))])))
    outside = [{value_of(node) for node in inputs_of(group)} - {*group} for group in groups]
    read = {value for group, values in zip(groups, outside, strict=True) if not is_reduction(group[0]) for value in values}
    written = {value for value in number if has_tensor(value) and value in read | returned}
    together = dict[Any, tuple[list[fx.Node], frozenset[fx.Node]]]()
    for group, values in zip(groups, outside, strict=True):
        # What no kernel has written is computed again, from what its own kernel reads.
        again = {value for value in values if value in number and value not in written}
        reads = frozenset((values - again).union(*(outside[number[value]] for value in again)))
        key = reads if is_reduction(group[0]) else group[0]  # reductions of the same tensors are one kernel
        together[key] = (together[key][0] + group if key in together else group, reads)
    kernels = [
        Kernel(operation_of(nodes, reads, found), reads, found)
        for nodes, reads in together.values()
        if (found := frozenset(node for node in nodes if node in written))
    ]
    return in_order(kernels, {node: place for place, node in enumerate(graph.nodes)})


def in_order(kernels: list[Kernel], place: dict[fx.Node, int]) -> list[Kernel]:
    """Return kernels in an order in which they can run, otherwise by the place of what they write."""
    kernels = sorted(kernels, key=lambda kernel: max(place[node] for node in kernel.writes))
    source = {value: number for number, kernel in enumerate(kernels) for value in kernel.writes}
    sorter = TopologicalSorter(
        {number: {source[value] for value in kernel.reads if value in source} for number, kernel in enumerate(kernels)}
    )
    sorter.prepare()
    order, ready = list[Kernel](), list[int]()
    while sorter.is_active():
        for number in sorter.get_ready():
            heappush(ready, number)
        order.append(kernels[first := heappop(ready)])
        sorter.done(first)
    return order


def groups_of(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the nodes of each kernel, without views.

    Fused nodes are connected, and as many kernels that are not fused lie before each of them. So no kernel needs a result of
    itself through another one.
    """
    level, group = levels_of(graph), dict[fx.Node, list[fx.Node]]()
    for node in level:
        before = [value for value in map(value_of, node.all_input_nodes) if value in group]
        mine = [node]
        for value in before:
            together = is_part(node) or not (is_alone(node) or is_alone(value))
            if together and level[value] == level[node] and group[value] is not mine:
                mine = group[value] + mine
        group |= dict.fromkeys(mine, mine)
    return list({id(nodes): nodes for nodes in group.values()}.values())


def levels_of(graph: fx.Graph) -> dict[fx.Node, int]:
    """Return how many unfused kernels lie before each node. Elementwise operations are as late as those they feed."""
    level, users = dict[fx.Node, int](), dict[fx.Node, list[fx.Node]]()
    for node in (node for node in graph.nodes if not is_view(node)):
        before = [value for value in map(value_of, node.all_input_nodes) if value in level]
        for value in before:
            users.setdefault(value, []).append(node)
        if node.op == "call_function":
            level[node] = max((level[value] + (is_alone(value) and not is_part(node)) for value in before), default=0)
    for node in reversed(list(level)):
        following = [user for user in users.get(node, []) if not is_reduction(user)]
        elementwise = name_of(node) not in REDUCTIONS and not (is_alone(node) or is_part(node))
        if following and elementwise and not any(user.op == "output" or is_alone(user) for user in following):
            level[node] = min(level[user] for user in following)
    return level


def inputs_of(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield the nodes that some nodes use."""
    for node in nodes:
        yield from node.all_input_nodes


def name_of(node: fx.Node) -> str:
    """Return the name of an operation, without its overload."""
    packet = getattr(node.target, "_overloadpacket", node.target)
    return getattr(packet, "__name__", "")


def is_part(node: fx.Node) -> bool:
    """Return whether a node is one of several results of the operation before it."""
    return name_of(node) == "getitem"


def is_view(node: fx.Node) -> bool:
    """Return whether a node runs no kernel."""
    return name_of(node) in VIEWS.split()


def value_of(node: fx.Node) -> fx.Node:
    """Return the node that has allocated a node's memory."""
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node


def has_tensor(node: fx.Node) -> bool:
    """Return whether a node's result is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_reduction(node: fx.Node) -> bool:
    """Return whether a node reduces over the first dimension and another one is left."""
    if name_of(node) not in REDUCTIONS or len(node.args) < 2:
        return False
    dims: Any = node.args[1]
    given = node.all_input_nodes[0].meta["val"]
    return isinstance(dims, list) and 0 in dims and len(dims) < given.dim()


def is_alone(node: fx.Node) -> bool:
    """Return whether a node is not fused with others."""
    if is_part(node):
        return is_alone(node.all_input_nodes[0])
    name = name_of(node)
    return kind_of(node.target) in COMPUTED or is_reduction(node) or any(part in name for part in LIBRARIES)


def nbytes_of(node: fx.Node) -> int:
    """Return the size of a node's result."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(node.meta["val"]))


def operation_of(group: list[fx.Node], reads: Iterable[fx.Node], writes: Iterable[fx.Node]) -> Operation:
    """Return the FLOPs and the traffic of a kernel."""
    nbytes = sum(nbytes_of(value) for value in {*reads, *writes} if has_tensor(value))
    first = group[0]
    if kind_of(first.target) not in COMPUTED:
        reduces = any(name_of(node) in REDUCTIONS for node in group)
        return Operation("reduction" if reduces else "elementwise", torch.float32, 0, nbytes)
    args, kwargs, result = tree_map(
        lambda arg: arg.meta["val"] if isinstance(arg, fx.Node) else arg, (first.args, first.kwargs, first)
    )
    dtype = next(tensor.dtype for tensor in (result if isinstance(result, tuple | list) else [result]) if tensor is not None)
    return Operation(kind_of(first.target), dtype, flops_of(first.target, args, kwargs, result), nbytes)
