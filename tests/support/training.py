"""Short training runs under any strategy, to compare the results of strategies (case.py)."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from case import Case, config_of
from image_folders import write_folder
from omegaconf import DictConfig
from torch import nn
from torch.distributed.tensor import DTensor

from ddp_lab.checkpoints.checkpoints import Checkpoints
from ddp_lab.checkpoints.state import State, content_of, gather_full_state, merge
from ddp_lab.config.types import Every
from ddp_lab.data.loader import Loader
from ddp_lab.models.chain import Chain
from ddp_lab.models.initial_weights import InitialWeights
from ddp_lab.observe.logger import Logger
from ddp_lab.run.build import build
from ddp_lab.run.job import Job
from ddp_lab.speed.fastest import build_step
from ddp_lab.strategies.base import Strategy
from ddp_lab.strategies.dtensor import local
from ddp_lab.training.hooks import Hook, Run
from ddp_lab.training.loop import fit
from ddp_lab.training.metrics import evaluate
from ddp_lab.training.progress import Progress
from ddp_lab.training.step import Step
from ddp_lab.training.sync import Sync
from ddp_lab.world.runtime import Runtime

SEED = 7
TEST_SAMPLES = 31


ONE_PROCESS = ("single", "dp", "split")
FORMS = ("pt", "sharded")


def make_step(*words: str) -> tuple[Step, Loader]:
    """Return the training step of `single`, and its loader.

    It always starts from the same weights; the batches have 24, 24 and 12 samples.
    """
    job = build(
        config_of(" ".join(["single samples=60 data.crop_padding=1 data.flip=true", *words])),
        Runtime("cpu"),
    )
    return job.trainer().eager_step, job.loaders["train"]


@dataclass
class Outcome:
    """The result of a run on one rank. Only rank 0 has the tensors."""

    weights: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor]
    averages: dict[str, torch.Tensor]  # of the weights; empty without ema
    digest: str  # hash of this rank's part of the model
    # hash of the complete model before the first step, on rank 0, of models that start on the meta
    # device
    initial: str
    state_bytes: (
        int  # bytes of parameters and buffers that this rank has allocated before the first step
    )
    # largest number of such bytes while it drew them, with the complete block that it had drawn
    # last
    peak: int
    sums: list[list[float]]  # of each training epoch
    # the metrics of all sets after each epoch, and once more at the end
    evaluations: list[dict[str, float]]
    confusion: list[float]  # the cells of the last confusion matrix, of classification


class Watched(InitialWeights):
    """Initial weights that count the bytes in memory: the model's, and the last drawn block's."""

    def __init__(self, model: Chain, seed: int):
        super().__init__(model, seed)
        self.model = model
        self.peak = 0

    def of(self, name: str) -> dict[str, torch.Tensor]:
        block = super().of(name)
        self.peak = max(
            self.peak, held_bytes(self.model) + sum(tensor.nbytes for tensor in block.values())
        )
        return block


class Recorder(Hook, Logger):
    """Record what `fit` reports of each epoch, and save checkpoints in both formats.

    Their folders are `pt` and `sharded`.
    """

    def __init__(self, checkpoints: list[Checkpoints], save_at: list[int]):
        self.checkpoints = checkpoints
        self.save_at = save_at
        self.sums: list[list[float]] = []
        self.evaluations: list[dict[str, float]] = []

    def on_start(self, run: Run) -> None:
        self.run = run

    def on_evaluate(self, results: object) -> None:
        self.sums.append(self.run.position.sums)

    def epoch(self, epoch: int, **metrics: float) -> None:
        self.evaluations.append(
            {key: metrics[key] for key in metrics if key.startswith(("val_", "test_"))}
        )

    def on_step_end(self, position: Progress) -> None:
        if position.step in self.save_at:
            self.save(self.run.current())

    def on_epoch_end(self, position: Progress) -> None:
        self.save(position)

    def save(self, progress: Progress) -> None:
        for checkpoints in self.checkpoints:
            checkpoints.save(progress)
            checkpoints.wait()
            assert not checkpoints.problem, checkpoints.problem


def run_case(runtime: Runtime, line: str) -> Outcome:
    """Train the case of a line as train.py does. Several ranks need an open process group."""
    case = Case.of(line)
    cfg = case.config()
    with TemporaryDirectory() as folder:
        if "files" in case.parts:  # images of ten classes
            sizes = {"train": 49, "val": 12, "test": TEST_SAMPLES}
            cfg.data.root = runtime.broadcast_from_rank0(
                "root", lambda: str(write_folder(Path(folder), sizes, classes=10, sides=(28, 48)))
            )
        job = build(cfg, runtime)
        if case.other_start and not runtime.is_main:
            with torch.no_grad():
                for parameter in job.model.parameters():
                    parameter.add_(1)
        with job.options.backend_flags(runtime):
            return run_job(runtime, cfg, job)


def run_job(runtime: Runtime, cfg: DictConfig, job: Job) -> Outcome:
    """Train with a job. Its files must exist until the last rank has ended."""
    strategy = job.strategy
    names = job.model.state_dict().keys()
    by_block = cfg.model.init == "by_block"
    assert bool(held_bytes(job.model)) != by_block, (
        "the model does not start on the device that it should"
    )
    weights = strategy.initial_weights
    if weights is not None:
        weights = Watched(job.model, SEED)
        strategy.initial_weights = weights
    trainer = job.trainer()
    state_bytes = held_bytes(job.model)
    peak = weights.peak if weights else 0
    initial = hash_of(full_weights(strategy)) if by_block else ""
    state = State.of(trainer, job.shapes)
    folder = cfg.get("save")
    if folder:
        Path(folder).mkdir(exist_ok=True)
    checkpoints = [
        Checkpoints(Path(folder, form), state, sharded=form == "sharded")
        for form in FORMS
        if folder
    ]
    source = None if cfg.resume == "auto" else Path(cfg.resume)
    position = Checkpoints(Path(folder or ""), state).resume(source, lambda progress: progress.step)
    before = job.sizes.steps_before(position)
    steps_left = job.fit_settings.steps_left(position, before, job.sizes.steps_per_epoch)
    step: Any = build_step(job.options, trainer.eager_step, job.loaders["train"], steps_left)
    recorder = Recorder(checkpoints, cfg.checkpoint.at_steps)
    eager = trainer.eager_step
    settings = job.fit_settings
    sync = Sync(strategy, eager.running_sums, Every())
    position = fit(Run(eager, step, job.loaders, settings, recorder, [recorder], sync, position))
    chosen = "test" if "test" in job.loaders else "val"
    with trainer.ema.in_use() if trainer.ema else nullcontext():
        tested = evaluate(strategy, job.loaders[chosen])
    again = {f"{chosen}_{key}": value for key, value in tested.values.items()}
    assert again.items() <= recorder.evaluations[-1].items(), (
        "a second evaluation has another result"
    )
    confusion = tested.sums.get("confusion", torch.zeros(0))
    if chosen == "test":
        assert tested.samples == confusion.sum() == TEST_SAMPLES
        assert tested.values["accuracy"] == confusion.trace().item() / TEST_SAMPLES
    full, rests = gather_full_state(strategy, *state.part(position))
    state = content_of(full, merge(rests)) if rests else {"model": {}, "optimizer": {}}
    averages = state.get("ema", {})
    local_state = {
        name: value.detach().cpu().clone() for name, value in strategy.module.state_dict().items()
    }
    full = (
        not any(isinstance(value, DTensor) for value in local_state.values())
        and local_state.keys() == names
    )
    if runtime.rank == 0 and full:
        assert largest_difference(local_state, state["model"]) == 0
    # the checkpoint of a sharded or cut model is on rank 0 only
    weights = local_state if full else state["model"]
    kept = state["optimizer"].get("state", {})
    momentum = {
        name: values.get("momentum_buffer", values.get("exp_avg")) for name, values in kept.items()
    }
    digest = hash_of(weights)
    if runtime.rank > 0:
        weights = {}
        momentum = {}
        averages = {}
    measured = recorder.sums, [*recorder.evaluations, again], confusion.flatten().tolist()
    return Outcome(weights, momentum, averages, digest, initial, state_bytes, peak, *measured)


def full_weights(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return the complete model's weights on rank 0, else {}. Collective."""
    return gather_full_state(strategy, strategy.module.state_dict())[0]


def hash_of(state: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(
        b"".join(state[name].numpy().tobytes() for name in sorted(state))
    ).hexdigest()


def held_bytes(model: nn.Module) -> int:
    """Return the bytes of memory in which this process has parts of the model.

    A tensor on the meta device has none.
    """
    tensors = [local(tensor) for tensor in model.state_dict().values()]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors if not tensor.is_meta)


def run_cases(cases: list[str], device: str = "cpu") -> dict[str, Outcome]:
    """Run all cases in this rank's world, one after the other.

    cuDNN is disabled, because it chooses the algorithm by the size of the local batch, and some
    algorithms lose two digits of float32 (on an H200 gradients differ from float64's by 2e-6 at
    batch 24 and by 1e-8 at batch 6). This is enough to change the sign of a ReLU's input. The fast
    path of nn.MultiheadAttention in evaluations, which tp does not take, has errors of 4e-6 on
    GPUs, in float64, too (an H100, torch 2.11, 2026-11-25).
    """
    torch.backends.mha.set_fastpath_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.enabled = False
    with Runtime(device, timeout=30) as runtime:
        strategies = {Case.of(case).strategy for case in cases}
        if runtime.world_size > 1 or not strategies <= {*ONE_PROCESS}:
            runtime.open_group()  # once for all cases
        outcomes = {}
        for case in cases:
            with Case.of(case).default_dtype():
                outcomes[case] = run_case(runtime, case)
        return outcomes


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    assert one, "nothing to compare"
    assert all(one[name].shape == other[name].shape for name in one)
    filled = {name: tensor for name, tensor in one.items() if tensor.numel()}
    precise = {
        name: torch.promote_types(torch.float64, tensor.dtype) for name, tensor in filled.items()
    }
    return max(
        (one[name].to(dtype) - other[name].to(dtype)).abs().max().item()
        for name, dtype in precise.items()
    )
