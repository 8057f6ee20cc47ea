"""Plan, without a GPU, what each strategy needs on some GPUs.

That is memory, communication, FLOPs, and a lower bound of the time of a step.

ddp-lab advise --gpus 2xH100 model=resnet18 data=fashion_mnist     overrides as of train.py
ddp-lab advise --gpus 8xA100-40 --nodes 2 --link 25 model=vit_g14 data=folder data.root=/data
ddp-lab advise --gpus here --json advice.json --picture memory.png --html advice.html
ddp-lab advise --gpus here --measure model=resnet18 data=fashion_mnist

A plan is two real steps of the strategy on tensors without values. No number of images per second
is guessed: --measure trains each strategy that fits for some steps, in alternation, with made-up
images, and keeps the results in ~/.cache/ddp_lab.
"""

import argparse
import math
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.arguments import Parser, check_folder, refuse_ranks, write_errors


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab advise", __doc__)
    parser.add_overrides("Hydra overrides of train.py, for example model=resnet18 strategy=fsdp")
    parser.add_argument(
        "--gpus",
        default="here",
        metavar="NxCARD|here",
        help="GPUs of each machine, for example 2xH100",
    )
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of machines (default: 1)"
    )
    parser.add_argument(
        "--link",
        type=float,
        default=50,
        metavar="GB/s",
        help="of a GPU to another machine (default: 50)",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure each strategy that fits, on the devices here",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=10,
        metavar="N",
        help="time limit of --measure (default: 10)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the plans to this file, too"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.png", help="draw the memory of each strategy"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE.html", help="write one page with the table and pictures"
    )
    parser.add_config_dir()

    namespace = parser.parse_intermixed_args(arguments)
    for option in ("nodes", "link", "minutes"):
        if not 0 < getattr(namespace, option) < math.inf:
            raise ConfigError(
                f"--{option} {getattr(namespace, option):g}: must be a number above 0"
            )

    for option, ending in {"picture": ".png", "html": ".html", "json": ""}.items():
        if path := getattr(namespace, option):
            if not path.name.endswith(ending):
                raise ConfigError(f"--{option} {path}: must be the name of a {ending} file")
            check_folder(path, f"--{option}")
    if namespace.measure and (
        namespace.nodes > 1 or (namespace.gpus != "here" and not namespace.gpus.endswith("xcpu"))
    ):
        raise ConfigError(
            "--measure: measures the devices here; use --gpus here, or --gpus 2xcpu, in place of "
            f"{namespace.gpus}"
        )
    return namespace


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    refuse_ranks("ddp-lab advise")
    from ddp_lab.advise import report
    from ddp_lab.advise.advisor import Advisor
    from ddp_lab.advise.devices import find_devices
    from ddp_lab.advise.measure import measure, offer, require_image_shape
    from ddp_lab.observe.plot import beside
    from ddp_lab.resilience.run_directory import write_json

    advisor = Advisor.of(
        namespace.overrides,
        namespace.config_dir,
        find_devices(namespace.gpus, namespace.nodes, namespace.link),
    )
    if namespace.measure:
        require_image_shape(advisor)
    advisor.advise()
    if namespace.measure:
        measure(advisor, namespace.minutes)
    elif namespace.gpus == "here" or namespace.gpus.endswith("xcpu"):
        offer(advisor)

    print(report.table(advisor))
    if namespace.json:
        with write_errors(namespace.json, "--json"):
            write_json(namespace.json, report.as_json(advisor))
    if namespace.picture:
        with write_errors(namespace.picture, "--picture"):
            beside([report.memory_plot(advisor)], namespace.picture)
    if namespace.html:
        with write_errors(namespace.html, "--html"):
            namespace.html.write_text(report.page(advisor))
