"""Train one model with one strategy, from any directory.

ddp-lab train model=resnet18 data=cifar10
ddp-lab train --nproc 4 strategy=ddp
ddp-lab train --hosts node1,node2 strategy=ddp
ddp-lab train --json outcome.json epochs=3
torchrun --standalone --nproc_per_node=4 -m ddp_lab strategy=ddp
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.launchers.command import (
    OVER_SSH,
    PREEMPTED,
    command,
    end_on_requests,
    refuse_tasks,
    run_with_config,
    user_errors,
)
from ddp_lab.world.process import note

if TYPE_CHECKING:
    from ddp_lab.run.job import Job
    from ddp_lab.world.runtime import Runtime

EXIT_CODES = {"preempted": PREEMPTED, "interrupted": 130}  # 128 + SIGINT, as in a shell


def main(arguments: list[str]) -> None:
    """Start the ranks of this machine, or train in this process if it is a rank or the only one."""
    end_on_requests()
    from ddp_lab.launchers.start_ranks import is_large, read_options, start_ranks

    file, arguments = split_json(arguments)
    with outcome_in(file):
        if {each.partition("=")[0] for each in arguments} & OVER_SSH:
            from ddp_lab.launchers.hosts import launch_on_hosts

            sys.exit(launch_on_hosts(arguments, wants_outcome=file is not None))
        options, overrides = read_options(arguments)
        refuse_tasks(options is not None and is_large(options))
        if options:
            sys.exit(start_ranks(options, overrides))
        run_with_config(train_rank, overrides)


def main_of_rank(arguments: list[str]) -> None:
    """Train in this process: train.py."""
    with command():
        end_on_requests()
        file, arguments = split_json(arguments)
        with outcome_in(file):
            refuse_tasks(False)
            run_with_config(train_rank, arguments)


def split_json(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """Return the value of --json, or None without it, and the other arguments.

    Raises:
        ConfigError: it has no value, cannot be written, or is not supported in this launch.
    """
    if not any(each.partition("=")[0] == "--json" for each in arguments):
        return None, arguments
    from ddp_lab.launchers.arguments import Parser, check_folder

    parser = Parser("ddp-lab train", None, add_help=False, allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    namespace, others = parser.parse_known_args(arguments)
    if "RANK" in os.environ:
        raise ConfigError(
            f"--json {namespace.json}: is not supported under torchrun, of which a rank does not "
            "know how the launch ends. Use `ddp-lab train --nproc N --json FILE`, or read "
            "status.json and failure.json in the run directory"
        )
    if {"-m", "--multirun"} & {*others}:
        raise ConfigError(
            f"--json {namespace.json}: is for one run; the jobs of a sweep have status.json and "
            "metrics.jsonl in their run directories. Leave it out"
        )
    check_folder(namespace.json, "--json")
    return namespace.json, others


@contextmanager
def outcome_in(file: Path | None) -> Generator[None]:
    """Write the outcome of the launch in the body to a file, however it ends. None: to no file."""
    if file is None:
        yield
        return
    from ddp_lab.resilience import outcome

    outcome.begin(file)
    code = 1
    try:
        with user_errors():
            yield
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except Exception as error:
        note(error=describe_error(error))
        raise
    finally:
        outcome.write(code)
        outcome.end()


def train_rank(cfg: DictConfig) -> float | None:
    """Train on this rank, and return the metric that `optimize` names, for a Hydra sweeper."""
    check(cfg)
    # These imports are not at the top of the file: they load torch, which takes 1.5 s and is not
    # needed for --help or for most config errors.
    from ddp_lab.observe.metrics_file import objective
    from ddp_lab.resilience.watchdog import COLLECTIVE_GRACE
    from ddp_lab.world.runtime import Runtime

    with Runtime(cfg.device, cfg.precision, cfg.timeout + COLLECTIVE_GRACE) as runtime:
        # After it returns, no object refers to the process group.
        status, run_dir, lower_is_better = prepare_and_train(cfg, runtime)
    # Under torchrun a non-zero exit code would restart the ranks.
    code = 0 if runtime.under_torchrun else EXIT_CODES.get(status, 0)
    runtime.exit_if_abandoned(code)
    if code:
        sys.exit(code)
    # for a Hydra sweeper
    return objective(run_dir / "metrics.jsonl", cfg.optimize, lower_is_better)[1]


def prepare_and_train(cfg: DictConfig, runtime: "Runtime") -> tuple[str, Path, bool]:
    """Train; return how it ended, its directory, and whether low values of `optimize` are good.

    Collective.
    """
    from ddp_lab.run.train import train

    job = runtime.succeed("checks", partial(prepare_job, cfg, runtime))
    lower_is_better = job.lower_is_better(cfg.optimize.partition("_")[2])
    status, run_dir = train(job)
    return status, run_dir, lower_is_better


def prepare_job(cfg: DictConfig, runtime: "Runtime") -> "Job":
    """Construct the run, whose batch and whose state fit in the memory of its devices.

    Collective.
    """
    if (
        "auto" in (cfg.batch_size, cfg.accumulate)
        or cfg.memory_limit
        or runtime.device.type == "cuda"
    ):
        from ddp_lab.advise.fit import prepare_in_memory

        return prepare_in_memory(cfg, runtime)
    from ddp_lab.run.build import prepare

    return prepare(cfg, runtime)
