"""The ranks that `ddp-lab doctor --fabric` starts itself, where no launcher has started any."""

import re
from argparse import Namespace
from typing import NamedTuple

from hydra._internal.utils import get_args_parser as hydra_parser  # pyright: ignore[reportPrivateUsage]

from ddp_lab.config.check import check
from ddp_lab.launchers.command import quote_faults, refuse_tasks
from ddp_lab.launchers.command_line import compose_config, split_config_dir
from ddp_lab.launchers.start_ranks import (
    check_port,
    choose_rendezvous,
    is_large,
    parse,
    start_ranks,
)

ENTRY = ("-m", "ddp_lab")
ON_CPU = 2  # ranks by default, so that there is a pair


class Launch(NamedTuple):
    """A launch of the command itself.

    Attributes:
        options: of torch's launcher.
        arguments: overrides, and --config-dir.
    """

    options: Namespace
    arguments: list[str]


def read_launch(arguments: list[str]) -> Launch | None:
    """Return the launch of a command line; None if it only asks Hydra for something, as --help.

    Args:
        arguments: Overrides, and options of `ddp-lab train`.

    Raises:
        ConfigError: The config or an option is wrong, or this process is one of several tasks.
    """
    config_dir, others = split_config_dir(arguments)
    of_hydra = re.findall(r"--[\w-]+", hydra_parser().format_usage())
    if any(re.match("-[a-z]", each) or each.partition("=")[0] in of_hydra for each in others):
        return None
    options, overrides = parse(others)
    refuse_tasks(is_large(options))
    choose_rendezvous(options)
    check_port(options)
    cfg = compose_config(quote_faults(overrides), config_dir)
    check(cfg)
    options.nproc_per_node = options.nproc_per_node or str(count_ranks(cfg.device))
    of_config = [] if config_dir is None else ["--config-dir", config_dir]
    return Launch(options, [*of_config, *overrides])


def count_ranks(device: str) -> int:
    """Return how many ranks a machine has by default: one for each GPU, or two on a CPU.

    Args:
        device: the config key `device`.
    """
    import torch  # not at the top of the file: mistakes in the config are reported without it

    gpus = torch.cuda.device_count() if device in ("auto", "cuda") else 0
    return gpus or ON_CPU


def start(launch: Launch, command: list[str]) -> int:
    """Start the ranks, wait for them, and return the exit code of the command.

    Args:
        launch: of the command.
        command: its name and options, for each rank.
    """
    return start_ranks(launch.options, [*command, *launch.arguments], ENTRY)
