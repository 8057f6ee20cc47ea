"""Write a run as one file of plain PyTorch, which does not import ddp_lab.

ddp-lab eject strategy=ddp -o train_plain.py                       overrides as of train.py
ddp-lab eject model=resnet18 data=fashion_mnist strategy=fsdp --nproc 4 -o train_plain.py
torchrun --standalone --nproc_per_node=2 train_plain.py            what it has written

The file has at most 300 lines, and prints the same losses to the last digit on the CPU, on any
number of ranks. It holds the strategies single, scratch, ddp and fsdp, classification and tokens,
and the code of ddp_lab's models; a model of your own is imported by its module. Keys for which
there is no template are refused, all of them in one message, with exit code 2. Those that change no
loss, such as tracker and name, are left out.
"""

import argparse
from pathlib import Path

from ddp_lab.config.build import plain
from ddp_lab.config.change import remove
from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.arguments import Parser, check_output, refuse_ranks, replacing
from ddp_lab.launchers.command_line import compose_config


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab eject", __doc__)
    parser.add_overrides("Hydra overrides of train.py, for example model=resnet18 strategy=fsdp")
    parser.add_argument(
        "--output", "-o", type=Path, required=True, metavar="FILE.py", help="file to write"
    )
    parser.add_argument("--force", action="store_true", help="replace the file if it exists")
    parser.add_argument(
        "--nproc",
        type=int,
        default=2,
        metavar="N",
        help="ranks in the launch line of the file (default: 2)",
    )
    parser.add_config_dir()
    namespace = parser.parse_intermixed_args(arguments)
    if namespace.output.suffix != ".py":
        raise ConfigError(f"--output {namespace.output}: must be the name of a .py file")
    if namespace.nproc < 1:
        raise ConfigError(f"--nproc {namespace.nproc}: must be at least 1")
    return namespace


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    refuse_ranks("ddp-lab eject")
    check_output(namespace.output, namespace.force)
    from ddp_lab.eject.keys import check_keys

    cfg = compose_config(namespace.overrides, namespace.config_dir, with_choices=True)
    choices = dict(cfg.hydra.runtime.choices)
    remove(cfg, "hydra")
    check(cfg)
    config = plain(cfg)
    check_keys(config, choices)

    from ddp_lab.eject.plain_file import Written, write_plain
    from ddp_lab.run.build import build
    from ddp_lab.world.runtime import Runtime

    with Runtime(cfg.device, cfg.precision, cfg.timeout) as runtime:
        job = build(cfg, runtime)
        written = Written(namespace.output, namespace.overrides, namespace.nproc)
        text = write_plain(config, job, written)
    with replacing(namespace.output) as temporary:
        temporary.write_text(text)
    print(f"{namespace.output}: {text.count(chr(10))} lines of plain PyTorch")
