"""A case: a training under a strategy, whose result must be that of one device.

By default the last batch is partial, and its size is not divisible by 2, 3 or 4.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any

import torch
import yaml
from configs import CONF, config
from omegaconf import DictConfig, OmegaConf
from small_networks import MODELS

# Most keys that change numbers differ from their defaults.
BASE = (
    "data.dataset.train_size=59 data.dataset.test_size=31 data.dataset.channels=1 "
    "data.num_workers=1 "
)
BASE += "data.val_seed=7 data.loader=device epochs=2 batch_size=24 seed=7 lr_scaling=linear "
BASE += "lr_base_batch_size=24 warmup_epochs=0.6 optimizer.lr=0.05 speed=off"
GROUPS = ("data", "model", "task", "loss", "optimizer", "scheduler")
SHORT_NAMES = {"samples": "data.dataset.train_size"}  # of keys, in cases
# Keys of which the result must not depend.
INDEPENDENT_OF = {
    "accumulate",
    "data.loader",
    "data.num_workers",
    "save",
    "checkpoint.at_steps",
    "resume",
    "speed",
}
INDEPENDENT_OF |= {
    "task.head_chunks",
    "cuda_graph",
    "compile",
    "channels_last",
    "checkpoint_activations",
}
PRESETS = {
    # The last of three batches has one sample. With two or more ranks, some rank has only padding
    # in it, which must not count. Twelve more are the validation set, which is evaluated under
    # every strategy, too.
    "almost-empty": "samples=61 data.val_fraction=0.2",
    "clipped": "max_grad_norm=0.1 ema=0.8",  # also averages the weights, over about five steps
    # In float64: in float32, with 97 samples, the input of a ReLU in the seventh step was 2e-8
    # below zero on one rank and 3e-8 above it on two, so the final weights differed by 3e-5. In
    # float64 they differ by 6e-17.
    "augmented": "data.crop_padding=3 data.flip=true float64",
    "decayed": "optimizer.weight_decay=0.1",
    "undecayed": "optimizer.weight_decay=0.1 decay_norms_and_biases=false",
    "recipe": "mixup=0.4 cutmix=1.0 scheduler=multi_step scheduler.milestones=[1.6] "
    "scheduler.gamma=0.2 smoothed undecayed",
    "smoothed": "loss.label_smoothing=0.2",
    "focal": "loss=own loss._target_=own_losses.Focal loss.gamma=1.0",
    # In float64: where a gradient is mathematically zero, as that of a key's bias, AdamW divides
    # one rounding error by another.
    "adamw": "optimizer=adamw optimizer.lr=0.01 optimizer.weight_decay=0.0 float64",
    "files": "data=folder data.loader=workers data.channels=1 data.image_size=28 "
    "data.crop_scale=[0.3,1.0] data.flip=false data.randaugment=9 data.erasing=0.5 "
    "data.mean=[0.5] data.std=[0.2] data.num_workers=1",
    # Their logits are 0 at first, so smaller steps change too little.
    "vit": "model=vit model.init=by_block optimizer.lr=0.2",
    # drops either residual branch of the last block in half of the steps
    "vit_drop": "vit model.drop_path=0.5",
    "short": "vit epochs=1 samples=48",  # two complete batches
    # BatchNorm, in float64: rounding errors grow fast through its layers, more so if the sign of a
    # ReLU's input changes.
    **{
        name: f"model={name}"
        for name in ("lenet", "partly_frozen", "unbiased", "tied", "resnet18", "book_resnet18")
    },
    "narrow": "model=narrow samples=60 epochs=1 ema=0.8 float64",
    "normalized": "model=normalized samples=50 epochs=1 ema=0.8 float64",
    "narrow-step": "model=narrow samples=24 epochs=1",
    "step": "samples=24 epochs=1 float64",
    "regression": "task=regression data=own data.dataset._target_=own_datasets.numbers model=own "
    "model._target_=own_models.regressor model.dropout=0.0",
    # a loss that returns the sum of a batch and its weight
    "sums": "regression task._target_=ddp_lab.tasks.Task loss=own "
    "loss._target_=own_losses.of_large",
    "unused": "optimizer.weight_decay=0.1 float64",
    "experts": "own=Experts unused",
    "weights": "optimizer.weight_decay=0.1",
    "multi_label": "regression task=multi_label data.dataset._target_=own_datasets.signs",
    "segmentation": "task=segmentation data=own data.loader=workers data.num_workers=0 "
    "data.num_classes=2 data.flip=true data.crop_padding=2 "
    "data.dataset._target_=own_datasets.Masks model=own "
    "model._target_=own_models.segmenter",
    "tokens": "task=tokens data=own data.dataset._target_=own_datasets.Tokens data.num_classes=11 "
    "data.dataset.ignored=true model=gpt model.depth=2 model.width=16",
    # 5 batches of 24 are three passes; each reader has another buffer and draws other noise
    "stream": "data=own data.loader=auto data.dataset._target_=own_streams.noisy data.mean=[0.5] "
    "data.std=[0.2] data.num_workers=1 epochs=null max_steps=5 warmup_epochs=0 warmup_steps=2",
    "readers": "stream data.readers=2",
    "pairs": "model=own model._target_=planned_models.Pairs float64",
    "planned": "model=own model._target_=planned_models.Planned float64",
    # 11 tokens: shards of the weight of embedding and head are uneven
    # 15 of 40 samples are the validation set, so the last batch has one sample
    "one_left": "tokens data.val_fraction=0.375",
    "tied_head": "tokens model.tied=true max_grad_norm=0.05 ema=0.8",
}


@dataclass(frozen=True)
class Case:
    """A training under a strategy, and the numbers of ranks on which the matrix has it.

    Each text has overrides as on the command line, and names of PRESETS, separated by spaces. A
    later one overrides an earlier one.

        Case("scratch", "algorithm=ring", model="vit", settings="accumulate=2 clipped", ranks=(2,))

    Attributes:
        strategy: a name of conf/strategy/.
        options: of the strategy, without `strategy.`.
        model: a preset of a model, or `own=NAME` or `units=NAME` (`expanded`).
        task: a preset of a task.
        settings: other keys of the config, and other presets.
        ranks: numbers of ranks in `make test`.
        slow: numbers of ranks in `make test-slow`.
        extra: numbers of ranks in `make test-extra`: a further number of a case that the other two
            have.
    """

    strategy: str
    options: str = ""
    model: str = ""
    task: str = ""
    settings: str = ""
    ranks: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()

    @classmethod
    @cache
    def of(cls, line: str) -> "Case":
        """Return the case of a line: a strategy, then what the texts of a case have, in any order.

        `str(case)` is such a line.
        """
        strategy, _, settings = line.partition(" ")
        return cls(strategy, settings=settings)

    def __str__(self) -> str:
        texts = (self.strategy, self.options, self.model, self.task, self.settings)
        return " ".join(text for text in texts if text)

    def __repr__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        filled = [f"{name}={value!r}" for name, value in values.items() if value]
        return f"Case({', '.join(filled)})"

    @cached_property
    def written(self) -> list[str]:
        """The overrides and presets after the strategy, as they are written."""
        return str(self).split()[1:]

    @cached_property
    def parts(self) -> frozenset[str]:
        """The overrides and presets after the strategy, with the overrides of the presets."""
        return frozenset([*self.written, *expanded(self.written)])

    @cached_property
    def choices(self) -> "Choices":
        """What the overrides choose, sorted by kind."""
        return choices_of(self.strategy, expanded(self.written))

    @property
    def in_float64(self) -> bool:
        """Whether it is computed in float64."""
        return "float64" in self.parts

    @property
    def other_start(self) -> bool:
        """Whether ranks other than 0 begin with other weights, which must not matter."""
        return "shifted" in self.parts

    def config(self) -> DictConfig:
        """Return the config with which train.py would train it."""
        choices = self.choices
        groups = {"data": "synthetic", **choices.groups}
        cfg = with_groups(*(f"{group}={option}" for group, option in groups.items())).copy()
        cfg.strategy = options_of(self.strategy)
        if choices.network is not None:
            make, channels, side = MODELS[choices.network]
            cfg.model = {
                "_target_": f"{make.__module__}.{make.__name__}",
                "init_std": None,
                "init": "default",
                "weights": None,
            }
            cfg.data.dataset.update(channels=channels, image_size=side)
        options = {f"strategy.{name}": value for name, value in choices.options.items()}
        for key, value in (options | choices.keys).items():
            OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=True)
        return cfg

    def reference(self) -> "Case":
        """Return the case of one device, without worker processes, whose results it must equal."""
        of_strategy = options_of(self.strategy).keys() - {"find_unused_parameters"}  # single's, too
        kept: list[str] = []
        for part in self.written:
            key = part.partition("=")[0]
            is_option = key.split(".")[0] in of_strategy
            if key not in INDEPENDENT_OF and key != "shifted" and not is_option:
                kept.append(part)
        return Case("single", settings=" ".join([*kept, "data.num_workers=0"]))

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        """Compute in float64 in the body, if the case says so."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if self.in_float64 else before)
        yield
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Choices:
    """What the overrides of a case choose.

    Attributes:
        options: of the strategy, by name, as YAML.
        groups: the chosen option of config groups, by name, for example {"task": "tokens"}.
        network: name of the model in MODELS; None: that of the groups.
        keys: values of other keys of the config, by name, as YAML.
    """

    options: dict[str, str]
    groups: dict[str, str]
    network: str | None
    keys: dict[str, str]


def choices_of(strategy: str, overrides: list[str]) -> Choices:
    """Return what overrides choose. A later one overrides an earlier one.

    What is no `key=value`, for example `float64`, chooses nothing in the config.
    """
    known = options_of(strategy)
    options: dict[str, str] = {}
    groups: dict[str, str] = {}
    keys: dict[str, str] = {}
    network = None
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            continue
        if key == "model" and value in MODELS:
            network = value
            groups.pop("model", None)
        elif key in GROUPS:
            groups[key] = value
            network = None if key == "model" else network
        elif key.split(".")[0] in known:
            options[key] = value
        else:
            keys[SHORT_NAMES.get(key, key)] = value
    return Choices(options, groups, network, keys)


def expanded(written: list[str]) -> list[str]:
    """Return overrides and presets with those of its presets in place of their names.

    `own=NAME` is a model of own_models.py, `units=NAME` one of unit_models.py in float64.
    """
    parts: list[str] = []
    for part in written:
        key, _, name = part.partition("=")
        if part in PRESETS:
            parts += expanded(PRESETS[part].split())
        elif key == "own":
            parts += ["model=own", f"model._target_=own_models.{name}"]
        elif key == "units":
            parts += ["model=own", f"model._target_=unit_models.{name}", "float64"]
        else:
            parts.append(part)
    return parts


@cache
def options_of(strategy: str) -> dict[str, Any]:
    """Return the options of a strategy: conf/, but four micro-batches and three buckets."""
    options = OmegaConf.to_container(OmegaConf.load(CONF / "strategy" / f"{strategy}.yaml"))
    if strategy == "single":
        options["find_unused_parameters"] = False  # conf/ does not list it
    changed = {"num_microbatches": 4, "bucket_mb": 1 / 64}
    return {key: changed.get(key, value) for key, value in options.items()}


@cache
def with_groups(*groups: str) -> DictConfig:
    """Return the config with these groups, and of BASE what it has keys for."""
    cfg = config(*groups)
    for word in BASE.split():
        key, _, value = word.partition("=")
        if OmegaConf.select(cfg, key) is not None:
            OmegaConf.update(cfg, key, yaml.safe_load(value))
    return cfg


def config_of(line: str) -> DictConfig:
    """Return the config with which train.py would train the case of a line."""
    return Case.of(line).config()


def reference_of(line: str) -> str:
    """Return the line of the case of one device whose results the case of a line must equal."""
    return str(Case.of(line).reference())
