"""Submit a run to Slurm or Kubernetes: print the script or the manifest and the command, and ask.

ddp-lab submit slurm --nodes 2 --gpus 4 strategy=ddp runs_dir=/shared/runs name=mine
ddp-lab submit slurm --gpus 4 --queue short strategy=ddp -- --time=2:00:00 --cpus-per-task=16
ddp-lab submit kubernetes --nodes 2 --gpus 4 --queue team strategy=ddp name=mine -- --namespace=team

What follows `--` are options of sbatch or kubectl. A node gets a rank for each GPU, and one without
GPUs. The config is checked before anything is printed. docs/schedulers.md describes what a cluster
needs.
"""

import argparse
import shlex
import shutil
import subprocess
import sys

import yaml
from hydra.utils import get_object

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.worlds import check_world
from ddp_lab.launchers import schedulers
from ddp_lab.launchers.arguments import Parser, confirm, refuse_ranks
from ddp_lab.launchers.command import quote_faults
from ddp_lab.launchers.command_line import compose_config

PROGRAMS = {"slurm": "sbatch", "kubernetes": "kubectl"}


def parse(arguments: list[str]) -> argparse.Namespace:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser("ddp-lab submit", __doc__)
    parser.add_argument("scheduler", choices=["slurm", "kubernetes"])
    parser.add_overrides("Hydra overrides of train.py, then -- and options of sbatch or kubectl")
    parser.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="number of machines (default: 1)"
    )
    parser.add_argument(
        "--gpus", type=int, default=1, metavar="N", help="GPUs of each machine (default: 1)"
    )
    parser.add_argument(
        "--queue",
        metavar="NAME",
        help="partition of Slurm, LocalQueue of Kueue (default: the cluster's)",
    )
    parser.add_argument(
        "--config-dir",
        metavar="DIR",
        help="directory of your own yaml, which the job must find there, too",
    )
    parser.add_argument("--yes", action="store_true", help="submit without asking")

    namespace, unknown = parser.parse_known_intermixed_args(arguments[:end])
    namespace.options = arguments[end + 1 :]
    if unknown:
        refuse_options(namespace.scheduler, unknown, arguments, end)

    for option, least in {"nodes": 1, "gpus": 0}.items():
        if getattr(namespace, option) < least:
            raise ConfigError(
                f"--{option} {getattr(namespace, option)}: must be an integer of at least {least}"
            )
    return namespace


def refuse_options(scheduler: str, unknown: list[str], arguments: list[str], end: int) -> None:
    """Refuse options that are not ours, with the line that passes them to the scheduler.

    Args:
        scheduler: of the launch.
        unknown: the arguments that the parser does not know.
        arguments: of the command.
        end: the index of `--` in them, or their number.

    Raises:
        ConfigError: always.
    """
    rest = list[str]()
    moved = list[str]()
    follows_moved = False
    for argument in arguments[:end]:
        # argparse counts every override after an unknown option as unknown
        is_option = argument.startswith("-")
        is_value = not is_option and "=" not in argument
        follows_moved = (is_option and argument in unknown) or (follows_moved and is_value)
        (moved if follows_moved else rest).append(argument)
    line = shlex.join(["ddp-lab", "submit", *rest, "--", *moved, *arguments[end + 1 :]])
    program = PROGRAMS[scheduler]
    raise ConfigError(
        f"{moved[0]}: is not an option of ddp-lab submit. Options of {program} follow --: `{line}`"
    )


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    refuse_ranks("ddp-lab submit")

    overrides = quote_faults(namespace.overrides)
    cfg = compose_config(overrides, namespace.config_dir)
    check(cfg)
    one_process = get_object(cfg.strategy["_target_"]).one_process
    if one_process and namespace.nodes > 1:
        raise ConfigError(
            f"--nodes {namespace.nodes}: this strategy drives all devices from one process; use "
            "--nodes 1"
        )
    check_world(cfg, 1 if one_process else namespace.gpus or 1, namespace.nodes)

    overrides = [
        *(["--config-dir", namespace.config_dir] if namespace.config_dir else []),
        *overrides,
    ]

    if namespace.scheduler == "slurm":
        options = [
            f"--nodes={namespace.nodes}",
            *([f"--gpus-per-node={namespace.gpus}"] if namespace.gpus else []),
        ]
        if namespace.queue:
            options.append(f"--partition={namespace.queue}")
        alone = (["env", "NPROC_PER_NODE=1"], ["--nodes=1"]) if one_process else ([], [])
        name = f"--job-name={cfg.name or 'ddp_lab'}"
        command = [
            *alone[0],
            "sbatch",
            *options,
            *namespace.options,
            *alone[1],
            name,
            str(schedulers.SCRIPT),
            *overrides,
        ]
        text = schedulers.SCRIPT.read_text()
        sent = None
    else:
        ranks = 1 if one_process else namespace.gpus or 1
        manifest = schedulers.trainjob(
            cfg.name, namespace.nodes, namespace.gpus, ranks, namespace.queue, overrides
        )
        command = ["kubectl", "create", "--filename=-", *namespace.options]
        text = yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=128)
        sent = text

    print(f"{text}\n{shlex.join(command)}", flush=True)
    confirm(f"Submit this to {namespace.scheduler}?", namespace.yes)
    submit(command, sent)


def submit(command: list[str], sent: str | None) -> None:
    """Run the scheduler's command with `sent` as its standard input.

    Its exit code becomes that of this process.

    Raises:
        ConfigError: the command is not installed on this machine.
        SystemExit: the scheduler rejected the job, which the command has reported.
    """
    name = next(word for word in command if word in PROGRAMS.values())
    if shutil.which(name) is None:
        raise ConfigError(
            f"{name}: is not installed on this machine; submit where it is, with what is printed "
            "above"
        )
    if code := subprocess.run(command, input=sent or "", text=True).returncode:
        sys.exit(code)
