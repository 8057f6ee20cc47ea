"""Weights to a file and from one, read without executing code and matched by name."""

import json
import pickle
import socket
import zipfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from ddp_lab.config.errors import ConfigError, NodeError, count
from ddp_lab.models.trial import some

# where checkpoints of other programs, and of ddp_lab, hold the weights
NESTED = ("state_dict", "model_state_dict", "model")
PAIRS = (torch.complex128, torch.complex32)  # which safetensors has not
# in the metadata: the names of those that are stored as pairs of real numbers, as JSON
COMPLEX = "complex"
PREFIXES = ("module.", "_orig_mod.")  # of nn.DataParallel and of torch.compile


def match_weights(
    expected: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    num_classes: int,
    key: str,
    left_out: Sequence[str] = (),
) -> tuple[dict[str, Any], list[str]]:
    """Return those of the weights in a file that fit the model, by name, and notes for the log.

    A head of another number of classes keeps its initial weights. A first convolution for 3
    channels is summed over them if the model's has 1: grey images then give the same activations as
    three equal channels.

    Args:
        expected: the complete model's tensors by name; only their shapes matter.
        state: the weights by name, tensors or StoredTensors.
        num_classes: number of logits; 0: no head is left out by itself.
        key: key and value of the config that the messages are about.
        left_out: names, or patterns of names, that keep their initial weights.

    Raises:
        ConfigError: names or shapes are not those of the model.
    """
    weights = {name: tensor for name, tensor in state.items() if not is_matched(name, left_out)}
    keeps_initial = [name for name in expected if is_matched(name, left_out)]
    notes = [f"{key}: loaded"]
    if keeps_initial:
        notes.append(f"{some(keeps_initial)}: initialised anew (model.weights_except)")
    elif left_out:
        raise ConfigError(
            f"model.weights_except=[{','.join(left_out)}]: matches no parameter of the model. Use "
            f"a name or a pattern of names, for example of {some([*expected])}"
        )

    for name in [*weights]:
        if name in expected and has_other_channels(weights[name], expected[name]):
            weights[name] = in_one_channel(weights[name])
            notes.append(f"{name}: summed over its 3 channels, because the images have 1")

    heads = other_heads(expected, weights, num_classes)
    if heads:
        notes.append(
            f"{some(heads)}: initialised anew, for {count(num_classes, 'class')} instead of "
            f"{weights[heads[0]].size(0)}"
        )
        keeps_initial += heads
        weights = {name: tensor for name, tensor in weights.items() if name not in heads}
    require_same_names(expected, weights, keeps_initial, key)
    return weights, notes


def has_other_channels(weight: Any, expected: torch.Tensor) -> bool:
    """Return whether a weight is of a convolution of 3 channels in place of 1."""
    return (
        expected.dim() == 4 and weight.dim() == 4 and (weight.size(1), expected.size(1)) == (3, 1)
    )


def in_one_channel(weight: Any) -> torch.Tensor:
    """Return a weight, a tensor or a StoredTensor, [b, 3, ...], summed over its channels."""
    full = weight if isinstance(weight, torch.Tensor) else weight.read()
    return full.sum(1, keepdim=True)


def other_heads(
    expected: Mapping[str, torch.Tensor], weights: Mapping[str, Any], num_classes: int
) -> list[str]:
    """Return the names of the weights of a head for another number of classes.

    Args:
        expected: the complete model's tensors by name.
        weights: tensors or StoredTensors by name.
        num_classes: number of logits of the model; 0: it has no head.
    """
    if not num_classes:
        return []
    heads = [
        name
        for name, tensor in expected.items()
        if name in weights
        and weights[name].shape != tensor.shape
        and is_head(weights[name], tensor, num_classes)
    ]
    numbers_of_classes = {weights[name].size(0) for name in heads}
    return heads if len(numbers_of_classes) == 1 else []


def require_same_names(
    expected: Mapping[str, torch.Tensor],
    weights: Mapping[str, Any],
    keeps_initial: Sequence[str],
    key: str,
) -> None:
    """Check that weights have the names and shapes of a model.

    Args:
        expected: the complete model's tensors by name.
        weights: tensors or StoredTensors by name.
        keeps_initial: names that need no weight.
        key: key and value of the config, for the message.

    Raises:
        ConfigError: they do not.
    """
    # Files from before torch 0.4.1 have no counters of batches, which only BatchNorm layers without
    # a momentum use.
    counters = [name for name in expected if name.endswith("num_batches_tracked")]
    may_lack = {*counters, *keeps_initial}
    problems = {
        "missing": [name for name in expected if name not in weights and name not in may_lack],
        "not in the model": [name for name in weights if name not in expected],
        "of another shape": [
            f"{name} {list(weights[name].shape)} instead of {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
    }
    if not any(problems.values()):
        return
    text = "; ".join(
        f"{len(names)} {problem}: {some(names)}" for problem, names in problems.items() if names
    )
    raise ConfigError(
        f"{key}: are not the weights of this model: {text}. Use the model that they were trained "
        "with, with the same options and image size, or name what keeps its initial weights, such "
        "as a new head: model.weights_except=[head.*]"
    )


def is_matched(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a name is one of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_head(weight: torch.Tensor, expected: torch.Tensor, num_classes: int) -> bool:
    """Return whether two tensors of different shapes can belong to heads of different classes."""
    return (
        expected.dim() > 0
        and expected.size(0) == num_classes
        and weight.dim() > 0
        and weight.shape[1:] == expected.shape[1:]
    )


def read(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors in a file by name, without the prefixes of wrappers.

    Args:
        path: a safetensors file, or one of torch.save with a dict of tensors, also in a checkpoint.

    Raises:
        NodeError: the file is missing or cannot be read on this machine.
        ConfigError: it has no weights, or its pickle could run code.
    """
    key = f"model.weights={path}"
    try:
        if path.endswith(".safetensors"):
            state: Any = read_safetensors(path)
        else:  # where the format allows, tensors are read when they are used
            state = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except OSError as error:
        where = socket.gethostname()
        reason = error.strerror or str(error)
        file = "the path of an existing file"
        if isinstance(error, IsADirectoryError):
            file += f"; of a sharded checkpoint `ddp-lab merge RUN --checkpoint {path}` makes one"
        raise NodeError(f"{key}: cannot be read on {where} ({reason}). Use {file}") from None
    except pickle.UnpicklingError:
        raise ConfigError(
            f"{key}: has other objects than tensors, which could run code when they are loaded, or "
            "is damaged. Where you trust the file, save its weights alone: "
            "torch.save(model.state_dict(), FILE)"
        ) from None
    # the bytes of a file that was not written by torch.save may mean anything to the unpickler
    except Exception as error:
        reason = (
            f"{type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else 'it is incomplete'}"
        )
        raise ConfigError(f"{key}: is not a file of weights, or is damaged ({reason})") from None
    return unwrap(state, key)


def write_weights(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file.

    The format has no complex128 and no complex32. Such a tensor becomes real numbers, [..., 2], and
    the metadata have its name under COMPLEX, from which `read` makes it complex again.

    Raises:
        ConfigError: the format has no such dtype.
    """
    from safetensors.torch import save_file

    # Copies, because tensors that share memory (tied weights) are not allowed in the file.
    copies = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    as_pairs = [name for name, tensor in copies.items() if tensor.dtype in PAIRS]
    for name in as_pairs:
        copies[name] = torch.view_as_real(copies[name].resolve_conj()).contiguous()
    described = {"format": "pt", **metadata}
    if as_pairs:
        described[COMPLEX] = json.dumps(as_pairs)

    try:
        save_file(copies, path, described)
    except KeyError as error:  # the dtype that safetensors does not know
        name = next(name for name, tensor in copies.items() if tensor.dtype in error.args)
        dtype = str(copies[name].dtype).removeprefix("torch.")
        raise ConfigError(
            f"{path}: safetensors cannot store {name}, which is {dtype}. Convert it in the model, "
            "for example to float32, or save it by a checkpoint"
        ) from None


def read_safetensors(path: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file of `write_weights`, or of another program."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        as_pairs = json.loads((file.metadata() or {}).get(COMPLEX, "[]"))
    return tensors | {name: torch.view_as_complex(tensors[name]) for name in as_pairs}


def unwrap(state: Any, key: str) -> dict[str, torch.Tensor]:
    """Return the dict of tensors that a file consists of, or has under NESTED, without PREFIXES.

    Args:
        key: the start of the message.

    Raises:
        ConfigError: there is none, or there are several.
    """
    candidates = [state] if is_weights(state) else list[dict[str, torch.Tensor]]()
    if isinstance(state, dict) and not candidates:
        candidates = [state[name] for name in NESTED if is_weights(state.get(name))]
    if len(candidates) != 1:
        if isinstance(state, dict):
            has = f"has {some([str(name) for name in state], 6)}"
        else:
            has = f"is a {type(state).__name__}"
        raise ConfigError(
            f"{key}: must be a dict of tensors by name, or have exactly one under "
            f"{', '.join(NESTED)}; it {has}. Save the weights alone: "
            "torch.save(model.state_dict(), FILE)"
        )

    weights = candidates[0]
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in weights):
            weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights


def is_weights(state: Any) -> bool:
    """Return whether `state` is a dict of tensors by name that is not empty."""
    if not isinstance(state, dict) or not state:
        return False
    return all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    )
