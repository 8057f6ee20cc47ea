"""Predict, without a GPU, which strategies and meshes fit on GPUs and how fast they train.

ddp-lab advise --gpus 2xH100 model=resnet18 data=fashion_mnist          overrides of train.py as they are
ddp-lab advise --gpus 8xA100-40 --nodes 2 --link 25 model=vit_g14 data=folder data.root=/data precision=bf16
ddp-lab advise --gpus here --json advice.json --picture memory.png
ddp-lab advise --calibrate                                              measures the constants of the card here
torchrun --standalone --nproc_per_node=2 -m ddp_lab advise --calibrate            and how fast the cards exchange data

All numbers are predictions; docs/advise.md compares them with measurements. Nothing is trained, and no process group is opened.
"""

import argparse
import math
from pathlib import Path

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.launch.command import command
from ddp_lab.launch.output import check_folder
from ddp_lab.launch.parser import Parser
from ddp_lab.world.process import env_int


def arguments() -> argparse.Namespace:
    parser = Parser("ddp-lab advise", __doc__)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides of train.py, for example model=resnet18 strategy=fsdp")
    parser.add_argument("--gpus", default="here", metavar="NxCARD|here", help="GPUs of each machine, for example 2xH100")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of machines (default: 1)")
    parser.add_argument("--link", type=float, metavar="GB/s", help="what a GPU sends to another machine; default: 50")
    parser.add_argument("--all", action="store_true", help="list every mesh, and what is refused with the reasons")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the predictions to this file, too")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw the memory of each strategy")
    parser.add_argument(
        "--calibrate", action="store_true", help="measure the constants of the card here, for later predictions"
    )
    parser.add_argument("--config-dir", metavar="DIR", help="directory of your own yaml, for choices of a group")
    given = parser.parse_intermixed_args()
    if given.nodes < 1:
        raise ConfigError(f"--nodes {given.nodes}: must be an integer of at least 1")
    if given.link is not None and not 0 < given.link < math.inf:
        raise ConfigError(f"--link {given.link:g}: must be a number above 0, in GB/s")
    if given.picture is not None and given.picture.suffix != ".png":
        raise ConfigError(f"--picture {given.picture}: must be the name of a .png file")
    return given


@command()
def main() -> None:
    given = arguments()
    if given.calibrate:
        return measure(given.overrides)
    if env_int("WORLD_SIZE", 1) > 1:
        raise ConfigError("ddp-lab advise: runs in one process; start it without torchrun")
    for option in ("json", "picture"):
        if getattr(given, option):
            check_folder(getattr(given, option), f"--{option}")
    from ddp_lab.estimate.report import as_json, draw, table
    from ddp_lab.resilience.run_directory import write_json
    from ddp_lab.run.advise import advise
    from ddp_lab.run.machine import find_machine

    machine = find_machine(given.gpus, given.nodes, given.link)
    advice = advise(given.overrides, given.config_dir, machine)
    print(table(advice, given.all))
    if given.json:
        write_json(given.json, as_json(advice))
    if given.picture:
        draw(advice, given.picture)


def measure(overrides: list[str]) -> None:
    """Measure the card here and, under torchrun, the connection of the ranks' cards."""
    from ddp_lab.launch.command_line import compose_config
    from ddp_lab.run.calibrate import calibrate, card_of, describe
    from ddp_lab.world.runtime import Runtime

    cfg = compose_config(overrides, None)
    check(cfg)
    with Runtime(cfg.device, timeout=cfg.timeout) as runtime:
        constants, path = calibrate(runtime, card_of(runtime))
    if runtime.rank == 0:
        print(describe(constants, path))
