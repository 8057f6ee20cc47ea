"""The strategies that a run can have on some devices, their plans, and which of them is recommended."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from hydra.utils import get_object
from omegaconf import DictConfig, open_dict
from torch import nn

from ddp_lab.advise.plan import CONTEXT, CannotPlan, Planned, plan_ranks
from ddp_lab.advise.planned import PlannedRuntime, plan_model
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.samples import Dataset
from ddp_lab.launch.command_line import compose_config
from ddp_lab.models.chain import Chain
from ddp_lab.models.torchvision_models import torchvision_model
from ddp_lab.models.weights import check_file
from ddp_lab.run.data_shape import sizes_of
from ddp_lab.run.job import Job
from ddp_lab.strategies.batch_norm import is_batch_norm

GiB, TERA, GB = 2**30, 1e12, 1e9
RULE = "the simplest that fits and uses all GPUs, in the order of the table"


class Card(NamedTuple):
    """A GPU: peaks of its data sheet, without sparsity, which no program reaches; the memory is what torch reports.

    Attributes:
        memory: GiB.
        tf32, bf16: TFLOP/s of matrix multiplications and convolutions.
        link: GB/s that it can send to the other GPUs of its machine by NVLink, else PCIe.
    """

    memory: float
    tf32: float
    bf16: float
    link: float


CARDS = {
    "B200": Card(178.4, 1125, 2250, 900),
    "H200": Card(139.8, 494, 989, 450),
    "H100": Card(79.1, 494, 989, 450),
    "A100-80": Card(79.1, 156, 312, 300),
    "A100-40": Card(39.4, 156, 312, 300),
    "L40S": Card(44.4, 183, 362, 32),
    "L4": Card(22.0, 60, 121, 32),
    "A10": Card(22.0, 62.5, 125, 32),
    "RTX4090": Card(23.5, 82.6, 165, 32),
    "RTX3090": Card(23.6, 35.6, 71, 32),
}


@dataclass(frozen=True)
class Devices:
    """The devices of a launch.

    Attributes:
        name: of the card; "CPU ranks".
        per_node, nodes: number of devices of each machine, and of machines.
        memory: bytes of a device; infinite if it is not known.
        card: what the data sheet says; None for CPUs and unknown cards.
        between: bytes per second that a device can send to another machine.
        kind: "cuda" or "cpu".
    """

    name: str
    per_node: int
    nodes: int
    memory: float
    card: Card | None
    between: float
    kind: str = "cuda"

    @property
    def number(self) -> int:
        return self.per_node * self.nodes

    def peak(self, precision: str) -> float | None:
        """Return the FLOP/s of a card."""
        return self.card and TERA * (self.card.bf16 if precision == "bf16" else self.card.tf32)

    def crosses(self, ranks: Iterable[int]) -> bool:
        """Return whether a group has ranks on several machines."""
        return len({rank // self.per_node for rank in ranks}) > 1

    def bound(self, plans: Iterable[Planned], precision: str) -> float | None:
        """Return the seconds that a step takes at least: FLOPs / the card's peak, or bytes / the link."""
        if self.card is None:
            return None
        peak, most = self.peak(precision) or 1.0, 0.0
        for plan in plans:
            across = sum(sent for group, sent in plan.sent.items() if self.crosses(group.ranks))
            inside = sum(plan.sent.values()) - across
            most = max(most, plan.flops / peak, inside / (GB * self.card.link), across / self.between)
        return most

    def launch(self, overrides: list[str], ranks: int) -> str:
        """Return the command line of a run."""
        if ranks == 1:
            return f"ddp-lab train {shlex.join(overrides)}"
        several = f"--nnodes={self.nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500"
        where = several if self.nodes > 1 else "--standalone"
        return f"torchrun {where} --nproc_per_node={self.per_node} -m ddp_lab {shlex.join(overrides)}"


def find_devices(text: str, nodes: int = 1, link: float = 50) -> Devices:
    """Return the devices that the command line names.

    Args:
        text: "here", number and card such as "2xH100", or number of CPU ranks such as "4xcpu".
        nodes: number of machines.
        link: GB/s that a device can send to another machine.

    Raises:
        ConfigError: the card is unknown, or there is none here.
    """
    names = {name.lower(): name for name in CARDS}
    if text == "here":
        if not torch.cuda.is_available():
            raise ConfigError(f"--gpus here: there is no GPU here. Use 2xcpu, or a number and a card of {', '.join(CARDS)}")
        name, memory = torch.cuda.get_device_name(), torch.cuda.mem_get_info()[1]
        return Devices(name, torch.cuda.device_count(), nodes, memory, card_called(name), link * GB)
    found = re.fullmatch(r"([1-9]\d{0,3})x(.+)", text)
    if found is None or found[2].lower() not in (*names, "cpu"):
        raise ConfigError(
            f"--gpus {text}: must be here, or a number up to 9999 and a card such as 2xH100. Cards: {', '.join(CARDS)}, cpu. "
            "For another card, use one that has about as much memory and bandwidth"
        )
    if found[2].lower() == "cpu":
        return Devices("CPU ranks", int(found[1]), nodes, float("inf"), None, link * GB, "cpu")
    card = CARDS[names[found[2].lower()]]
    return Devices(names[found[2].lower()], int(found[1]), nodes, card.memory * GiB, card, link * GB)


def card_called(name: str) -> Card | None:
    """Return the card that torch calls `name`, for example "NVIDIA H200"; None if it is unknown."""
    words = re.split(r"[ -]", name.replace("RTX ", "RTX"))
    return next((card for key, card in CARDS.items() if key.partition("-")[0] in words), None)


def candidates(number: int, one_machine: bool, checkpointing: bool) -> list[list[str]]:
    """Return the overrides of the strategies for a number of devices, simple ones first.

    Whether the model allows them, the strategies decide. `checkpointing`: whether activations can be recomputed by block.
    """
    saving = ["strategy.checkpoint_activations=block"] if checkpointing else []
    found = [["strategy=single"]]
    if number > 1:
        found += [["strategy=ddp"], ["strategy=fsdp"]]
    if saving:
        found.append(["strategy=fsdp", *saving])
    if number > 1:
        found += [["strategy=pipeline"], ["strategy=scratch"], *([["strategy=split"]] if one_machine else [])]
    if number % 2 == 0:
        found += [["strategy=ddp_pipeline", "strategy.pp=2"]] if number > 2 else []
        found.append(["strategy=tp", "strategy.tp=2"])
        found += [["strategy=mesh", option] for option in ("strategy.tp=2", "strategy.pp=2") if number > 2]
    return [*found, ["strategy=fsdp", "strategy.offload=true", *saving]]


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
        bound: seconds that a step takes at least on GPUs; None where no peak is known.
        fits: whether the fullest device has the memory.
        launch: the command line.
        measured: what a measurement found, by name (measure.py).
    """

    overrides: list[str]
    plans: list[Planned]
    devices: int
    ranks: int
    images: int
    bound: float | None
    fits: bool
    launch: str
    measured: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return name_of(self.overrides)

    @property
    def fullest(self) -> Planned:
        return max(self.plans, key=lambda plan: plan.total)


@dataclass
class Advisor:
    """The strategies of a run, their plans, and the recommendation.

    Attributes:
        cfg, dataset, model: of the run; the sizes of the dataset are enough.
        devices: of the launch.
        common: arguments of train.py that do not concern the strategy.
        own: overrides of the strategy that the user has chosen; [] if it is the default.
        rows: the plans, the simplest strategies first.
        refused: why a strategy cannot be laid out or planned, by name.
        notes: lines about what the plans leave out.
    """

    cfg: DictConfig
    dataset: Dataset
    model: nn.Module
    devices: Devices
    common: list[str]
    own: list[str] = field(default_factory=list[str])
    rows: list[Row] = field(default_factory=list[Row])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])

    @classmethod
    def of(cls, overrides: Sequence[str], config_dir: str | None, devices: Devices) -> "Advisor":
        """Return the advisor of a command line of train.py. Overrides of the strategy apply to the one that is chosen.

        Raises:
            ConfigError: the overrides are wrong, whatever the strategy.
        """
        cfg = compose_config(list(overrides), config_dir, with_choices=True)
        choice = cfg.hydra.runtime.choices.strategy
        with open_dict(cfg):
            del cfg.hydra
        check(cfg)
        if cfg.device not in ("auto", devices.kind) or cfg.strategy.get("devices"):
            raise ConfigError("device and strategy.devices: plans are made for all devices that --gpus names; leave them out")
        if (weights := cfg.model.get("weights")) and get_object(cfg.model["_target_"]) is not torchvision_model:
            check_file(weights)
        dataset = sizes_of(cfg.data) or Job(cfg, PlannedRuntime(1, 1, cfg.precision)).dataset
        of_strategy = [override for override in overrides if re.match(r"(\+\+?|~)?strategy[.=]", override)]
        common = ["--config-dir", config_dir] if config_dir is not None else []
        common += [override for override in overrides if override not in of_strategy]
        own = of_strategy or ([] if choice == "single" else [f"strategy={choice}"])
        return cls(cfg, dataset, plan_model(cfg, dataset), devices, common, own)

    def candidates(self) -> list[list[str]]:
        """Return the overrides of the strategies, simple ones first; the user's own one in its place, or the last."""
        checkpointing = isinstance(self.model, Chain) and not any(map(is_batch_norm, self.model.modules()))
        found = candidates(self.devices.number, self.devices.nodes == 1, checkpointing)
        found = [self.own if {*each} == {*self.own} else each for each in found]
        return found if not self.own or self.own in found else [*found, self.own]

    def plan(self, overrides: list[str]) -> Row:
        """Return the plan of a strategy.

        Raises:
            ConfigError: the strategy cannot be laid on the devices, or the model or the batch cannot be divided.
            CannotPlan: a step needs values.
        """
        devices, cfg = self.devices, self.cfg.copy()
        if overrides != self.own:
            cfg.strategy = compose_config(overrides, None).strategy
        alone = get_object(cfg.strategy["_target_"]).one_process
        ranks = 1 if alone else devices.number
        free = int(devices.memory - CONTEXT) if devices.memory < float("inf") else 0

        def runtime(rank: int) -> PlannedRuntime:
            gpus = devices.per_node if alone and devices.kind == "cuda" else 1
            return PlannedRuntime(ranks, devices.per_node, cfg.precision, rank, gpus, free, devices.kind)

        job, plans = plan_ranks(cfg, self.dataset, self.model, runtime)
        used = job.strategy.num_devices if ranks > 1 else len(plans)
        fits = max(plan.total for plan in plans) <= devices.memory
        bound, launch = devices.bound(plans, cfg.precision), devices.launch([*self.common, *overrides], ranks)
        return Row(overrides, plans, used, ranks, job.plan.global_batch_size, bound, fits, launch)

    def advise(self) -> "Advisor":
        """Plan all candidates, and return this advisor.

        Raises:
            ConfigError: no strategy can be planned.
        """
        for overrides in self.candidates():
            try:
                self.rows.append(self.plan(overrides))
            except ConfigError as error:
                self.refused[name_of(overrides)] = str(error)
            except CannotPlan as error:
                self.refused[name_of(overrides)] = f"cannot be planned: {error}"
        if not self.rows:
            name = name_of(self.own) if self.own else next(iter(self.refused))
            raise ConfigError(f"no strategy can be planned on these devices. {name}: {self.refused[name]}")
        if (images := max(row.images for row in self.rows)) > self.dataset.train.size:
            size = self.dataset.train.size
            self.notes.append(f"batches of {images:,} are planned, but the dataset has {size:,} samples: real steps are smaller")
        return self

    @property
    def ranked(self) -> list[Row]:
        """The strategies that fit, the recommended one first: the fastest measured, else the simplest that uses all devices."""
        fitting = [row for row in self.rows if row.fits]
        return sorted(fitting, key=lambda row: (-row.measured.get("images_per_second", 0), -row.devices))

    @property
    def conclusion(self) -> str:
        """The recommendation with its rule, and the line to paste."""
        if not self.ranked:
            least = min(self.rows, key=lambda row: row.fullest.total)
            short = (least.fullest.total - self.devices.memory) / GiB
            return f"Nothing fits: {least.name} needs the least and lacks {short:,.1f} GiB. {REMEDY}"
        best = self.ranked[0]
        rule = "the fastest that was measured" if best.measured else RULE
        return f"Recommended: {best.name}, {rule}\n  {best.launch}"


REMEDY = "Use more or larger GPUs, a smaller batch_size, or accumulate=N"
