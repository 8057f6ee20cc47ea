"""Plan, without a GPU, what each strategy needs on some GPUs: memory, communication, FLOPs, and a lower bound of a step.

ddp-lab advise --gpus 2xH100 model=resnet18 data=fashion_mnist          overrides of train.py as they are
ddp-lab advise --gpus 8xA100-40 --nodes 2 --link 25 model=vit_g14 data=folder data.root=/data precision=bf16
ddp-lab advise --gpus here --json advice.json --picture memory.png

ddp-lab advise --gpus here --measure model=resnet18 data=fashion_mnist

A plan is two real steps of the strategy on tensors without values. No number of images per second is guessed: --measure trains
each strategy that fits for some steps, in alternation, with made-up images, and keeps the results in ~/.cache/ddp_lab.
"""

import argparse
import math
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.arguments import Parser, check_folder
from ddp_lab.world.process import env_int


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab advise", __doc__)
    parser.add_overrides("Hydra overrides of train.py, for example model=resnet18 strategy=fsdp")
    parser.add_argument("--gpus", default="here", metavar="NxCARD|here", help="GPUs of each machine, for example 2xH100")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of machines (default: 1)")
    parser.add_argument("--link", type=float, metavar="GB/s", help="what a GPU sends to another machine; default: 50")
    parser.add_argument("--all", action="store_true", help="plan every mesh")
    parser.add_argument("--measure", action="store_true", help="measure each strategy that fits, on the devices here")
    parser.add_argument("--minutes", type=float, default=10, metavar="N", help="time limit of --measure (default: 10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the plans to this file, too")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the memory of each strategy")
    parser.add_argument("--config-dir", metavar="DIR", help="directory of your own yaml, for choices of a group")
    given = parser.parse_intermixed_args(arguments)
    if given.nodes < 1:
        raise ConfigError(f"--nodes {given.nodes}: must be an integer of at least 1")
    if given.link is not None and not 0 < given.link < math.inf:
        raise ConfigError(f"--link {given.link:g}: must be a number above 0, in GB/s")
    if given.picture is not None and given.picture.suffix != ".png":
        raise ConfigError(f"--picture {given.picture}: must be the name of a .png file")
    if given.measure and given.gpus != "here" and not given.gpus.endswith("xcpu"):
        raise ConfigError(f"--measure: measures the devices here; use --gpus here, or --gpus 2xcpu, in place of {given.gpus}")
    if not 0 < given.minutes < math.inf:
        raise ConfigError(f"--minutes {given.minutes:g}: must be a number above 0")
    return given


def main(arguments: list[str]) -> None:
    given = parse(arguments)
    if env_int("WORLD_SIZE", 1) > 1:
        raise ConfigError("ddp-lab advise: runs in one process; start it without torchrun")
    for option in ("json", "picture"):
        if getattr(given, option):
            check_folder(getattr(given, option), f"--{option}")
    from ddp_lab.advise.advisor import Advisor
    from ddp_lab.advise.machine import find_machine
    from ddp_lab.advise.measure import measure, offer, save
    from ddp_lab.advise.report import as_json, draw, table
    from ddp_lab.resilience.run_directory import write_json

    advisor = Advisor(given.overrides, given.config_dir, find_machine(given.gpus, given.nodes, given.link))
    advice = advisor.advise(given.all)
    if given.gpus == "here" or given.gpus.endswith("xcpu"):
        advice.notes += offer(advisor, advice.rows)
    if given.measure:
        advice.notes = measure(advisor, advice.rows, given.minutes)
        save(advisor, advice.rows)
    print(table(advice))
    if given.json:
        write_json(given.json, as_json(advice))
    if given.picture:
        draw(advice, given.picture)
