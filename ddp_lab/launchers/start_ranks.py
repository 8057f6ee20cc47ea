"""`ddp-lab train --nproc N`: start ranks by torch's launcher, and report how they ended.

The options are torchrun's, and the ranks those that `torchrun --nproc_per_node=N train.py` starts.
What differs is the end: torchrun prints a summary of all ranks and a traceback of its own, whoever
made which mistake.
"""

import logging
import os
import re
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from hydra._internal.utils import get_args_parser as hydra_parser  # pyright: ignore[reportPrivateUsage]
from hydra.utils import get_object
from omegaconf import DictConfig

from ddp_lab.config.check import check
from ddp_lab.config.errors import ConfigError, describe_error
from ddp_lab.config.worlds import check_world
from ddp_lab.launchers.arguments import Parser
from ddp_lab.launchers.command import PREEMPTED, REFUSED, quote_faults
from ddp_lab.launchers.command_line import compose_config, split_config_dir
from ddp_lab.launchers.short_run import ENTRY
from ddp_lab.world.process import note, show

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# With it rank 0 opens a store of its own at each start of the ranks. Without it, torch (2.15) gives
# the address of the agents' store only to those agents that take part in the first round: one that
# is started again later does not find the others. On one machine there is no other agent, and the
# agent's store is better: it has its port from the beginning. That of rank 0 would be looked for
# seconds before rank 0 opens it, and in between another program may take it. Of two H200s on which
# ten launches started at once, a rank of one met the store of another.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
# which reach the ranks; each rank saves and exits
SIGNALS = "SIGINT,SIGTERM,SIGUSR1,SIGHUP,SIGQUIT"
# of other signals 128 + number, as in a shell
EXIT_CODES = {signal.SIGTERM: PREEMPTED, signal.SIGUSR1: PREEMPTED}
C10D_PORT = 29400  # of torch, where --rdzv-endpoint has none
STATIC_PORT = 29500  # the same without --master-port
LOCALHOST = "127.0.0.1"  # torch's default of --master-addr
ADDRESS_VARIABLE = "PET_MASTER_ADDR"  # from which torch reads --master-addr
PORT_VARIABLE = "PET_MASTER_PORT"  # the same of --master-port
IN_USE = "the port is in use; choose another one, the same on every machine"
END = ["", ""]  # after the arguments: the last option takes the first one if it has no value


def read_options(arguments: list[str]) -> tuple[Namespace | None, list[str]]:
    """Return the options of the launch, or None to train in this process, and Hydra's arguments.

    The default of --nproc is the number of GPUs.

    Raises:
        ConfigError: the config or an option is wrong.
    """
    config_dir, others = split_config_dir(arguments)
    of_hydra = re.findall(r"--[\w-]+", hydra_parser().format_usage())
    flags = [
        each for each in others if re.match("-[a-z]", each) or each.partition("=")[0] in of_hydra
    ]
    unknown = [each for each in others if each.startswith("--") and each not in flags]
    if flags or "RANK" in os.environ:
        if unknown:
            sweep = "ddp-lab train -m hydra.launcher.nproc_per_node=N ..."
            other = flags[0] if flags else "torchrun, which started this process"
            raise ConfigError(
                f"{unknown[0]}: cannot be combined with {other}. The ranks of a sweep are started "
                f"by `{sweep}`"
            )
        return None, arguments

    if unknown:
        check_early(others, config_dir)
    options, overrides = parse(others) if unknown else (None, others)
    if options:
        choose_rendezvous(options)
        check_port(options)
    cfg = compose_config(quote_faults(overrides), config_dir)
    check(cfg)  # before the ranks are started, which takes seconds
    ranks = count_ranks(cfg.strategy["_target_"], cfg.device)
    if ranks > 1 and not options:
        options, _ = parse(["--standalone"])

    if options:
        options.nproc_per_node = options.nproc_per_node or str(ranks)
        check_numbers(cfg, options.nproc_per_node, options.nnodes)
    return options, overrides if config_dir is None else ["--config-dir", config_dir, *overrides]


def check_early(arguments: list[str], config_dir: str | None) -> None:
    """Check that a launch fits the config before torch is imported, if its options are simple.

    `read_options` checks every launch, but parsing all options of torchrun imports torch.

    Args:
        arguments: Overrides and options, without --config-dir.
        config_dir: The directory of the user's own yaml, if there is one.

    Raises:
        ConfigError: The config has a mistake, or the number of ranks does not fit it.
    """
    parser = Parser("ddp-lab train", None, add_help=False, allow_abbrev=False)
    for option in ("--nproc", "--nproc-per-node", "--nproc_per_node"):
        parser.add_argument(option, dest="nproc", nargs="?")  # `parse` reports a missing value
    parser.add_argument("--nnodes", default="1")
    for option in ("--rdzv-endpoint", "--max-restarts", "--rdzv-id"):
        parser.add_argument(option, f"--{option[2:].replace('-', '_')}")
    parser.add_argument("--standalone", action="store_true")
    simple, overrides = parser.parse_known_args(arguments)
    if simple.nproc and not any(each.startswith("-") for each in overrides):
        check_numbers(
            compose_config(quote_faults(overrides), config_dir), simple.nproc, simple.nnodes
        )


def check_numbers(cfg: DictConfig, nproc: str, nnodes: str) -> None:
    """Check that the options --nproc and --nnodes fit the config, if they are numbers.

    Raises:
        ConfigError: As of `check_world`.
    """
    if nproc.isdecimal() and nnodes.isdecimal() and int(nproc) and int(nnodes):
        check_world(cfg, int(nproc), int(nnodes))


def launch_parser() -> Parser:
    """Return torchrun's parser, with --nproc as another name of --nproc-per-node."""
    # not at the top of the file: most mistakes are reported without torch
    from torch.distributed.run import get_args_parser

    parser = Parser(
        "ddp-lab train", None, parents=[get_args_parser()], add_help=False, allow_abbrev=False
    )
    parser.add_argument("--nproc", dest="nproc_per_node")
    # Some releases of torch have a port by default, which could not be told from one that was asked
    # for.
    port = os.environ.get(PORT_VARIABLE)
    parser.set_defaults(
        nproc_per_node=None, master_addr=None, master_port=port, signals_to_handle=SIGNALS
    )
    return parser


def parse(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Return torchrun's options, which may be between the overrides, and the overrides.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
    """
    parser = launch_parser()
    options = Namespace()
    overrides = list[str]()
    rest = [*arguments, *END]
    while rest:  # the parser stops at the first override, and returns what follows it unread
        options = parser.parse_args(rest, options)
        overrides.append(options.training_script)
        rest = options.training_script_args
    if overrides[-2:] != END:
        raise ConfigError(f"{arguments[-1]}: expected a value; see ddp-lab train --help")
    if options.nproc_per_node == "0":
        raise ConfigError("--nproc 0: must be an integer of at least 1")
    return options, overrides[:-2]


def choose_rendezvous(options: Namespace) -> None:
    """Choose how the ranks find each other: without an address it is this machine alone.

    On one machine they meet at the port of --master-port, or else at a free one.

    Raises:
        ConfigError: there is no address for several machines, or its host is unknown, which torch
            would try for minutes; or --master-port would not be used.
    """
    require_port_is_used(options)
    if is_large(options):
        options.master_addr = options.master_addr or os.environ.get(ADDRESS_VARIABLE)
    elif options.master_port:
        options.master_addr = options.master_addr or LOCALHOST
    address = options.rdzv_endpoint or options.master_addr
    if address:
        check_host(address, has_port=bool(options.rdzv_endpoint))
    elif is_large(options):
        raise ConfigError(
            f"--nnodes {options.nnodes}: needs --rdzv-endpoint HOST:PORT, the same on every "
            "machine: a port of one of them"
        )

    if not (options.rdzv_endpoint or options.master_port or is_large(options)):
        options.standalone = True
        options.master_addr = None
        return
    options.master_port = options.master_port or STATIC_PORT
    # torch's default, which is for --master-addr
    if options.rdzv_endpoint and options.rdzv_backend == "static":
        options.rdzv_backend = "c10d"


def check_host(address: str, has_port: bool) -> None:
    """Check that the host of an address is known.

    Raises:
        ConfigError: It is not.
    """
    # IPv6 addresses are in brackets
    host = re.sub(r"\]?:\d+$|^\[", "", address) if has_port else address
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"{address}: cannot be resolved on {socket.gethostname()} ({error.strerror})"
        ) from None


def require_port_is_used(options: Namespace) -> None:
    """Check that no other option decides the port, for which torch would ignore --master-port.

    It may do so where a scheduler has set the environment variable of --master-port.

    Raises:
        ConfigError: One does.
    """
    port = options.master_port
    if port is None or str(port) == os.environ.get(PORT_VARIABLE):
        return
    deciding = ""
    if options.standalone:
        deciding = "--standalone, which takes a free port"
    elif options.rdzv_endpoint:
        deciding = f"--rdzv-endpoint {options.rdzv_endpoint}, which sets the port"
    elif options.rdzv_backend != "static":
        deciding = f"--rdzv-backend {options.rdzv_backend}, which takes --rdzv-endpoint HOST:PORT"
    if deciding:
        raise ConfigError(
            f"--master-port {port}: cannot be combined with {deciding}. Leave one of them out"
        )


def meeting_point(options: Namespace) -> tuple[str, int]:
    """Return host and port of a launch on several machines, by default with torch's ports."""
    if not options.rdzv_endpoint:
        return options.master_addr, options.master_port
    text = options.rdzv_endpoint
    port = re.search(r":(\d+)$", text)
    host = re.sub(r"\]?:\d+$|^\[|\]$", "", text)
    return host, int(port[1]) if port else C10D_PORT


def check_port(options: Namespace) -> None:
    """Check that no other program has the port at which the launchers are to meet.

    torch would wait for it, for minutes. The check comes before that of the config, which takes
    seconds.

    Raises:
        ConfigError: One has it.
    """
    if options.standalone or options.rdzv_backend not in ("static", "c10d"):
        return
    from ddp_lab.launchers.waiting import is_free, is_free_or_store

    host, port = meeting_point(options)
    opens_port = options.rdzv_backend == "static" and options.node_rank == 0
    if not (is_free(host, port) if opens_port else is_free_or_store(host, port)):
        raise ConfigError(f"the ranks were not started: {host}:{port}: {IN_USE}")


def is_large(options: Namespace) -> bool:
    """Return whether a launch is to have several machines: --nnodes is N or MIN:MAX."""
    return options.nnodes.rpartition(":")[2] != "1"


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


def start_ranks(
    options: Namespace, arguments: list[str], entry: Sequence[str] = tuple(ENTRY)
) -> int:
    """Start the ranks of this machine, wait for them, and return the exit code of the command.

    Args:
        options: of the launch.
        arguments: of the program.
        entry: the program of a rank, by default train.py.

    Raises:
        ConfigError: torch refuses the value of an option.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import run

    if is_large(options):
        os.environ.setdefault(OWN_STORE, "1")
    if "LOGLEVEL" not in os.environ:  # torch's variable
        logging.disable()  # torch logs what is reported below, with a time and the source file
    try:
        with waiting_for_machines(options), folder_of_torch(options):
            run(launch_parser().parse_args([*entry, *arguments], options))
    except ChildFailedError as error:
        return report_failure(error.failures)
    except SignalException as error:
        return EXIT_CODES.get(error.sigval, 128 + error.sigval)
    except (ValueError, AssertionError) as error:  # of an option
        raise ConfigError(f"the ranks were not started: {describe_error(error)}") from None
    except RendezvousError as error:  # at the start, or later, because another machine has left
        show(
            "error: no connection to the launchers of the other machines "
            f"({describe_error(error)}). If the ranks were already running, the output of another "
            "machine has the first error",
            secondary=True,
        )
        return 1
    except (DistError, OSError) as error:
        in_use = "EADDRINUSE" in str(error)  # torch has no class for it
        advice = ""
        if in_use:
            advice = f"{IN_USE}. "
        show(f"error: the ranks were not started: {advice}{describe_error(error)}")
        return 1
    return 0


@contextmanager
def waiting_for_machines(options: Namespace) -> Generator[None]:
    """Where there are several machines, say in the body that it waits, and act on signals then."""
    if not is_large(options):
        yield
        return
    from ddp_lab.launchers.last_wait import ended_by_signals
    from ddp_lab.launchers.waiting import announced

    host, port = meeting_point(options)
    signals = [signal.Signals[name] for name in options.signals_to_handle.split(",")]
    with announced(options.nnodes, f"{host}:{port}"), ended_by_signals(signals, int(port)):
        yield


@contextmanager
def folder_of_torch(options: Namespace) -> Generator[None]:
    """Give torch's launcher a folder for the errors of ranks, and delete it after the body.

    torch would create one in the folder for temporary files, and leave it there. With --log-dir it
    is the user's, and stays.
    """
    if options.log_dir:
        yield
        return
    with TemporaryDirectory(prefix="ddp_lab-ranks-", ignore_cleanup_errors=True) as folder:
        options.log_dir = folder
        yield


def report_failure(failures: "Mapping[int, ProcessFailure]") -> int:
    """Print the message of the rank that failed first, and return the exit code of the command.

    Args:
        failures: of this machine's ranks, by rank. Those that another rank's failure ended are
            among them.
    """
    # The content of a rank's error file; a text if it has written none.
    reported = [
        failure
        for failure in failures.values()
        if not isinstance(failure.error_file_data["message"], str)
    ]
    first = min(reported, key=order_of_failure, default=None)
    if first:
        text = first.error_file_data["message"]["extraInfo"]["py_callstack"]
        note(error=text.removeprefix("error: "))
        secondary, began = order_of_failure(first)
        code = first.error_file_data["message"].get("errorCode", 1)
        show(text, code=code, began=began, secondary=secondary)

    codes = {
        rank: failure.exitcode
        for rank, failure in sorted(failures.items())
        if failure not in reported
    }
    for rank, code in codes.items():
        # such ranks were ended because of another one
        if code not in (1, REFUSED, -signal.SIGTERM):
            if code < 0:
                how = f"was ended by {signal.Signals(-code).name}"
            else:
                how = f"ended with exit code {code}"
            if first:
                print(f"rank {rank} {how}", file=sys.stderr)
            else:
                show(f"rank {rank} {how}")
                note(error=f"rank {rank} {how}")

    if first:
        return REFUSED if first.error_file_data["message"].get("errorCode") == REFUSED else 1
    return REFUSED if REFUSED in codes.values() else 1


def order_of_failure(failure: "ProcessFailure") -> tuple[bool, float]:
    """Return what orders the failures of ranks.

    Args:
        failure: with an error file, of `show` or of torch, which has whole seconds only.
    """
    extra: dict[str, Any] = failure.error_file_data["message"]["extraInfo"]
    return order_of({"timestamp": failure.timestamp} | extra)


def order_of(extra: Mapping[str, Any]) -> tuple[bool, float]:
    """Return what orders errors: the earliest first, and last those that another has caused.

    Args:
        extra: the `extraInfo` of an error file.
    """
    return bool(extra.get("secondary")), float(extra.get("time", extra["timestamp"]))
