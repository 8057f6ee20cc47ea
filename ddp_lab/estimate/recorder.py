"""A record of the operations that run on fake tensors: their FLOPs, their memory traffic, and how much memory is in use."""

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

COMPUTED = ("convolution", "matmul", "attention")  # the kinds that have FLOPs
REDUCTIONS = ("sum", "mean", "var_mean", "amax", "amin")
# Python's work for an operation of a kind in eager mode, in launches (`Constants.launch`): chosen by hand.
# Single layers, forward and backward, on a machine with H200s, torch 2.11, 2026-11-23: a convolution 124 us, BatchNorm 117,
# LayerNorm 94, a linear layer 149 and with autocast 181, ReLU 44.
LAUNCHES = {"convolution": 1.5, "batch_norm": 1.4, "attention": 1.5, "elementwise": 0.5, "strided": 0.5, "pooling": 0.5}
CAST = 0.15  # the same for a change of the dtype
ALLOCATIONS = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)  # they run no kernel
CASTS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
FEW_ROWS = 65_536  # up to which few multiprocessors compute the gradient of a layer normalization's weight


class Operation(NamedTuple):
    """One kernel.

    Attributes:
        kind: "convolution", "matmul", "attention", "batch_norm", "norm" (the backward pass of a layer normalization),
            "pooling", "reduction" (also other normalizations), "fused" (by torch.compile), "strided" (elementwise, of tensors
            with different strides) or "elementwise" (all others).
        dtype: of its result.
        flops: floating-point operations that a matrix multiplication, convolution or attention computes; 0 for others.
        nbytes: bytes that it reads and writes.
        passes: number of results that are computed one after the other: two in the backward pass of most convolutions.
        rows: those of a layer normalization whose weight's gradient few multiprocessors add up (`traffic_of_norm`).
        launches: what Python and torch do for it in eager mode, as a multiple of `Constants.launch`.
    """

    kind: str
    dtype: torch.dtype
    flops: int
    nbytes: int
    passes: int = 1
    rows: int = 0
    launches: float = 1.0


class Recorder(TorchDispatchMode):
    """Records operations and the storages that they allocate.

    Args:
        keep: operations whose results are counted in `kept`.

    Attributes:
        operations: in their order, without views, which run no kernel.
        kept: bytes of the results of the operations `keep`.
        live: bytes of the storages that were allocated under the mode and are in use.
        peak: the largest value of `live` since `restart`.
    """

    def __init__(self, keep: Collection[Any] = ()) -> None:
        super().__init__()
        self.keep, self.kept = set(keep), 0
        self.operations: list[Operation] = []
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def restart(self) -> list[Operation]:
        """Return the operations since the last call, and begin to record anew. What is in use remains counted."""
        done, self.operations, self.peak = self.operations, [], self.live
        return done

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        before = {key_of(tensor): tensor for tensor in tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        new = [tensor for tensor in outputs if key_of(tensor) not in before]
        for tensor in new:
            self._count(tensor)
        self.kept += sum(tensor.nbytes for tensor in new) if func in self.keep else 0
        if (new or func._schema.is_mutable) and func not in ALLOCATIONS:
            given = tensors_in((args, kwargs)) * (2 if "batch_norm" in str(func) else 1)  # once more for the statistics
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in [*given, *outputs])
            dtype = outputs[0].dtype if outputs else torch.float32
            kind, passes = kind_of(func), sum(args[-1][:2]) if "convolution_backward" in str(func) else 1
            if kind == "elementwise" and not same_strides([*tensors_in((args, kwargs)), *outputs]):
                kind = "strided"
            if func in CASTS and dtype == torch.float32 and outputs[0].dtype != tensors_in(args)[-1].dtype:
                kind = "strided"  # torch does not vectorize it, either
            rows = 0
            if "native_layer_norm" in str(func):
                nbytes, rows = traffic_of_norm(outputs, kind == "norm")
            launches = CAST if func in CASTS else LAUNCHES.get(kind, 1.0)
            flops = round(flops_of(func, args, kwargs, result) * padding_of(func, args))
            self.operations.append(Operation(kind, dtype, flops, nbytes, passes, rows, launches))
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage, key = tensor.untyped_storage(), key_of(tensor)
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def key_of(tensor: torch.Tensor) -> int:
    """Return what identifies the storage of a tensor while it exists."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def kind_of(func: Any) -> str:
    """Return the kind of an operation."""
    name = func._overloadpacket.__name__
    if "convolution" in name:
        return "convolution"
    if "scaled_dot_product" in name:
        return "attention"
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        return "matmul"
    if "batch_norm" in name:
        return "batch_norm"
    if "pool" in name:
        return "pooling"
    if name == "native_layer_norm_backward":
        return "norm"
    return "reduction" if name in REDUCTIONS or "_norm" in name or "softmax" in name else "elementwise"


def traffic_of_norm(outputs: Sequence[torch.Tensor], backward: bool) -> tuple[int, int]:
    """Return the bytes that a layer normalization appears to move, and the rows that few multiprocessors add up.

    In bf16 it takes about as long as in float32 (on an H200, torch 2.11, 2026-11-23: 80 and 102 us for 50,000 rows of 384), in
    which it computes. The gradients of weight and bias are sums over the rows. Up to 65,536 rows torch gives 32 columns to one
    block of threads, which adds up row after row (GammaBetaBackwardCUDAKernel: 210 us for 50,000 rows, in bf16 and float32,
    and 78 us for 100,000); with more rows it reads all with the complete bandwidth.
    """
    size, rows = outputs[0].numel() * 4, outputs[0].numel() // outputs[0].shape[-1]
    if not backward:
        return 2 * size, 0
    return (3 * size, rows) if rows <= FEW_ROWS else (5 * size, 0)


def same_strides(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the largest of some tensors lie in memory in the same order."""
    most = max((tensor.numel() for tensor in tensors), default=0)
    return len({tensor.stride() for tensor in tensors if tensor.numel() == most and tensor.dim() > 1}) <= 1


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """Return the FLOPs of an operation by torch's formulas; attention on the CPU, which has none, by flash attention's."""
    name = func._overloadpacket.__name__
    if name.startswith("_scaled_dot_product") and "for_cpu" in name:
        backward = "backward" in name
        query, key = (args[1], args[2]) if backward else (args[0], args[1])
        batch, heads, tokens, width = query.shape
        # Two matrix multiplications forward; five backward, which computes the scores again (Dao 2023, arXiv:2307.08691).
        return (10 if backward else 4) * batch * heads * tokens * key.shape[-2] * width
    formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return formula(*args, **kwargs, out_val=result) if formula else 0


def padding_of(func: Any, args: tuple[Any, ...]) -> float:
    """Return how many times as many FLOPs as it needs a convolution of few channels computes.

    Its kernels multiply tiles, whose missing channels are zero: 32 channels of the inputs, and 8 of the outputs, for which
    cuDNN copies the weights into larger ones.
    """
    if "convolution" not in func._overloadpacket.__name__:
        return 1.0
    outputs, inputs = args[2 if "backward" in func._overloadpacket.__name__ else 1].shape[:2]
    return (-inputs % 32 + inputs) / inputs * (-outputs % 8 + outputs) / outputs
