"""The kernels into which Inductor fuses a graph of operations, imitated: what each of them computes, reads and writes.

An elementwise operation is computed where its result is needed, from what its own inputs are computed from. A tensor is written
only if an operation that is not fused or the end of the graph takes it, or if it is used several times and depends on many
tensors. Reductions write their results, too. What is written from the same tensors becomes one kernel, which reads each of them
once; a normalization of rows is part of it. Matrix multiplications, convolutions, attention and pooling remain kernels of their
own. Reductions over the first dimension, such as the gradient of a bias, have other loops and are not fused with the rest.
"""

from collections.abc import Iterable
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_map

from ddp_lab.estimate.recorder import COMPUTED, REDUCTIONS, Operation, flops_of, kind_of, padding_of, tensors_in

VIEWS = "view permute alias expand unsqueeze squeeze slice select t transpose as_strided detach split"
MANY = 4  # tensors; Inductor's realize_reads_threshold
COMPILED = 0.25  # launches of a kernel that a compiled graph calls: no autograd and no dispatcher; chosen by hand
LIBRARIES = ("pool", "index", "scatter", "rand")  # parts of the names of other operations that are not fused


class Kernel(NamedTuple):
    """A kernel of a compiled graph, and the nodes whose tensors it reads and writes."""

    operation: Operation
    reads: frozenset[fx.Node]
    writes: frozenset[fx.Node]


def kernels_of(graph: fx.Graph) -> list[Kernel]:
    """Return the kernels of a graph of aten's operations, in an order in which they can run."""
    reads, owner = roots_of(graph)
    values = dict[fx.Node, list[fx.Node]]()
    for value, root in owner.items():
        values.setdefault(root, []).extend([value] if has_tensor(value) else [])
    kernels = list[Kernel]()
    for group in groups_of(reads, owner):
        written = frozenset(value for root in group for value in values[root])
        read = frozenset(value for root in group for value in reads[root]) - written
        kernels.append(Kernel(operation_of(group, read, written), read, written))
    return in_order(kernels, {node: place for place, node in enumerate(graph.nodes)})


def roots_of(graph: fx.Graph) -> tuple[dict[fx.Node, frozenset[fx.Node]], dict[fx.Node, fx.Node]]:
    """Return which tensors each operation whose result is written reads, and which of these operations writes each tensor."""
    reads, owner = dict[fx.Node, frozenset[fx.Node]](), dict[fx.Node, fx.Node]()
    unfused = [node for node in graph.nodes if node.op == "output" or (is_operation(node) and is_alone(node))]
    needed = {value_of(value) for node in unfused if not is_reduction(node) for value in node.all_input_nodes}
    sources = dict[fx.Node, frozenset[fx.Node]]()  # the tensors in memory that a node is computed from
    for node in graph.nodes:
        if not is_operation(node) or is_view(node):
            sources[node] = frozenset([node])
        elif is_part(node):
            sources[node], owner[node] = frozenset([node]), node.all_input_nodes[0]
        else:
            given = frozenset[fx.Node]().union(*(sources[value_of(value)] for value in node.all_input_nodes))
            many = len(node.users) > 1 and len(given) > MANY
            if many or node in needed or is_alone(node) or name_of(node) in REDUCTIONS:
                sources[node], reads[node], owner[node] = frozenset([node]), given, node
            else:
                sources[node] = given
    return reads, owner


def groups_of(reads: dict[fx.Node, frozenset[fx.Node]], owner: dict[fx.Node, fx.Node]) -> list[list[fx.Node]]:
    """Return the operations of each kernel.

    Operations of one kernel share one of the largest tensors that they read. They have as many unfused kernels before them, so
    that no kernel needs a result of itself through another one.
    """
    level, group, found = dict[fx.Node, int](), dict[fx.Node, list[fx.Node]](), dict[Any, fx.Node]()
    for root, read in reads.items():
        given = sorted(read, key=lambda value: value.name)  # the order of a set differs from run to run
        before = [owner[value] for value in given if value in owner]
        level[root] = max((level[other] + is_alone(other) for other in before), default=0)
        mine = [root]
        if not is_alone(root) or is_reduction(root):
            largest = max(map(nbytes_of, given), default=0)
            shared = [(level[root], is_reduction(root), value) for value in given if nbytes_of(value) == largest] or [root]
            first = next((found[key] for key in shared if key in found), root)
            found = dict.fromkeys(shared, first) | found
            near = (
                [] if is_reduction(root) else [other for other in before if not is_alone(other) and level[other] == level[root]]
            )
            for other in (first, *near):
                if other is not root and group[other] is not mine:
                    mine = group[other] + mine
        group |= dict.fromkeys(mine, mine)
    return list({id(nodes): nodes for nodes in group.values()}.values())


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


def name_of(node: fx.Node) -> str:
    """Return the name of an operation, without its overload."""
    packet = getattr(node.target, "_overloadpacket", node.target)
    return getattr(packet, "__name__", "")


def is_operation(node: fx.Node) -> bool:
    """Return whether a node is not an input or the end of a graph."""
    return node.op == "call_function"


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
        return Operation("fused", torch.float32, 0, nbytes, launches=COMPILED)
    args, kwargs, result = tree_map(
        lambda arg: arg.meta["val"] if isinstance(arg, fx.Node) else arg, (first.args, first.kwargs, first)
    )
    dtype = next(tensor.dtype for tensor in (result if isinstance(result, tuple | list) else [result]) if tensor is not None)
    passes = sum(args[-1][:2]) if name_of(first) == "convolution_backward" else 1
    flops = round(flops_of(first.target, args, kwargs, result) * padding_of(first.target, args))
    return Operation(kind_of(first.target), dtype, flops, nbytes, passes, launches=COMPILED)
