"""The strategies that a run can have on devices, their plans, and which of them is recommended."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ddp_lab.advise.devices import CARDS, GB, Devices, GiB
from ddp_lab.advise.plan import (
    CONTEXT,
    CannotPlan,
    DeviceEstimate,
    dataset_sizes,
    model_to_plan,
    plan_rank,
    ranks_to_plan,
)
from ddp_lab.advise.tp_prediction import predict
from ddp_lab.config.build import Config, construct, find_target
from ddp_lab.config.change import remove, text_without
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.dataset import Dataset
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.models.chain import Chain
from ddp_lab.run.build import make_sizes, make_task
from ddp_lab.run.build_data import load_dataset
from ddp_lab.run.model_trial import make_trial
from ddp_lab.strategies.batch_norm import is_batch_norm
from ddp_lab.world.planned import PlannedRuntime

REMEDY = "Use more or larger GPUs, a smaller batch_size, or accumulate=N"


def name_of(overrides: Iterable[str]) -> str:
    """Return the strategy and its options, without the word strategy."""
    return " ".join(re.sub(r"^\+*strategy.", "", override) for override in overrides)


@dataclass
class Row:
    """The plan of a strategy.

    Attributes:
        overrides: of train.py, which choose it.
        plans: of the ranks, or the devices, that differ.
        devices, ranks: number of devices in use, and of processes.
        images: in a global batch.
        fits: whether the fullest device has the memory.
        bound: seconds that a step takes at least: FLOPs / the card's peak, or bytes / the link;
            None where they are not known.
        launch: the command line.
        measured: what a measurement found, by name (measure.py).
    """

    overrides: list[str]
    plans: list[DeviceEstimate]
    devices: int
    ranks: int
    images: int
    fits: bool
    bound: float | None
    launch: str
    measured: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return name_of(self.overrides)

    @property
    def fullest(self) -> DeviceEstimate:
        return max(self.plans, key=lambda plan: plan.total)


@dataclass
class Advisor:
    """The strategies of a run, their plans, and the recommendation.

    Attributes:
        cfg, dataset, model: of the run; the sizes of the dataset are enough.
        devices: of the launch.
        free: bytes of a GPU that are free before the run, on which speed=auto depends.
        common: arguments of train.py that do not concern the strategy.
        chosen: overrides of the strategy that the user has chosen; [] if it is the default.
        rows: the plans, the simplest strategies first.
        notes: lines about the plans, and why a strategy has none.
    """

    cfg: Config
    dataset: Dataset
    model: nn.Module
    devices: Devices
    free: int
    common: list[str]
    chosen: list[str] = field(default_factory=list[str])
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, overrides: Sequence[str], config_dir: str | None, devices: Devices) -> "Advisor":
        """Return the advisor of a command line of train.py.

        Overrides of the strategy apply to the one that is chosen.

        Raises:
            ConfigError: the overrides are wrong, whatever the strategy.
        """
        cfg = compose_config(list(overrides), config_dir, with_choices=True)
        choice = cfg.hydra.runtime.choices.strategy
        remove(cfg, "hydra")
        check(cfg)
        if cfg.device not in ("auto", devices.kind) or cfg.strategy.get("devices"):
            raise ConfigError(
                "device and strategy.devices: plans are made for all devices that --gpus names; "
                "leave them out"
            )

        if auto := [key for key in ("batch_size", "accumulate") if cfg[key] == "auto"]:
            raise ConfigError(
                f"{auto[0]}=auto: is chosen when training starts; use a number for plans"
            )

        dataset = dataset_sizes(cfg.data) or load_dataset(cfg, PlannedRuntime(1, 1, cfg.precision))
        of_strategy = [
            override for override in overrides if re.match(r"(\+\+?|~)?strategy[.=]", override)
        ]
        common = ["--config-dir", config_dir] if config_dir is not None else []
        common += [override for override in overrides if override not in of_strategy]
        own_overrides = of_strategy or ([] if choice == "single" else [f"strategy={choice}"])
        free = int(devices.memory - CONTEXT) if devices.memory < float("inf") else 0
        trial = make_trial(dataset, make_task(cfg, dataset))
        model = model_to_plan(cfg.model, dataset.model_shape(), cfg.precision, cfg.seed, trial)
        return cls(
            cfg=cfg,
            dataset=dataset,
            model=model,
            devices=devices,
            free=free,
            common=common,
            chosen=own_overrides,
        )

    @property
    def batch_size(self) -> int:
        """Samples of the GLOBAL batch, of the config."""
        return self.cfg.batch_size

    @property
    def precision(self) -> str:
        """The number format of the run."""
        return self.cfg.precision

    @property
    def run_text(self) -> str:
        """The run as YAML, without its strategy."""
        return text_without(self.cfg, ["strategy"])

    def candidates(self) -> list[list[str]]:
        """Return the overrides of the strategies, simple ones first.

        The user's own one is in its place, or the last.

        Whether the model allows them, the strategies decide.
        """
        number = self.devices.number
        pair = self.devices.number % 2 == 0
        by_block = isinstance(self.model, Chain) and not any(
            map(is_batch_norm, self.model.modules())
        )
        saving = ["checkpoint_activations=block"] * by_block
        possible = [
            (True, ["strategy=single"]),
            (number > 1, ["strategy=ddp"]),
            (number > 1, ["strategy=fsdp"]),
            (by_block, ["strategy=fsdp", *saving]),
            (number > 1, ["strategy=pipeline"]),
            (number > 1, ["strategy=scratch"]),
            (number > 1 and self.devices.nodes == 1, ["strategy=split"]),
            (pair, ["strategy=tp", "strategy.tp=2"]),
            (pair and number > 2, ["strategy=ddp_pipeline", "strategy.pp=2"]),
            (pair and number > 2, ["strategy=mesh", "strategy.tp=2"]),
        ]
        fitting = [
            self.chosen if {*each} == {*self.chosen} else each for fits, each in possible if fits
        ]
        return fitting if not self.chosen or self.chosen in fitting else [*fitting, self.chosen]

    def plan(self, overrides: list[str]) -> Row:
        """Return the plan of a strategy.

        Raises:
            ConfigError: the strategy cannot be laid on the devices, or the model or the batch
                cannot be divided.
            CannotPlan: a step needs values.
        """
        devices = self.devices
        cfg = self.cfg.copy()
        if overrides != self.chosen:
            composed = compose_config(overrides, None)
            for override in overrides:
                key = override.partition("=")[0].partition(".")[0]
                cfg[key] = composed[key]
        alone = find_target("strategy._target_", cfg.strategy["_target_"]).one_process
        ranks = 1 if alone else devices.number
        gpus = devices.per_node if alone and devices.kind == "cuda" else 1
        runtime = PlannedRuntime(ranks, devices.per_node, cfg.precision, gpus, devices.kind)
        runtime.free = self.free
        strategy = construct("strategy", cfg.strategy, runtime)
        plans = list[DeviceEstimate]()
        sizes = make_sizes(cfg, strategy, self.dataset)
        images = sizes.global_batch_size

        for rank in ranks_to_plan(strategy):
            plans += plan_rank(cfg, self.dataset, self.model, runtime.of_rank(rank))
        if devices.card is not None:
            prediction = predict(
                self.model, strategy, sizes.samples_at_once, cfg.precision, devices.card
            )
            if prediction is not None:
                self.notes.append(f"{name_of(overrides)}: {prediction}")

        return Row(
            overrides,
            plans,
            devices=strategy.num_devices if ranks > 1 else len(plans),
            ranks=ranks,
            images=images,
            fits=max(plan.total for plan in plans) <= devices.memory,
            bound=self.bound(plans),
            launch=devices.launch([*self.common, *overrides], ranks),
        )

    def bound(self, plans: Iterable[DeviceEstimate]) -> float | None:
        """Return the seconds that a step takes at least; None if the devices' peak is not known."""
        devices = self.devices
        peak = self.devices.peak(self.precision)
        if devices.card is None or peak is None:
            return None
        most = 0.0
        link = CARDS[devices.card][3] * GB
        for plan in plans:
            across = sum(sent for group, sent in plan.sent.items() if devices.crosses(group.ranks))
            inside = sum(plan.sent.values()) - across
            most = max(most, plan.flops / peak, inside / link, across / devices.between)
        return most

    def advise(self) -> "Advisor":
        """Plan all candidates, and return this advisor.

        Raises:
            ConfigError: no strategy can be planned.
        """
        refused: dict[str, str] = {}
        for overrides in self.candidates():
            try:
                self.rows.append(self.plan(overrides))
            except (ConfigError, CannotPlan) as error:
                refused[name_of(overrides)] = str(error).removeprefix(f"{overrides[0]}: ")

        own_name = name_of(self.chosen)
        if not self.rows:
            name = own_name or next(iter(refused))
            raise ConfigError(
                f"no strategy can be planned on these devices. {name}: {refused[name]}"
            )

        for name, reason in refused.items():  # of what nobody chose the first sentence
            self.notes.append(
                f"not in the table: {name}: {reason if name == own_name else reason.split('. ')[0]}"
            )
        return self

    @property
    def ranked(self) -> list[Row]:
        """The strategies that fit, the recommended one first.

        It is the fastest measured, else the simplest that uses all devices.
        """
        fitting = [row for row in self.rows if row.fits]
        return sorted(
            fitting, key=lambda row: (-row.measured.get("images_per_second", 0), -row.devices)
        )

    @property
    def conclusion(self) -> str:
        """The recommendation with its rule, and the line to paste."""
        if not self.ranked:
            least = min(self.rows, key=lambda row: row.fullest.total)
            short = (least.fullest.total - self.devices.memory) / GiB
            return (
                f"Nothing fits: {least.name} needs the least and lacks {short:,.1f} GiB. {REMEDY}"
            )
        best = self.ranked[0]
        simplest = "the simplest that fits and uses all GPUs, in the order of the table"
        rule = "the fastest that was measured" if best.measured else simplest
        return f"Recommended: {best.name}, {rule}\n  {best.launch}"
