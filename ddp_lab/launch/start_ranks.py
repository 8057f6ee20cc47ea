"""`ddp-lab train --nproc N`: start the ranks by torch's launcher, and report how they ended in one message.

The ranks are those that `torchrun --nproc_per_node=N train.py` starts. What differs is the end: torchrun prints a summary of
all ranks and a traceback of its own, whoever made which mistake.
"""

import argparse
import difflib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from hydra.utils import get_object

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.launch.arguments import Parser
from ddp_lab.launch.command import PREEMPTED, REFUSED
from ddp_lab.launch.command_line import compose_config, quote_faults, split_config_dir
from ddp_lab.launch.torchrun import ENTRY
from ddp_lab.world.process import env_int

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# With it rank 0 opens a store of its own at each start of the ranks. Without it, torch (2.15) gives the address of the agents'
# store only to those agents that take part in the first round: one that is started again later does not find the others.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
SIGNALS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGQUIT")  # which reach the ranks; each rank saves and exits
EXIT_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGUSR1: PREEMPTED}  # of other signals 128 + number, as in a shell
# Options of torchrun, whose --nproc-per-node is --nproc here: the allowed values, as a pattern and in English, and the options
# of which one must be given, too, as it has no effect otherwise
ADDRESS = ("rdzv-endpoint", "master-addr")
OPTIONS = {
    "nproc": (r"[1-9]\d*", "an integer of at least 1", ()),
    "nnodes": (r"[1-9]\d*(:[1-9]\d*)?", "a number of machines, N, or MIN:MAX", ()),
    "max-restarts": (r"\d+", "an integer of at least 0", ()),
    "rdzv-endpoint": (r".+:\d+", "HOST:PORT", ()),
    "rdzv-backend": (r"[\w-]+", "the name of a backend, c10d by default", ("rdzv-endpoint",)),
    "rdzv-id": (".+", "a name", ADDRESS),
    "rdzv-conf": (r"\w+=[^,]+(,\w+=[^,]+)*", "KEY=VALUE,KEY=VALUE", ADDRESS),
    "node-rank": (r"\d+", "an integer of at least 0", ("nnodes",)),
    "master-addr": (".+", "a host", ()),
    "master-port": (r"\d+", "a port", ("master-addr",)),
    "local-addr": (".+", "a host", ()),
}
# What starts several processes: the number of tasks, the program, and which task this is. SLURM_NTASKS is set in the shells of
# sbatch and salloc, too.
TASKS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpirun", "PMI_RANK"),
}


def split_options(arguments: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of the launch that are given, and the other arguments, which are for Hydra.

    Raises:
        ConfigError: an option has no value, one that is not allowed, or no effect.
    """
    parser = Parser("ddp-lab train", None, add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in OPTIONS:
        aliases = ["--nproc-per-node", "--nproc_per_node"] if name == "nproc" else [f"--{name.replace('-', '_')}"]
        parser.add_argument(f"--{name}", *aliases, dest=name)
    parser.add_argument("--standalone", action="store_true")  # torchrun's word for what is the default here
    known, others = parser.parse_known_args(arguments)
    options = vars(known)
    if options.pop("standalone", False) and (given := set(ADDRESS) & set(options)):
        raise ConfigError(f"--standalone: is for one machine; leave it or --{min(given)} out")
    for name, value in options.items():
        pattern, allowed, needed = OPTIONS[name]
        if not re.fullmatch(pattern, value):
            raise ConfigError(f"--{name} {value}: must be {allowed}")
        if name in ("rdzv-endpoint", "master-port") and int(value.rpartition(":")[2]) > 65535:
            raise ConfigError(f"--{name} {value}: a port must be at most 65535")
        if needed and not set(needed) & set(options):
            raise ConfigError(f"--{name} {value}: needs --{' or --'.join(needed)}")
    return options, others


def complete_options(options: dict[str, str], arguments: list[str]) -> dict[str, str] | None:
    """Return the options with --nproc, whose default is the number of GPUs; None if this process is to train alone.

    Args:
        options: of the launch.
        arguments: for Hydra.

    Raises:
        ConfigError: the config or an option is wrong.
    """
    if flags := [argument for argument in arguments if argument[:1] == "-" and argument.split("=")[0] != "--config-dir"]:
        if close := difflib.get_close_matches(flags[0].split("=")[0].strip("-"), OPTIONS, 1):
            raise ConfigError(f"{flags[0]}: there is no such option; did you mean --{close[0]}?")
        if options:
            line = f"ddp-lab train -m hydra/launcher=torchrun hydra.launcher.nproc_per_node={options.get('nproc', 'N')} ..."
            sweep = flags[0] in ("-m", "--multirun")
            advice = f"use `{line}`, which starts the ranks of each job" if sweep else "see ddp-lab train --help"
            raise ConfigError(f"--{next(iter(options))}: cannot be combined with {flags[0]}: {advice}")
        return None
    if int(options.get("nnodes", "1").split(":")[-1]) > 1 and not set(ADDRESS) & set(options):
        raise ConfigError(
            f"--nnodes {options['nnodes']}: needs --rdzv-endpoint HOST:PORT, the same on every machine: a port of one of them"
        )
    for name in set(ADDRESS) & set(options):
        check_host(name, options[name])
    config_dir, overrides = split_config_dir(arguments)
    cfg = compose_config(quote_faults(overrides), config_dir)
    check(cfg)  # before the ranks are started, which takes seconds
    options = {"nproc": str(count_ranks(cfg.strategy["_target_"], cfg.device)), **options}
    return options if options != {"nproc": "1"} else None


def check_host(option: str, value: str) -> None:
    """Check that the host of an address can be resolved, which torch would try for two minutes.

    Raises:
        ConfigError: it cannot.
    """
    host = value.rpartition(":")[0].strip("[]") if option == "rdzv-endpoint" else value  # IPv6 addresses are in brackets
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        here = socket.gethostname()
        raise ConfigError(f"--{option} {value}: {host} cannot be resolved on {here} ({error.strerror})") from None


def count_ranks(strategy: str, device: str) -> int:
    """Return how many ranks this machine has by default: one for each GPU, or one.

    Args:
        strategy: the strategy's class.
        device: the config key `device`.
    """
    if device not in ("auto", "cuda") or get_object(strategy).one_process:
        return 1
    import torch  # not at the top of the file: mistakes in the config are reported without it

    return max(1, torch.cuda.device_count())


def refuse_tasks(options: Mapping[str, str]) -> None:
    """Check that this process is not one of several tasks of srun or mpirun that would each train a run or start ranks.

    It may be a rank, or the only task on its machine of a launch on several.

    Args:
        options: of the launch of ranks.

    Raises:
        SystemExit: with exit code 2. The first task reports it.
    """
    if "RANK" in os.environ:
        return
    several = options.get("nnodes", "1").split(":")[-1] != "1"  # machines
    for variable, (program, number) in TASKS.items():
        tasks = env_int(variable, 1)
        allowed = env_int("SLURM_STEP_NUM_NODES", tasks) if program == "srun" else tasks
        if tasks > (allowed if several else 1):
            if env_int(number, 0) == 0:
                line = f"ddp-lab train --nproc {tasks} OVERRIDES"
                print(
                    f"error: {program} started {tasks} tasks ({variable}={tasks}), which are not ranks: each would train a run "
                    f"or start ranks of its own. On one machine start one task: `{line}`. On several, start one task on each: "
                    "`ddp-lab train --nproc N --nnodes M --rdzv-endpoint HOST:PORT OVERRIDES`, or use `ddp-lab submit`",
                    file=sys.stderr,
                )
            sys.exit(REFUSED)


def start_ranks(options: Mapping[str, str], arguments: list[str]) -> int:
    """Start the ranks of this machine, wait until they have ended, and return the exit code of the command.

    Args:
        options: of the launch.
        arguments: of train.py.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import get_args_parser, run

    os.environ.setdefault(OWN_STORE, "1")
    if "LOGLEVEL" not in os.environ:  # torch's variable
        logging.disable()  # torch logs what is reported below, with a time and the source file
    try:
        run(get_args_parser().parse_args([*torchrun_options(options), *ENTRY, *arguments]))
    except ChildFailedError as error:
        return report_failure(error.failures)
    except SignalException as error:
        return EXIT_CODES.get(error.sigval, 128 + error.sigval)
    except (DistError, RendezvousError, OSError, ValueError) as error:
        advice = ""
        if isinstance(error, DistError) and "EADDRINUSE" in str(error):  # torch has no class for it
            given = [f"--{name} {options[name]}" for name in ("rdzv-endpoint", "master-port") if name in options]
            port = given[0] if given else "--master-port 29500, the default"
            advice = f"{port}: is in use on this machine; choose another port, the same on every machine. "
        print(f"error: the ranks were not started: {advice}{describe_error(error)}", file=sys.stderr)
        return 1
    return 0


def torchrun_options(options: Mapping[str, str]) -> list[str]:
    """Return the options as torchrun takes them. Without an address the launch is one of this machine alone."""
    given = [f"--{name}={value}" for name, value in options.items() if name != "nproc"]
    where = ["--rdzv-backend=c10d"] if "rdzv-endpoint" in options else ["--standalone"] * ("master-addr" not in options)
    return [f"--nproc-per-node={options['nproc']}", f"--signals-to-handle={','.join(SIGNALS)}", *where, *given]


def report_failure(failures: "Mapping[int, ProcessFailure]") -> int:
    """Print the message of the rank that failed first, and return the exit code of the command.

    Args:
        failures: of this machine's ranks, by rank. Those that another rank's failure ended are among them.
    """
    # The content of a rank's error file; a text if it has written none.
    reported = [failure for failure in failures.values() if not isinstance(failure.error_file_data["message"], str)]
    for failure in sorted(reported, key=lambda failure: failure.timestamp)[:1]:
        print(failure.error_file_data["message"]["extraInfo"]["py_callstack"], file=sys.stderr)
    codes = {rank: failure.exitcode for rank, failure in sorted(failures.items()) if failure not in reported}
    for rank, code in codes.items():
        if code not in (1, REFUSED, -signal.SIGTERM):  # such ranks were ended because of another one
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            print(f"rank {rank} {how}", file=sys.stderr)
    return REFUSED if REFUSED in [failure.exitcode for failure in reported or failures.values()] else 1
