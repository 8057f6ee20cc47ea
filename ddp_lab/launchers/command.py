"""How commands begin and end.

A user's mistake is one message with exit code 2, any other exception one traceback.
"""

import faulthandler
import functools
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.utils import _run_hydra, get_args_parser  # pyright: ignore[reportPrivateUsage]
from hydra.errors import HydraException
from hydra.version import setbase
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ddp_lab.config.compose import CONF
from ddp_lab.config.errors import ConfigError, NodeError, SampleError
from ddp_lab.config.overrides import HELP, check_overrides, for_own_classes
from ddp_lab.world.process import RankInfo, die_with_torchrun, discard_output, env_int, note, show

# Exit codes of a command: a user's mistake; EX_TEMPFAIL of sysexits.h, temporary failure, try again
# later
REFUSED = 2
PREEMPTED = 75
# What starts several processes: the variable with the number of tasks, the program, and that with
# the number of this task. SLURM_NTASKS is set in the shells of sbatch and salloc, too.
TASKS = {
    "SLURM_STEP_NUM_TASKS": ("srun", "SLURM_PROCID"),
    "OMPI_COMM_WORLD_SIZE": ("mpirun", "OMPI_COMM_WORLD_RANK"),
    "PMI_SIZE": ("mpirun", "PMI_RANK"),
}
# options of a launch on several machines, whose ranks a command starts over ssh
OVER_SSH = {"--hosts", "--hostfile", "--ssh", "--python", "--directory"}
# set for a process that is to be killed when its standard input closes
ENDS_WITH_STDIN = "DDP_LAB_ENDS_WITH_STDIN"


def refuse_tasks(starts_several: bool) -> None:
    """Check that this process is not one of several tasks of srun or mpirun.

    Each of them would train a run or start ranks.

    It may be a rank, or the only task on its machine of a launch on several.

    Args:
        starts_several: whether it starts the ranks of its machine in a launch on several.

    Raises:
        ConfigError: it is the first of such tasks.
        SystemExit: it is another one.
    """
    for variable, (program, number) in TASKS.items() if "RANK" not in os.environ else ():
        tasks = env_int(variable, 1)
        allowed = env_int("SLURM_STEP_NUM_NODES", tasks) if program == "srun" else tasks
        if tasks > (allowed if starts_several else 1):
            if env_int(number, 0) != 0:
                sys.exit(REFUSED)
            raise ConfigError(
                f"{program} started {tasks} tasks ({variable}={tasks}), which are not ranks. On "
                f"one machine start one task: `ddp-lab train --nproc {tasks} OVERRIDES`. On "
                "several, start one task on each: `ddp-lab train --nproc N --nnodes M "
                "--rdzv-endpoint HOST:PORT OVERRIDES`, or use `ddp-lab submit slurm`"
            )


@contextmanager
def command() -> Generator[None]:
    """Prepare this process for a command, and report its errors."""
    faulthandler.enable()
    die_with_torchrun()  # before the imports, during which torchrun may be killed
    if os.environ.pop(ENDS_WITH_STDIN, None):  # it is for this process alone; its ranks die with it
        threading.Thread(target=end_with_stdin, name="parent", daemon=True).start()
    extend_search_path()
    with user_errors():
        yield


def extend_search_path() -> None:
    """Let Python find the user's modules, in the directory of the command.

    It comes before the directory that contains ddp_lab, where a clone has `train.py`, `scripts` and
    `tests`. No directory of ours is added: each of its modules could be imported by its bare name,
    in place of a user's.
    """
    own_root = str(Path(__file__).parents[2])
    place = sys.path.index(own_root) if own_root in sys.path else len(sys.path)
    sys.path.insert(place, os.getcwd())


def end_on_requests() -> None:
    """Let SIGTERM and SIGUSR1 end this process with PREEMPTED until the run listens to them.

    A scheduler may send them at any time, and takes any other exit code for a failure. A rank is
    left alone: its launcher has the exit code, and ends its ranks by SIGTERM, too, when one of them
    fails.
    """

    def end(number: int, frame: object) -> None:
        print("interrupted", file=sys.stderr)
        sys.exit(PREEMPTED)

    for number in (signal.SIGTERM, signal.SIGUSR1) if "RANK" not in os.environ else ():
        signal.signal(number, end)


def end_with_stdin() -> None:
    """Wait until the other end of a pipe, of which nothing is read, closes with its process.

    Then end this one at once.
    """
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def user_errors() -> Generator[None]:
    """Report a user's mistake as one message with exit code 2, Ctrl-C and exceptions of ranks once.

    Raises:
        SystemExit: instead of these errors. torchrun itself exits with code 1, whatever the exit
            codes of its ranks are.
    """
    try:
        yield
        sys.stdout.flush()  # here, and not at the interpreter's exit, a closed pipe can be handled
    except (ConfigError, SampleError, HydraException, OmegaConfBaseException) as error:
        report(error)
        sys.exit(REFUSED)
    except BrokenPipeError:
        discard_output()
        sys.exit(128 + signal.SIGPIPE)
    except KeyboardInterrupt:
        if env_int("RANK", 0) == 0:
            print("interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        # Optuna's ValueError after the last job
        if str(error).startswith("No trials are completed"):
            show(
                "error: no job of the search has a result; the output above and each failure.json "
                "have the reasons"
            )
            sys.exit(1)

        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise
        from ddp_lab.config.causes import WAIT_FOR_CAUSE, OtherRankError, is_secondary

        secondary = is_secondary(error)
        # torchrun ends all ranks when one exits, so the rank with the cause must be first
        if secondary:
            time.sleep(WAIT_FOR_CAUSE)
        # Python would print the traceback on each rank, and torchrun once more.
        text = f"error: {error}" if isinstance(error, OtherRankError) else traceback.format_exc()
        show(text, secondary=secondary)
        sys.exit(1)


def run_with_config(task: Callable[[DictConfig], Any], arguments: list[str]) -> None:
    """Compose the config of a command line and call `task` with it.

    Or do what an option of Hydra says: --help, --multirun.

    Args:
        task: gets the config.
        arguments: overrides and options of Hydra.

    Raises:
        ConfigError: An override is not allowed; or the arguments contain --multirun, and this
            process is one of several ranks.
    """
    if env_int("WORLD_SIZE", 1) > 1 and {"-m", "--multirun"} & set(arguments):
        raise ConfigError(
            "--multirun: is not supported by several ranks, where all jobs would share one process "
            "group. Use `ddp-lab train -m hydra.launcher.nproc_per_node=N ...`, which starts the "
            "ranks of each job"
        )

    # makes Hydra raise exceptions; by default it prints them on every rank
    os.environ["HYDRA_FULL_ERROR"] = "1"

    @functools.wraps(task)
    def run(cfg: DictConfig) -> Any:
        # Inside of Hydra, which prints a line about errors; those of overrides are reported
        # outside.
        with user_errors():
            return task(cfg)

    parser = get_args_parser()
    namespace = parser.parse_intermixed_args(quote_faults(arguments))
    sweeps = namespace.multirun or any(
        each.startswith("hydra.mode=") for each in namespace.overrides
    )
    check_overrides(namespace.overrides, namespace.config_dir, sweeps)
    namespace.overrides = for_own_classes(namespace.overrides, namespace.config_dir)
    if sweeps:
        from ddp_lab.launchers.torchrun_launcher import register  # loads what draws the results

        register()

    setbase("1.3")
    # What hydra.main does with sys.argv; it takes no other arguments.
    _run_hydra(namespace, parser, task_function=run, config_path=str(CONF), config_name="config")


def quote_faults(arguments: list[str]) -> list[str]:
    """Return the arguments with the value of `inject` in quotes.

    Hydra would read its comma as a sweep over two values.
    """
    fault = re.compile(r"^inject=(\w+@[\w=,]+)$")
    return [fault.sub(r'inject="\1"', argument) for argument in arguments]


def report(error: Exception) -> None:
    """Report an error: print it or, under torchrun, write it to the file that the launcher prints.

    All ranks raise a ConfigError, and one of them reports it. torchrun then ends the others of the
    machine. One that is still running after a while has most likely raised it alone, and reports
    it.

    Args:
        error: what a rank has raised.
    """
    place = RankInfo.of(os.environ)
    rank = place.local_rank if isinstance(error, NodeError) else place.rank
    if rank and not isinstance(error, SampleError):  # which one rank alone has raised
        from ddp_lab.config.causes import WAIT_FOR_CAUSE

        time.sleep(WAIT_FOR_CAUSE)
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:  # no launcher would have ended this rank
            return
    is_own = isinstance(error, (ConfigError, SampleError))
    message = str(error) if is_own else explain(error)
    note(error=message)
    show(f"error: {message}", code=REFUSED)


def explain(error: Exception) -> str:
    """Return a one-line message for an error of Hydra that `check_overrides` does not foresee."""
    text = " ".join(str(error).split())
    without_link = text.partition(" See https")[0].rstrip(".")
    return f"{without_link}. {HELP}"
