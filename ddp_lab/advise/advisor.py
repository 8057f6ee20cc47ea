"""The plans of the strategies that a run can have, and which of them is recommended."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, open_dict
from torch import nn

from ddp_lab.advise.candidates import ALONE, Candidate, candidates, is_of_strategy, options_of, with_own, with_strategy
from ddp_lab.advise.machine import GiB, Machine
from ddp_lab.advise.model import plan_model
from ddp_lab.advise.plan import CONTEXT, CannotPlan, Planned, plan_rank
from ddp_lab.advise.planned import PlannedRuntime
from ddp_lab.config.build import build
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError, listed
from ddp_lab.data.dataset import Dataset
from ddp_lab.data.datasets import dataset_sizes
from ddp_lab.launch.command_line import compose_config
from ddp_lab.models.chain import Chain
from ddp_lab.models.torchvision_models import torchvision_model
from ddp_lab.models.weights import check_file
from ddp_lab.run.job import load_dataset, make_plan
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.batch_norm import is_batch_norm

MOST_STAGES = 8  # of a pipeline whose ranks are planned; of more, the first and last ones and some between
RULE = "the simplest that fits and uses all GPUs, in the order of the table"


@dataclass
class Row:
    """The plan of a strategy.

    Attributes:
        overrides: of train.py, which choose it.
        plans: of the ranks, or the devices, that differ.
        devices, ranks: number of devices in use, and of processes.
        images: in a global batch.
        memory: bytes of a GPU; infinite if it is not known.
        bound: seconds that a step takes at least on GPUs; None on CPUs.
        launch: the command line.
        measured: what a measurement found, by name (measure.py).
    """

    overrides: list[str]
    plans: list[Planned]
    devices: int
    ranks: int
    images: int
    memory: float
    bound: float | None
    launch: str
    measured: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return name_of(self.overrides)

    @property
    def fullest(self) -> Planned:
        return max(self.plans, key=lambda plan: plan.total)

    @property
    def fits(self) -> bool:
        return self.fullest.total <= self.memory


@dataclass(frozen=True)
class Refused:
    """A strategy that the model, the batch or the GPUs do not allow, or that cannot be planned."""

    overrides: list[str]
    reason: str

    @property
    def name(self) -> str:
        return name_of(self.overrides)


@dataclass
class Advice:
    """The plans for a run.

    Attributes:
        head: lines that describe the run and the GPUs.
        machine: the GPUs.
        rows: the simplest strategies first.
        refused: what cannot be laid on the GPUs or planned.
        own: overrides of the user's own strategy; None if it is the default.
        notes: lines about what the plans leave out.
    """

    head: list[str]
    machine: Machine
    rows: list[Row]
    refused: list[Refused]
    own: list[str] | None
    notes: list[str]

    @property
    def ranked(self) -> list[Row]:
        """The strategies that fit, the recommended one first: the fastest measured, else the simplest that uses all GPUs."""
        fitting = [row for row in self.rows if row.fits]
        measured = [row for row in fitting if "images_per_second" in row.measured]
        if measured:
            measured.sort(key=lambda row: -row.measured["images_per_second"])
            return [*measured, *(row for row in fitting if row not in measured)]
        return sorted(fitting, key=lambda row: -row.devices)

    @property
    def conclusion(self) -> str:
        """The recommendation with its rule, and the line to paste."""
        if not self.ranked:
            least = min(self.rows, key=lambda row: row.fullest.total)
            short = (least.fullest.total - least.memory) / GiB
            return (
                f"Nothing fits: {least.name} needs the least and lacks {short:,.1f} GiB. Use more or larger GPUs, a smaller "
                "batch_size, or accumulate=N"
            )
        best = self.ranked[0]
        rule = "the fastest that was measured" if best.measured else RULE
        return f"Recommended: {best.name}, {rule}\n  {best.launch}"


class Advisor:
    """Plans the strategies and meshes that a run can have.

    Args:
        overrides: of train.py; those of the strategy apply to the strategy that they, or their experiment, choose.
        config_dir: directory of the user's own yaml.
        machine: the GPUs.
        known: config, dataset and model of a run, in place of those of the overrides; or None.

    Raises:
        ConfigError: the overrides are wrong, whatever the strategy.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        config_dir: str | None,
        machine: Machine,
        known: tuple[DictConfig, Dataset, nn.Module] | None = None,
    ):
        self.common = ["--config-dir", config_dir] if config_dir is not None else []
        self.common += [override for override in overrides if not is_of_strategy(override)]
        self.strategy = [override for override in overrides if is_of_strategy(override)]
        self.machine = machine
        self.own: Candidate | None = None
        if known is not None:
            self.cfg, self.dataset, self.model = known
            return
        self.cfg = compose_config(list(overrides), config_dir, with_choices=True)
        choice = self.cfg.hydra.runtime.choices.strategy
        with open_dict(self.cfg):
            del self.cfg.hydra
        check(self.cfg)
        self._refuse_devices()
        self.dataset: Dataset = dataset_sizes(self.cfg.data) or load_dataset(self.cfg, PlannedRuntime(1, 1, self.cfg.precision))
        self.model: nn.Module = plan_model(self.cfg, self.dataset)
        if self.strategy or choice != "single":  # single is the first anyway
            self.own = Candidate(choice, options_of(self.strategy), 1 if choice in ALONE else machine.gpus)

    def _refuse_devices(self) -> None:
        cfg, kind = self.cfg, self.machine.kind
        if cfg.device not in ("auto", kind):
            raise ConfigError(f"device={cfg.device}: plans are made for all devices that --gpus names; leave it out")
        if devices := cfg.strategy.get("devices"):
            raise ConfigError(f"strategy.devices={listed(devices)}: all GPUs that --gpus names are planned; leave it out")
        if (weights := cfg.model.get("weights")) and get_object(cfg.model["_target_"]) is not torchvision_model:
            check_file(weights)

    def candidates(self, everything: bool = False) -> list[Candidate]:
        """Return the strategies, the user's own included, simple ones first."""
        checkpointing = isinstance(self.model, Chain) and not any(map(is_batch_norm, self.model.modules()))
        found = list(candidates(self.machine.gpus, self.machine.per_node, checkpointing, everything))
        return found if self.own is None else with_own(found, self.own)

    def config_of(self, candidate: Candidate) -> DictConfig:
        """Return the config of a candidate."""
        return self.cfg.copy() if candidate == self.own else with_strategy(self.cfg, candidate)

    def overrides_of(self, candidate: Candidate) -> list[str]:
        """Return the Hydra overrides of a candidate: of the user's own as they were given."""
        return self.strategy if candidate == self.own and self.strategy else candidate.overrides

    def overrides_of_row(self, row: Row) -> list[str]:
        """Return the Hydra overrides of a planned strategy."""
        return self.strategy if self.own and self.strategy and row.overrides == self.own.overrides else row.overrides

    @property
    def peak(self) -> float | None:
        """FLOP/s of the card in the precision of the run; None on CPUs."""
        card = self.machine.card
        return card and (card.bf16 if self.cfg.precision == "bf16" else card.tf32)

    def runtime(self, candidate: Candidate, rank: int = 0) -> PlannedRuntime:
        """Return the runtime of a rank of a candidate's launch."""
        machine = self.machine
        gpus = machine.per_node if candidate.strategy in ALONE and candidate.strategy != "single" else 1
        free = int(machine.card.memory - CONTEXT) if machine.card else 0
        return PlannedRuntime(candidate.ranks, machine.per_node, self.cfg.precision, rank, gpus, free, machine.kind)

    def plan(self, candidate: Candidate) -> Row:
        """Return the plan of a candidate.

        Raises:
            ConfigError: the strategy cannot be laid on the GPUs, or the model or the batch cannot be divided.
            CannotPlan: a step needs values.
        """
        if candidate.strategy == "dp":
            raise CannotPlan("nn.DataParallel copies the model to every GPU in every step; use strategy=ddp")
        cfg = self.config_of(candidate)
        strategy: Strategy = build(cfg.strategy, self.runtime(candidate))
        images = make_plan(cfg, strategy, self.dataset).global_batch_size
        plans = [
            plan
            for rank in places(strategy)
            for plan in plan_rank(cfg, self.dataset, self.model, self.runtime(candidate, rank))
        ]
        return Row(
            candidate.overrides,
            plans,
            strategy.num_devices if candidate.ranks > 1 else len(plans),
            candidate.ranks,
            images,
            self.machine.card.memory if self.machine.card else float("inf"),
            self.bound(plans),
            self.machine.launch([*self.common, *self.overrides_of(candidate)], candidate.ranks),
        )

    def bound(self, plans: Iterable[Planned]) -> float | None:
        """Return the seconds that a step takes at least: of computing at the card's peak, or of sending over its links."""
        machine, card = self.machine, self.machine.card
        if card is None:
            return None
        peak, most = self.peak or 1.0, 0.0
        for plan in plans:
            across = sum(sent for group, sent in plan.sent.items() if machine.crosses(group.ranks))
            inside = sum(plan.sent.values()) - across
            most = max(most, plan.flops / peak, inside / card.link, across / machine.between)
        return most

    def advise(self, everything: bool = False) -> Advice:
        """Return the plans of all candidates.

        Args:
            everything: whether to plan every mesh.

        Raises:
            ConfigError: no strategy can be planned.
        """
        rows, refused = list[Row](), list[Refused]()
        for candidate in self.candidates(everything):
            try:
                rows.append(self.plan(candidate))
            except ConfigError as error:
                refused.append(Refused(candidate.overrides, str(error)))
            except CannotPlan as error:
                refused.append(Refused(candidate.overrides, f"cannot be planned: {error}"))
        if not rows:
            first = next((each for each in refused if self.own and each.overrides == self.own.overrides), refused[0])
            raise ConfigError(f"no strategy can be planned on these devices. {first.name}: {first.reason}")
        return Advice(self.head(), self.machine, rows, refused, self.own and self.own.overrides, self.notes())

    def head(self) -> list[str]:
        """Return lines that describe the run and the GPUs."""
        cfg, machine = self.cfg, self.machine
        parameters = sum(tensor.numel() for tensor in self.model.parameters())
        nodes = f" on each of {machine.nodes} machines" if machine.nodes > 1 else ""
        images = "x".join(map(str, self.dataset.train.shape))
        card = f"{machine.card.name} ({machine.card.memory / GiB:.1f} GiB)" if machine.card else "CPU ranks"
        return [
            f"{machine.per_node} x {card}{nodes}; {parameters:,} parameters, images {images}, batch_size={cfg.batch_size}, "
            f"{cfg.precision}",
            "Planned by real steps on fake tensors. Memory is that of eager execution, at least what a compiled step needs; "
            "copies: what a warm-up or a capture restores.",
        ]

    def notes(self) -> list[str]:
        """Return lines about what the plans leave out."""
        batch = self.cfg.batch_size * (self.machine.gpus if self.cfg.scaling == "weak" else 1)
        if batch > (most := self.dataset.train.size):
            return [f"batches of {batch:,} are planned, but the dataset has {most:,} samples: real steps are smaller"]
        return []


def places(strategy: Strategy) -> list[int]:
    """Return the ranks to plan: one of each stage of a pipeline, with the first shard, which is the largest; else rank 0."""
    names, sizes = list(strategy.axes), list(strategy.axes.values())
    if strategy.one_process or "pp" not in names:
        return [0]
    stride = 1
    for size in sizes[names.index("pp") + 1 :]:
        stride *= size
    stages = strategy.axes["pp"]
    chosen = range(stages) if stages <= MOST_STAGES else sorted({*range(4), stages // 2, *range(stages - 3, stages)})
    return [stage * stride for stage in chosen]


def name_of(overrides: list[str]) -> str:
    """Return the strategy and its options, without the word strategy."""
    return " ".join(override.removeprefix("+").removeprefix("strategy")[1:] for override in overrides)
