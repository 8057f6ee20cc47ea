"""How long Python takes to launch a step, measured by eager steps of jobs that train.py would make.

In a loop over a few layers a launch took 36 us, and in steps about 46 us (H200s, torch 2.11, 2026-11-23).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ddp_lab.estimate.cards import Card
from ddp_lab.estimate.constants import ASSUMED, BETWEEN_NODES
from ddp_lab.estimate.rates import seconds
from ddp_lab.launch.command_line import compose_config
from ddp_lab.run.advisor import Advisor
from ddp_lab.run.candidates import Candidate
from ddp_lab.run.job import prepare
from ddp_lab.run.machine import Machine
from ddp_lab.run.materialize import materialize
from ddp_lab.world.place import Place
from ddp_lab.world.runtime import Runtime

MODELS = ("lenet", "resnet18", "vit")  # few operations, many convolutions, many other layers
LEAST = 1e-6  # seconds that a step's own Python takes in any case


def launch_seconds(card: Card, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a launch, and what Python takes for the rest of a step.

    Args:
        card: the data sheet of the device.
        device: where steps are timed.
    """
    # So few samples that any GPU computes them faster than Python launches their kernels.
    steps, batch = (50, 8) if device.type == "cuda" else (1, 1)
    images = "data=synthetic", "data.dataset.channels=1", f"data.dataset.train_size={steps * batch}", "data.dataset.test_size=1"
    options = *images, f"batch_size={batch}", "strategy=single", "speed=off"
    runs = [[f"model={model}", *options] for model in MODELS]
    return fit([launches(run, card) for run in runs], [step_seconds(run, device) for run in runs])


def launches(run: Sequence[str], card: Card) -> float:
    """Return how many launches are predicted of a step: its seconds if each takes one and all else almost none.

    Args:
        run: overrides of train.py.
        card: as above.
    """
    advisor = Advisor(run, None, Machine(card, 1, 1, BETWEEN_NODES), replace(ASSUMED, launch=1.0, step=0.0))
    return advisor.predict(Candidate("single", {}, 1)).time.total


def step_seconds(run: Sequence[str], device: torch.device) -> float:
    """Return the mean seconds of an eager step, its batch included.

    Args:
        run: overrides of train.py.
        device: where it trains.
    """
    cfg = compose_config([*run, f"device={device}"], None)
    with Runtime(cfg.device, place=Place()) as runtime:  # alone, also where torchrun has started several ranks
        job = prepare(cfg, runtime)
        with job.options.switches(runtime):
            step, loader = materialize(job).step, job.loaders["train"]
            job.strategy.train()

            def epoch() -> None:
                loader.set_epoch(1)
                for batch in step.batches(loader):
                    step(batch)

            return seconds(epoch, device, 1) / job.plan.steps_per_epoch


def fit(launches: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Return the seconds of a launch and of the rest of a step with the least squares of the relative errors.

    Args:
        launches: of several steps.
        times: their seconds.
    """
    given = torch.tensor([launches, [1.0] * len(launches)], dtype=torch.float64).T
    scaled = given / torch.tensor(times, dtype=torch.float64)[:, None]
    one = torch.ones(len(times), 1, dtype=torch.float64)
    launch, rest = torch.linalg.lstsq(scaled, one).solution.flatten().tolist()
    if launch <= 0 or rest < LEAST:  # the times do not have two parts, for example on a CPU, which computes
        launch, rest = torch.linalg.lstsq(scaled[:, :1], one).solution.item(), LEAST
    return launch, rest
