"""Models of timm, transformers and torchvision, as they are, with random weights and small sizes.

Each is trained by `single` and by other strategies. The packages are imported where they are used.
Models have few layers, because tracing takes most of the time under a pipeline, and are narrow,
because their weights are added and compared in float64.
"""

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

from ddp_lab import Lab, tasks
from ddp_lab.config.errors import ConfigError
from ddp_lab.strategies.batch_norm import is_batch_norm

WORDS = 99
LENGTH = 12
CLASSES = 10
SAMPLES = 11  # of which the last batch has 3
STEPS = 3


class Images(Dataset):
    """Random images and classes."""

    def __init__(self, *shape: int):
        self.shape = shape

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        return image, index % CLASSES


class Texts(Dataset):
    """Random tokens, as keywords of a model of transformers.

    Args:
        parts: names of the inputs besides input_ids.
    """

    def __init__(self, *parts: str):
        self.parts = parts

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        sample: dict[str, Any] = {
            "input_ids": torch.randint(WORDS, (LENGTH,), generator=generator),
            "label": index % CLASSES,
        }
        if "attention_mask" in self.parts:
            sample["attention_mask"] = (torch.arange(LENGTH) < 7 + index % 5).long()
        if "decoder_input_ids" in self.parts:
            sample["decoder_input_ids"] = torch.randint(WORDS, (5,), generator=generator)
        return sample


class Block(nn.Module):
    """A block of NanoGPT."""

    def __init__(self, width: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query, key, value = self.c_attn(self.ln_1(tokens)).unsqueeze(1).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.c_proj(attended.squeeze(1))
        return tokens + self.mlp(self.ln_2(tokens))


class NanoGPT(nn.Module):
    """A GPT in the layout of nanoGPT: a ModuleDict of parts, and a head tied to the embedding."""

    def __init__(self, width: int = 16, layers: int = 4):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, width),
                "wpe": nn.Embedding(LENGTH, width),
                "h": nn.ModuleList(Block(width) for _ in range(layers)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        parts = self.transformer
        places = torch.arange(input_ids.size(1), device=input_ids.device)
        tokens = parts["wte"](input_ids) + parts["wpe"](places)
        for block in parts["h"]:
            tokens = block(tokens)
        return self.lm_head(parts["ln_f"](tokens))


def last_token(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """Return the losses of the last token's logits, [b]."""
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
    return F.cross_entropy(logits[:, -1], targets, reduction="none")


def mean_pixel(outputs: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Return the losses of the mean logits of a segmentation, [b]."""
    return F.cross_entropy(outputs["out"].mean((2, 3)), targets, reduction="none")


class Model(NamedTuple):
    """A model with what it is trained with.

    Attributes:
        make: returns it.
        data: the training set.
        loss: for its outputs and the classes.
    """

    make: Callable[[], nn.Module]
    data: Dataset
    loss: Any


def of_timm(name: str, size: int = 32, **options: Any) -> Model:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **options)

    return Model(make, Images(3, size, size), tasks.Classification())


def of_transformers(name: str, data: Dataset, loss: Any, **options: Any) -> Model:
    """Return a model of transformers.

    Args:
        name: of its class.
        data, loss: as in `Model`.
        options: of the config; `config` is the name of its class.
    """

    def make() -> nn.Module:
        transformers: Any = importlib.import_module("transformers")
        transformers.logging.set_verbosity_error()
        keys = dict(options)
        config = getattr(transformers, keys.pop("config"))
        return getattr(transformers, name)(config(**keys))

    return Model(make, data, loss)


def of_torchvision(path: str, data: Dataset, loss: Any, **options: Any) -> Model:
    def make() -> nn.Module:
        module, _, name = path.rpartition(".")
        library: Any = importlib.import_module(f"torchvision.models{module and '.'}{module}")
        return getattr(library, name)(weights=None, num_classes=CLASSES, **options)

    return Model(make, data, loss)


def short_resnet50() -> nn.Module:
    """Return torchvision's resnet50 with fewer bottlenecks, and narrower ones."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return ResNet(Bottleneck, [1, 1, 2, 1], num_classes=CLASSES, width_per_group=8)


def short_mc3_18() -> nn.Module:
    """Return torchvision's mc3_18, whose convolutions mix frames in the first layer, with half of
    the blocks.
    """
    from torchvision.models.video import resnet

    convolutions = [resnet.Conv3DSimple] + [resnet.Conv3DNoTemporal] * 3
    return resnet.VideoResNet(
        resnet.BasicBlock, convolutions, [1, 1, 1, 1], resnet.BasicStem, num_classes=CLASSES
    )


def sizes(layers: str, width: str, heads: str) -> dict[str, int]:
    return {layers: 2, width: 32, heads: 2}


BERT = sizes("num_hidden_layers", "hidden_size", "num_attention_heads") | {"intermediate_size": 64}
MODELS = {
    "timm resnet18": of_timm(
        "resnet18", stem_width=16, layers=(1, 1, 1, 1), channels=(16, 32, 48, 64)
    ),
    "timm convnext_atto": of_timm("convnext_atto", depths=(1, 1, 2, 1), dims=(16, 32, 48, 64)),
    # of 32 pixels one is left at the end, where BatchNorm of 3 samples is so badly conditioned that
    # single in float64 differs from itself with the samples in another order
    "timm efficientnet_b0": of_timm("efficientnet_b0", 64, drop_rate=0.0),
    "timm vit_tiny": of_timm("vit_tiny_patch16_224", img_size=32, depth=4, embed_dim=48),
    "timm swin_tiny": of_timm(
        "swin_tiny_patch4_window7_224",
        56,
        img_size=56,
        embed_dim=24,
        depths=(1, 2),
        num_heads=(3, 6),
        drop_path_rate=0.0,
    ),
    "timm mixer_s32": of_timm("mixer_s32_224", 64, img_size=64),
    "transformers Llama": of_transformers(
        "LlamaForCausalLM",
        Texts("attention_mask"),
        last_token,
        config="LlamaConfig",
        vocab_size=WORDS,
        num_key_value_heads=1,
        use_cache=False,
        **BERT,
    ),
    "transformers Llama of two key heads, tied": of_transformers(
        "LlamaForCausalLM",
        Texts("attention_mask"),
        last_token,
        config="LlamaConfig",
        vocab_size=WORDS + 1,  # an even number
        tie_word_embeddings=True,
        use_cache=False,
        **BERT | {"num_hidden_layers": 4},  # of a pipeline of four stages
    ),
    "transformers GPT-2, tied": of_transformers(
        "GPT2LMHeadModel",
        Texts(),
        last_token,
        config="GPT2Config",
        vocab_size=WORDS,
        n_positions=LENGTH,
        use_cache=False,
        **sizes("n_layer", "n_embd", "n_head"),
    ),
    "transformers BERT with a mask": of_transformers(
        "BertForSequenceClassification",
        Texts("attention_mask"),
        tasks.Classification(),
        config="BertConfig",
        vocab_size=WORDS,
        num_labels=CLASSES,
        **BERT,
    ),
    "transformers T5": of_transformers(
        "T5ForConditionalGeneration",
        Texts("attention_mask", "decoder_input_ids"),
        last_token,
        config="T5Config",
        vocab_size=WORDS,
        d_kv=16,
        d_ff=64,
        use_cache=False,
        **sizes("num_layers", "d_model", "num_heads"),
    ),
    "transformers ViT": of_transformers(
        "ViTForImageClassification",
        Images(3, 32, 32),
        tasks.Classification(),
        config="ViTConfig",
        image_size=32,
        patch_size=8,
        num_labels=CLASSES,
        **BERT,
    ),
    "torchvision resnet50": Model(short_resnet50, Images(3, 64, 64), tasks.Classification()),
    "torchvision deeplabv3": of_torchvision(
        "segmentation.deeplabv3_mobilenet_v3_large",
        Images(3, 64, 64),
        mean_pixel,
        weights_backbone=None,
    ),
    "torchvision mc3_18": Model(short_mc3_18, Images(3, 2, 32, 32), tasks.Classification()),
    "nanoGPT's layout, tied": Model(NanoGPT, Texts(), last_token),
}

# Those that are trained by every strategy, with the plan by which tp and mesh divide their layers;
# None: their own.
PLANS: dict[str, dict[str, str] | None] = {
    "timm vit_tiny": {"blocks.*.mlp.fc1": "column", "blocks.*.mlp.fc2": "row"},
    "transformers Llama of two key heads, tied": None,
    "nanoGPT's layout, tied": {
        "transformer.h.*.mlp.0": "column",
        "transformer.h.*.mlp.2": "row",
    },
}


class World(NamedTuple):
    """Ranks under a strategy, which train the models of PLANS.

    Attributes:
        strategy: its name.
        ranks: their number.
        options: of the strategy.
        is_planned: whether it gets the plan of each model.
        reason: in the message, if it is refused.
    """

    strategy: str
    ranks: int
    options: Mapping[str, Any] = {}
    is_planned: bool = False
    reason: str = ""


GPIPE = {"schedule": "gpipe", "num_microbatches": 2}
TRACED = "a trace, whose stages have no layers"
# by what the table calls it
WORLDS = {
    "dp": World("dp", 1),
    "split": World("split", 1, {"devices": ["cpu", "cpu"], "num_microbatches": 2}),
    "split, 4 stages": World("split", 1, {"devices": ["cpu"] * 4, "num_microbatches": 2}),
    "scratch": World("scratch", 2),
    "tp": World("tp", 2, is_planned=True),
    "tp, layer by layer": World("tp", 2, {"plan": {}}),
    "mesh, tp=2": World("mesh", 2, {"tp": 2}, is_planned=True),
    "mesh, shard=null": World("mesh", 2, {"shard": None}),
    "mesh, pp=2": World("mesh", 2, {"pp": 2} | GPIPE),
    "scratch on 4": World("scratch", 4, {"algorithm": "ring"}),
    "ddp on 4": World("ddp", 4),
    "fsdp on 4": World("fsdp", 4),
    "pipeline on 4": World("pipeline", 4, GPIPE),
    "ddp_pipeline on 4": World("ddp_pipeline", 4, {"pp": 2} | GPIPE),
    "tp=2 on 4": World("tp", 4, {"tp": 2}, is_planned=True),
    "mesh, tp=2 on 4": World("mesh", 4, {"tp": 2}, is_planned=True),
    "mesh, tp=2 shard=null on 4": World("mesh", 4, {"tp": 2, "shard": None}, is_planned=True),
    "mesh, shard=2 on 4": World("mesh", 4, {"shard": 2}),
    "mesh, pp=2 on 4": World("mesh", 4, {"pp": 2} | GPIPE),
    "mesh, pp=2 tp=2 on 4": World("mesh", 4, {"pp": 2, "tp": 2} | GPIPE, reason=TRACED),
    "mesh, pp=2 shard=2 on 4": World("mesh", 4, {"pp": 2, "shard": 2} | GPIPE, reason=TRACED),
}


def without_dropout(model: nn.Module) -> nn.Module:
    """Return a model that draws no random numbers, in float64."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_rate"):  # numbers of transformers
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.double()


def trained(strategy: str, name: str, folder: Path, **options: Any) -> str | float:
    """Train a model for three steps; return its largest difference of a weight from single's.

    Args:
        strategy: the first one must be single, which leaves its weights in `folder`.
        name: of the model.
        folder: for the weights.
        options: of the strategy.

    Returns:
        The difference on rank 0, and 0.0 on the others; or why the model is refused.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    spec = MODELS[name]
    torch.manual_seed(0)
    model = without_dropout(spec.make())
    has_statistics = any(map(is_batch_norm, model.modules()))
    accumulate = 2
    if has_statistics:
        accumulate = 1  # another function otherwise
        if strategy in ("ddp", "fsdp", "scratch", "tp"):
            options["batch_norm"] = "sync"
    if strategy == "pipeline":
        options = GPIPE | ({"num_microbatches": 1} if has_statistics else {})
    path = folder / f"{'single' if strategy == 'single' else 'other'}-{list(MODELS).index(name)}"
    try:
        with Lab(strategy, device="cpu", timeout=120, **options) as lab:
            trainer = lab.trainer(
                model,
                spec.loss,
                partial(torch.optim.SGD, lr=0.05, momentum=0.9),
                batch_size=8,
                accumulate=accumulate,
                example=spec.data[0],
                targets="label" if isinstance(spec.data, Texts) else 1,
            )
            for inputs, targets in batches(trainer, spec.data):
                trainer.step(inputs, targets)
            trainer.save(path.with_suffix(".safetensors"))
            if strategy == "single" or not lab.is_main:
                return 0.0
    except ConfigError as error:
        return str(error)
    expected = load_file(folder / f"single-{list(MODELS).index(name)}.safetensors")
    weights = load_file(path.with_suffix(".safetensors"))
    assert weights.keys() == expected.keys()
    differences = [(weights[key] - tensor).abs().max().item() for key, tensor in expected.items()]
    return float(max(differences))


def batches(trainer: Any, data: Dataset) -> Iterator[Any]:
    """Yield the batches of three steps, of which the second is a partial one."""
    step = 0
    for epoch in range(STEPS):
        for batch in trainer.batches(data, epoch):
            if step < STEPS:
                yield batch
                step += 1


def train_all(strategy: str, names: list[str], folder: Path) -> dict[str, str | float]:
    return {name: trained(strategy, name, folder) for name in names}


def train_planned(world: World, names: list[str], folder: Path) -> dict[str, str | float]:
    """Train some of PLANS' models on a rank of a world; results as of `trained`."""
    return {
        name: trained(
            world.strategy,
            name,
            folder,
            **world.options,
            **{"plan": PLANS[name]} if world.is_planned else {},
        )
        for name in names
    }
