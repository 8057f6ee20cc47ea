"""Predictions for the strategies and meshes that can be laid on some GPUs, from the config of a run."""

from collections.abc import Sequence
from functools import cached_property

from omegaconf import open_dict
from torch import nn

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.data.samples import Dataset
from ddp_lab.estimate.advice import Advice, Prediction, Refused
from ddp_lab.estimate.blocks import Tracer
from ddp_lab.estimate.cards import GiB
from ddp_lab.estimate.constants import Constants
from ddp_lab.estimate.footprint import Footprint, on_device
from ddp_lab.estimate.memory import Memory
from ddp_lab.estimate.planned import PlannedRuntime
from ddp_lab.estimate.schedule import step_time
from ddp_lab.estimate.step_time import Device, Links, StepTime
from ddp_lab.launch.command_line import compose_config
from ddp_lab.models.chain import Chain
from ddp_lab.models.make import Made
from ddp_lab.run.candidates import ALONE, Candidate, candidates, is_of_strategy, options_of, with_own, with_strategy
from ddp_lab.run.data_shape import sizes_of
from ddp_lab.run.job import Job
from ddp_lab.run.machine import Machine
from ddp_lab.run.places import places
from ddp_lab.run.planned_model import plan_model, reads_values
from ddp_lab.run.planned_rank import predict_rank
from ddp_lab.strategies.batch_norm import is_batch_norm
from ddp_lab.strategies.loss import build_loss
from ddp_lab.training.speed.auto import AUTO, SWITCHED, compile_seconds, earns_compiling


class Advisor:
    """Predicts memory and times of the strategies and meshes that a run can have.

    Args:
        overrides: of train.py; those of the strategy apply to the strategy that they, or their experiment, choose.
        config_dir: directory of the user's own yaml.
        machine: the GPUs.
        constants: of their card.
        job: a job of train.py, of which config, dataset and model are used in place of those of the overrides; or None.

    Raises:
        ConfigError: the overrides are wrong, whatever the strategy.
    """

    def __init__(
        self,
        overrides: Sequence[str],
        config_dir: str | None,
        machine: Machine,
        constants: Constants,
        job: Job | None = None,
    ):
        self.common = ["--config-dir", config_dir] if config_dir is not None else []
        self.common += [override for override in overrides if not is_of_strategy(override)]
        self.strategy = [override for override in overrides if is_of_strategy(override)]
        self.machine, self.constants, self.choice = machine, constants, "single"
        if job is not None:
            self.cfg, self.dataset, self.model = job.cfg, job.dataset, job.model
            return
        self.cfg = compose_config(list(overrides), config_dir, with_choices=True)
        self.choice = self.cfg.hydra.runtime.choices.strategy
        with open_dict(self.cfg):
            del self.cfg.hydra
        check(self.cfg)

    @cached_property
    def dataset(self) -> Dataset:
        """The dataset, of which the sizes are enough."""
        return sizes_of(self.cfg.data) or Job(self.cfg, PlannedRuntime(1, 1, self.cfg.precision)).dataset

    @cached_property
    def model(self) -> nn.Module:
        """The model, as `plan_model` returns it."""
        return plan_model(self.cfg, self.dataset)

    @cached_property
    def reads_values(self) -> bool:
        """Whether the host waits for values in the forward pass."""
        return reads_values(self.model, self.dataset)

    @cached_property
    def tracer(self) -> Tracer:
        mixed = self.cfg.mixup > 0 or self.cfg.cutmix > 0
        loss = build_loss(self.cfg.loss, len(self.dataset.classes), mixed)
        return Tracer(self.model, loss, self.dataset.train.shape, self.cfg.precision)

    def candidates(self) -> list[Candidate]:
        """Return all strategies, the user's own included, simple ones first."""
        per_node, gpus = self.machine.per_node, self.machine.gpus
        checkpointing = isinstance(self.model, Chain) and not any(map(is_batch_norm, self.model.modules()))
        found = list(candidates(gpus, per_node, checkpointing))
        return found if self.own is None else with_own(found, self.own)

    @cached_property
    def own(self) -> Candidate | None:
        """The strategy that the overrides or their experiment choose; None if it is the default, which is the first anyway."""
        if not self.strategy and self.choice == "single":
            return None
        return Candidate(self.choice, options_of(self.strategy), 1 if self.choice in ALONE else self.machine.gpus)

    def job(self, candidate: Candidate) -> Job:
        """Return the job of a candidate; its strategy, plan and partition are not decided yet."""
        cfg = self.cfg.copy() if candidate == self.own else with_strategy(self.cfg, candidate)
        if self.reads_values and cfg.cuda_graph == AUTO:
            cfg.cuda_graph = False  # train.py finds out when it tries
        alone = candidate.strategy in ALONE
        gpus = 1 if candidate.strategy == "single" else self.machine.per_node  # one process uses the GPUs of its machine
        free = int(self.machine.card.memory - self.constants.context)
        runtime = PlannedRuntime(candidate.ranks, self.machine.per_node, cfg.precision, gpus=gpus if alone else 1, free=free)
        job = Job(cfg, runtime, with_weights=False)
        job.dataset = self.dataset
        job.made = Made(self.model, None, [])
        return job

    def predict(self, candidate: Candidate) -> Prediction:
        """Return the prediction for a candidate.

        Raises:
            ConfigError: the strategy cannot be laid on the GPUs, or the model or the batch cannot be divided.
        """
        job = self.job(candidate)
        _ = job.plan
        job.partition()
        job.check_optimizer()
        strategy, plan, epochs, compiled = job.strategy, job.plan, job.cfg.epochs, job.options.compile
        memory, held, time = self._step(job, compiled not in (False, AUTO))
        if compiled == AUTO:
            layers = sum(any(True for _ in layer.parameters(recurse=False)) for layer in self.model.modules())
            steps, seconds = epochs * plan.steps_per_epoch, compile_seconds(layers, cached=False)
            compiled = earns_compiling(steps, time.total, seconds, job.cfg.precision).value
            if compiled:
                memory, held, time = self._step(job, True)
        chosen = {key: choice.value for key, choice in job.choices.items() if choice.automatic} | {"compile": compiled}
        return Prediction(
            candidate.overrides,
            strategy.num_devices,
            memory.total <= self.machine.card.memory,
            memory,
            held,
            min(candidate.ranks, self.machine.per_node) * (held.total - on_device(held, strategy.share(self.model, 0)).total),
            time,
            plan.global_batch_size / time.total,
            epochs * plan.steps_per_epoch * time.total * strategy.num_devices / 3600,
            self.machine.launch([*self.common, *self.overrides_of(candidate)], candidate.ranks),
            tuple(key for key in SWITCHED if job.choices[key].automatic and chosen[key] is True),
        )

    def overrides_of(self, candidate: Candidate) -> list[str]:
        """Return the Hydra overrides of a candidate: of the user's own as they were given."""
        return self.strategy if candidate == self.own and self.strategy else candidate.overrides

    def _step(self, job: Job, compiled: bool) -> tuple[Memory, Footprint, StepTime]:
        """Return the memory and the held bytes of the rank whose peak is highest, and the time of a step."""
        ranks = [predict_rank(job, rank, compiled, self.tracer, self.constants) for rank in places(job.strategy)]
        memory, held = max(((rank.memory, rank.held) for rank in ranks), key=lambda pair: pair[0].total)
        device = Device(self.machine.card, self.constants, job.options.cuda_graph, job.options.channels_last)
        return memory, held, step_time(job.strategy, [rank.passes for rank in ranks], device, self.links, job.cfg.accumulate)

    @property
    def links(self) -> Links:
        """The connections of the GPUs."""
        achieved = self.constants.link
        card, machine = self.machine.card, self.machine
        return Links(card.link * achieved, machine.between * achieved, machine.per_node, self.constants.latency)

    def advise(self) -> Advice:
        """Return the predictions for all candidates."""
        predictions, refused = list[Prediction](), list[Refused]()
        wanted = self.candidates()
        for candidate in wanted:
            try:
                predictions.append(self.predict(candidate))
            except ConfigError as error:
                refused.append(Refused(candidate.overrides, str(error)))
        return Advice(
            self.head(), self.machine.card.memory, predictions, refused, self.own and self.own.overrides, self.notes()
        )

    def notes(self) -> list[str]:
        """Return lines about what the predictions, which must have been made, leave out."""
        blocks = self.tracer.not_compiled
        reason = next(iter(blocks.values()), "")
        notes = [f"compiled, but predicted as in eager mode: {', '.join(blocks)} ({reason})"] if blocks else []
        batch = self.cfg.batch_size * (self.machine.gpus if self.cfg.scaling == "weak" else 1)
        if batch > (most := self.dataset.train.size):
            notes.append(
                f"batches of {batch:,} are predicted, but the dataset has {most:,} samples: real steps are smaller and faster"
            )
        return notes

    def head(self) -> list[str]:
        """Return lines that describe the run, the GPUs and the constants."""
        cfg, card, machine = self.cfg, self.machine.card, self.machine
        parameters = sum(tensor.numel() for tensor in self.model.parameters())
        nodes = f" on each of {machine.nodes} machines" if machine.nodes > 1 else ""
        images = "x".join(map(str, self.dataset.train.shape))
        return [
            f"{machine.per_node} x {card.name} ({card.memory / GiB:.1f} GiB){nodes}; {parameters:,} parameters, "
            f"images {images}, batch_size={cfg.batch_size}, {cfg.precision}",
            f"Predictions, from data sheets and constants ({self.constants.source}). GiB: peak memory of a GPU",
        ]
