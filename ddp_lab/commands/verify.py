"""Verify that every strategy computes what one device computes, for your model, loss and data.

ddp-lab verify model=resnet18 data=fashion_mnist              overrides of train.py
ddp-lab verify model=own model._target_=mynet.Net data=own data.dataset._target_=mydata.Data
ddp-lab verify strategy=fsdp accumulate=4 max_grad_norm=1 --json verify.json
ddp-lab verify --only ddp,fsdp model=vit                      some of the strategies

It needs no GPU: up to four ranks on the CPU train three steps, the last one on a partial batch, and
losses, gradients and weights are compared with those of strategy=single. The table says of each
strategy whether it is equal, refused (why), or which parameter differs first, by which factor, and
the likely cause. The exit code is 0 if nothing differs, 1 if something does, 2 for wrong overrides.
"""

import argparse
import re
import sys
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.arguments import Parser, check_folder
from ddp_lab.world.process import env_int

OF_STRATEGY = re.compile(r"(\+\+?|~)?strategy[.=]")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab verify", __doc__)
    parser.add_overrides("Hydra overrides of train.py, for example model=vit strategy=fsdp")
    parser.add_argument(
        "--nproc", type=int, default=4, metavar="N", help="the most ranks: 2 or 4 (default: 4)"
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="NAMES",
        help="strategies to compare, for example ddp,fsdp; that of the overrides always is",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the table to this file, too"
    )
    parser.add_config_dir()
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    if env_int("WORLD_SIZE", 1) > 1:
        raise ConfigError("ddp-lab verify: starts its ranks itself; start it without torchrun")
    from ddp_lab.proof.plans import check_names, check_ranks

    only = tuple(name for name in namespace.only.split(",") if name)
    check_ranks(namespace.nproc, "--nproc ")
    check_names(only, "--only ")
    if namespace.json:
        check_folder(namespace.json, "--json")

    from ddp_lab.config.check import check
    from ddp_lab.launchers.command_line import compose_config

    cfg = compose_config(namespace.overrides, namespace.config_dir)
    check(cfg)
    from ddp_lab.proof.verify_run import verify_run
    from ddp_lab.resilience.run_directory import write_json

    report = verify_run(cfg, strategy_of(namespace.overrides), namespace.nproc, only)
    print(report)
    if namespace.json:
        write_json(namespace.json, report.as_json())
    if not report.ok:
        sys.exit(1)


def strategy_of(overrides: list[str]) -> str | None:
    """Return the overrides of the strategy, without that word; None: it is `single`."""
    chosen = [override for override in overrides if OF_STRATEGY.match(override)]
    kept = [OF_STRATEGY.sub("", override) for override in chosen if override[0] != "~"]
    return " ".join(kept) if kept and kept != ["single"] else None
