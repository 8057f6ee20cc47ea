"""What a user sees when a command fails: for the user's own mistakes one message and exit code 2, else the traceback, once."""

import faulthandler
import functools
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from ddp_lab.config.errors import ConfigError, NodeError
from ddp_lab.config.messages import unknown_key
from ddp_lab.world.process import env_int, show

CONF = Path(__file__).parents[2] / "conf"
REFUSED = 2  # exit code of a command that reports a mistake of the user


def user_errors(main: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: a user's mistake becomes one message and exit code 2 (torchrun's own exit code is 1 whatever
    its workers' are). Once inside `hydra.main`, for the command's mistakes, and once outside, for the words Hydra refuses."""

    @functools.wraps(main)
    def run(*args: Any) -> None:
        sys.path.append(str(Path(__file__).parent))  # where Hydra's plug-ins are, which it takes by their package
        os.environ["HYDRA_FULL_ERROR"] = "1"  # let exceptions through: Hydra would print them on every rank
        # Hydra takes a comma for a sweep.
        sys.argv = [re.sub(r"^inject=(\w+@[\w=,]+)$", r'inject="\1"', word) for word in sys.argv]
        try:
            refuse_sweep()
            main(*args)
        except (ConfigError, HydraException, OmegaConfBaseException) as error:
            report(error)
            sys.exit(REFUSED)
        except ValueError as error:
            if not str(error).startswith("Config group override"):  # how Hydra refuses model=null
                raise
            report(ConfigError(f"{' '.join(map(str, sys.argv[1:]))}: a group cannot be null or a list. {error}"))
            sys.exit(REFUSED)
        except KeyboardInterrupt:
            sys.exit(130)  # as shells have it: 128 + SIGINT

    return run


def record(main: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: under torchrun an exception goes into the summary that torchrun closes with (torch's `record`)."""

    @functools.wraps(main)
    def run(*args: Any) -> None:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            faulthandler.enable()  # as torch's does
            return main(*args)
        from torch.distributed.elastic.multiprocessing.errors import record  # loads torch: 1.5 s, too long for --help

        return record(main)(*args)

    return run


def refuse_sweep() -> None:
    if env_int("WORLD_SIZE", 1) > 1 and {"-m", "--multirun"} & set(sys.argv):
        raise ConfigError(
            "--multirun: the jobs would share one world of ranks and its state. Start `python train.py -m "
            "hydra/launcher=torchrun hydra.launcher.nproc_per_node=N ...`, which gives every job a world of its own"
        )


def report(error: Exception) -> None:
    """Prints the message on one rank. Under torchrun it goes into the summary that torchrun closes with."""
    if env_int("LOCAL_RANK" if isinstance(error, NodeError) else "RANK", 0) != 0:
        time.sleep(10)  # torchrun ends us when the reporting rank has exited; exiting first would end that one unheard
        return
    show(f"error: {error if isinstance(error, ConfigError) else explain(error)}")


def explain(error: Exception) -> str:
    """Hydra's own error in one line: the word, and what is allowed in its place.

    Which key is unknown Hydra says in its message alone.
    """
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = error.missing_cfg_file.rpartition("/")
        return f"{group}={option}: there is no such option; allowed: {', '.join(sorted(error.options))}"
    if unknown := re.match(r"Could not override '([\w.@/]+)'", text):
        return explain_unknown_key(unknown[1])
    return text.split(" See https")[0] + ". Overrides look like key=value: python train.py --help"


def explain_unknown_key(key: str) -> str:
    groups = {path.name for path in CONF.iterdir() if path.is_dir()}
    choices = [word for word in sys.argv[1:] if word.split("=")[0] in groups]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        node = compose("config", overrides=choices)
    path = key.split(".")
    while len(path) > 1 and isinstance(node.get(path[0]), DictConfig):
        node = node[path.pop(0)]
    prefix = key.removesuffix(".".join(path))
    allowed = [name for name in node if not name.startswith("_")]
    value = next((word.split("=", 1)[1] for word in sys.argv[1:] if word.split("=")[0] == key), "")
    return unknown_key(key, value, prefix, allowed)
