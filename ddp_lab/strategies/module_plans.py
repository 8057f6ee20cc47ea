"""Tensor parallelism of any module by a plan: names of its layers, and a word for each.

    {"layers.*.q_proj": "column", "layers.*.o_proj": "row", "lm_head": "column_gathered"}

A name may be a pattern, as of fnmatch. The words are ours and those of transformers' plans, which a
model of transformers brings along (`own_plan`). torch's parallel styles do what they say; every
other layer is computed by every rank. plan_trial.py compares the result with the undivided model.

| words | the layer's inputs | what each rank has | its outputs |
|---|---|---|---|
| column, colwise | all | some units of a linear layer or an embedding | these units |
| column_gathered, colwise_rep, colwise_gather_output, embedding_colwise | all | the same | all |
| row, rowwise | its own, of a column layer | the weights of these inputs, or some words | all |
| row_divided, rowwise_rep, rowwise_split_input, embedding_rowwise | all | the same | all |
| replicated, replicate | any | the complete layer | any |
| summed, replicated_with_grad_allreduce | its own | all, with gradients that are summed | its own |
"""

import difflib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ddp_lab.config.errors import ConfigError, count
from ddp_lab.models.chain import tie, tied_parameters
from ddp_lab.models.trial import some
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.block_plans import is_linear
from ddp_lab.strategies.sharded_layers import parallelize_layer

ALIASES = {
    "column": ("column", "colwise"),
    "column_gathered": (
        "column_gathered",
        "colwise_rep",
        "colwise_gather_output",
        "embedding_colwise",
    ),
    "row": ("row", "rowwise"),
    "row_divided": ("row_divided", "rowwise_rep", "rowwise_split_input", "embedding_rowwise"),
    "replicated": ("replicated", "replicate"),
    "summed": ("summed", "replicated_with_grad_allreduce"),
}
MEANING = {word: ours for ours, words in ALIASES.items() for word in words}
# Words of transformers' plans that are not supported, and why.
REFUSED = {
    "sequence_parallel": "it divides the tokens between the layers, which no word of a plan does "
    "here. Leave such layers out, so that every rank computes all tokens, or use "
    "strategy.sequence_parallel=true of strategy=mesh with a Chain of blocks with a plan",
    "packed_colwise": "the layer has the weights of several layers, each of which would have to be "
    "divided",
    "packed_rowwise": "the layer has the weights of several layers, each of which would have to be "
    "divided",
    "all_reduce": "it sums what a module without a linear layer returns",
    "mla_kv_a_proj": "it divides some of the layer's units and keeps others complete",
    "local_params": "it is for layers of experts",
}
OF_EXPERTS = ("moe", "ep_", "grouped_gemm", "experts", "gather", "local")
COMPLETE = ("replicated", "summed")  # words of layers that every rank has
OF_CONFIG = "base_model_tp_plan"  # the plan in a config of transformers
# Layers with these words get and return what every rank has, so that each may as well be complete.
ALONE = ("column_gathered", "row_divided")


class PlannedLayer(NamedTuple):
    """What a plan says of a layer.

    Attributes:
        word: a key of ALIASES.
        said: the entry of the plan, for messages, for example "layers.*.q_proj: colwise".
    """

    word: str
    said: str


class ModulePlan(NamedTuple):
    """The plan of a model.

    Attributes:
        key: what messages call it.
        layers: what it says of each layer that it names, by the layer's name.
        remedy: what else can be done, for messages.
    """

    key: str
    layers: Mapping[str, PlannedLayer]
    remedy: str

    @property
    def words(self) -> dict[str, str]:
        """The entry of the plan for each layer, by the layer's name, for messages."""
        return {name: layer.said for name, layer in self.layers.items()}

    @property
    def divided(self) -> list[str]:
        """The names of the layers of which each rank has a part."""
        return [name for name, layer in self.layers.items() if layer.word not in COMPLETE]

    def with_word(self, word: str) -> list[str]:
        """Return the names of the layers with a word."""
        return [name for name, layer in self.layers.items() if layer.word == word]


def chosen_plan(model: nn.Module, option: Mapping[Any, Any] | None, tp: int) -> ModulePlan | None:
    """Return the plan of a model; None if neither the user nor the model has one.

    Args:
        model: the complete model.
        option: strategy.plan: names or patterns of names, and words; empty: the model's own plan is
            not used; None: it is.
        tp: number of ranks that share a layer.

    Raises:
        ConfigError: a name matches no layer, a word is unknown or not supported, or a layer cannot
            be divided so.
    """
    if option is not None:
        words = {str(pattern): str(word) for pattern, word in option.items()}
        remedy = (
            "Correct strategy.plan, or leave the layer out, which is then complete on all ranks"
        )
        plan = ModulePlan("strategy.plan", find_layers(model, words, "strategy.plan"), remedy)
    else:
        words = own_plan(model)
        key = f"the tensor-parallel plan of {type(model).__name__}"
        remedy = (
            "Give another plan by strategy.plan={NAME: WORD, ...}, or use strategy=tp with "
            "strategy.plan={}, which divides the model layer by layer"
        )
        names = [name for name, _ in model.named_modules()]
        matching = {
            pattern: word
            for pattern, word in words.items()
            if any(fnmatchcase(name, pattern) for name in names)
        }
        layers = find_layers(model, matching, key)
        plan = ModulePlan(key, complete_where_needed(model, layers, tp), remedy)
    if not plan.layers:
        return None
    for name, layer in plan.layers.items():
        check_layer(model, name, layer, tp, plan)
    check_tied(model, plan)
    return plan


def own_plan(model: nn.Module) -> dict[str, str]:
    """Return the plan that a model of transformers brings along, or modules in it; {} without one.

    It is the attribute `_tp_plan`, into which transformers puts that of the config, too; or else
    `base_model_tp_plan` of the config, for the part of the model that `base_model_prefix` names.
    """
    named = [*reversed(list(model.named_modules()))]  # those around others have the last word
    plan: dict[str, str] = {}
    for name, module in named:
        plan |= with_prefix(name, getattr(module, "_tp_plan", None))
    if plan:
        return plan

    for name, module in named:
        base = getattr(module, "base_model_prefix", None)
        if isinstance(base, str):
            inner = base if base and hasattr(module, base) else ""
            path = ".".join(filter(None, (name, inner)))
            plan |= with_prefix(path, getattr(getattr(module, "config", None), OF_CONFIG, None))
    return plan


def with_prefix(path: str, words: Any) -> dict[str, str]:
    """Return the entries of a plan for a module of a model; {} for what is no plan."""
    if not isinstance(words, dict):
        return {}
    entries = cast("dict[Any, Any]", words)
    return {f"{path}.{name}".lstrip("."): str(word) for name, word in entries.items()}


def find_layers(model: nn.Module, words: Mapping[str, str], key: str) -> dict[str, PlannedLayer]:
    """Return what a plan says of each layer, in the order of the model.

    Raises:
        ConfigError: a pattern matches no module, a word is unknown or not supported, or two
            patterns say something else of one layer.
    """
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    by_module: dict[nn.Module, PlannedLayer] = {}
    for pattern, word in words.items():
        said = f"{pattern}: {word}"
        meaning = meaning_of(word, said, key)
        matching = [module for name, module in modules.items() if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(f"{key}: {pattern} matches no module. {nearest(model, pattern)}")
        for module in matching:
            before = by_module.setdefault(module, PlannedLayer(meaning, said))
            if before.word != meaning:
                name = next(name for name, each in modules.items() if each is module)
                raise ConfigError(
                    f"{key}: says both {before.said} and {said} of {name}. Use one word for it"
                )
    return {
        name: by_module[module] for name, module in model.named_modules() if module in by_module
    }


def meaning_of(word: str, said: str, key: str) -> str:
    """Return the word of ALIASES that a word of a plan means.

    Raises:
        ConfigError: it is unknown or not supported.
    """
    if word in MEANING:
        return MEANING[word]
    others = ", ".join(other for other in MEANING if other not in ALIASES)
    allowed = f"{', '.join(ALIASES)}; and of transformers {others}"
    if reason := REFUSED.get(word):
        raise ConfigError(f"{key}: {said} is not supported: {reason}. Allowed: {allowed}")
    if word.startswith(OF_EXPERTS):
        raise ConfigError(
            f"{key}: {said} is not supported: it divides a mixture of experts. Allowed: {allowed}. "
            "Use strategy=tp with strategy.plan={} to divide the model layer by layer"
        )
    close = difflib.get_close_matches(word, MEANING, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(f"{key}: {said}: there is no such word; {hint}allowed: {allowed}")


def nearest(model: nn.Module, pattern: str) -> str:
    """Return the advice for a pattern that matches no module."""
    if pattern in dict(model.named_parameters(remove_duplicate=False)):
        return f"It is a parameter: name its module, {pattern.rpartition('.')[0]}"
    names = {
        ".".join("*" if part.isdigit() else part for part in name.split(".")): None
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | nn.Embedding)
    }
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    if close:
        return f"Did you mean {' or '.join(close)}?"
    return f"Its linear layers and embeddings are {some([*names], 6) or 'none'}"


def divided_dims(module: nn.Module, word: str) -> dict[str, Placement | None]:
    """Return how each parameter of a layer is divided, by its name; None: it is no DTensor."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    if word in COMPLETE:
        return dict.fromkeys(names)
    is_row = word.startswith("row")
    if isinstance(module, nn.Embedding):
        return {name: Shard(0 if is_row else 1) for name in names}
    row = {"weight": Shard(1), "bias": Replicate()}
    return {name: row[name] if is_row else Shard(0) for name in names}


def problem_of(model: nn.Module, name: str, layer: PlannedLayer, tp: int) -> str:
    """Return why a layer cannot be divided as its word says; "" if it can."""
    module = model.get_submodule(name)
    if layer.word in COMPLETE:
        return ""
    kind = type(module).__name__
    is_embedding = isinstance(module, nn.Embedding)
    if not is_embedding and not is_linear(module):
        if kind in ("Linear", "Embedding"):  # of another library, for example of PEFT
            kind = f"{type(module).__module__}.{kind}"
        return f"it is a {kind}, and torch divides nn.Linear and nn.Embedding"
    is_row = layer.word.startswith("row")
    any_module: Any = module
    if is_embedding and is_row and any_module.padding_idx is not None:
        return (
            f"each rank would have some words, and its padding_idx={any_module.padding_idx} would "
            "be taken for one of them on every rank"
        )
    if is_embedding:
        size = any_module.num_embeddings if is_row else any_module.embedding_dim
        counted = "words" if is_row else "units"
    else:
        size = any_module.in_features if is_row else any_module.out_features
        counted = "inputs" if is_row else "units"
    if size % tp:
        return f"strategy.tp={tp} must divide its {size} {counted}"
    head = head_width(model.get_submodule(name.rpartition(".")[0]))
    if layer.word == "column" and head and size % head == 0 and size // head % tp:
        return (
            f"strategy.tp={tp} must divide its {count(size // head, 'head')} of "
            f"{count(head, 'unit')}"
        )
    return ""


def head_width(around: nn.Module) -> int:
    """Return the units of an attention's head, as the models of libraries call it; 0: unknown."""
    for name in ("head_dim", "head_width", "attention_head_size"):
        width = getattr(around, name, None)
        if isinstance(width, int) and width > 0:
            return width
    return 0


def check_layer(
    model: nn.Module, name: str, layer: PlannedLayer, tp: int, plan: ModulePlan
) -> None:
    """Raise a ConfigError if a layer cannot be divided as its word says."""
    if problem := problem_of(model, name, layer, tp):
        raise ConfigError(
            f"{plan.key}: cannot divide {name} ({layer.said}): {problem}. {plan.remedy}"
        )


def places_of_tied(
    model: nn.Module, layers: Mapping[str, PlannedLayer]
) -> Iterator[dict[str, Placement | None]]:
    """Yield how each parameter with several names is divided under each of them."""
    for names in tied_parameters(model):
        places: dict[str, Placement | None] = {}
        for name in names:
            path, _, own_name = name.rpartition(".")
            module = model.get_submodule(path)
            # a module with two names has one entry
            layer = next(
                (each for key, each in layers.items() if model.get_submodule(key) is module), None
            )
            places[name] = divided_dims(module, layer.word)[own_name] if layer else None
        yield places


def check_tied(model: nn.Module, plan: ModulePlan) -> None:
    """Raise a ConfigError if a parameter with several names is not divided alike under all."""
    for places in places_of_tied(model, plan.layers):
        first = next(iter(places))
        for other, place in places.items():
            if place != places[first]:
                raise ConfigError(
                    f"{plan.key}: {first} and {other} are one parameter (tied weights), which must "
                    "be divided alike. Name both layers, an embedding as embedding_rowwise and a "
                    "head as column_gathered, or none of them"
                )


def complete_where_needed(
    model: nn.Module, layers: Mapping[str, PlannedLayer], tp: int
) -> dict[str, PlannedLayer]:
    """Return a model's own plan without layers that need not be divided and cannot be.

    These are such as the embedding and the head, whose words are of ALONE: their sizes may not be
    divisible, or their weights tied to those of another layer.
    """
    kept = {
        name: layer
        for name, layer in layers.items()
        if layer.word not in ALONE or not problem_of(model, name, layer, tp)
    }
    for places in places_of_tied(model, kept):
        if len(set(places.values())) > 1:
            for name in places:
                path = name.rpartition(".")[0]
                if path in kept and kept[path].word in ALONE:
                    del kept[path]
    return kept


def style_of(module: nn.Module, word: str) -> ParallelStyle:
    """Return torch's style for a layer."""
    if word == "column":
        return ColwiseParallel()
    if word == "column_gathered":
        return ColwiseParallel(output_layouts=Replicate())
    # every rank has all tokens before an embedding
    if word == "row_divided" or isinstance(module, nn.Embedding):
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel()


def require_sample(strategy: Strategy, plan: ModulePlan) -> None:
    """Raise a ConfigError if a strategy has no sample for the trial of a plan."""
    if strategy.sample is None and not strategy.runtime.is_planned:
        raise ConfigError(
            f"{plan.key}: is tried with a sample before the first step: "
            "lab.trainer(..., example=dataset[0])"
        )


def apply_plan(model: nn.Module, plan: ModulePlan, mesh: DeviceMesh) -> None:
    """Divide the layers of a model by its plan, in place.

    Its parameters are the same on every rank.

    Args:
        model: complete, on its device.
        plan: of it.
        mesh: one-dimensional.
    """
    tied = tied_parameters(model)
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    for name, layer in plan.layers.items():
        if layer.word in COMPLETE:
            continue
        module = model.get_submodule(name)
        parallelize_layer(module, mesh, style_of(module, layer.word), src_data_rank=None)
    tie(model, tied)  # each layer has got a parameter of its own
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
