"""Hydra's composition of a config with its slow steps cached, for the processes of the tests.

Each start of train.py composes two configs. That takes 0.25 s of CPU time, of which nearly all is
spent on reading the same files of conf/ and merging them in the same way: only the overrides of
keys, which Hydra applies last, differ from one test to the next. Most of these are in many tests,
and parsing one takes 2 ms. The processes share what they have composed and parsed through files.
The files of a user, which --config-dir names, are always read. Importing this module changes Hydra
in this process and in its forks.
"""

import copy
import dataclasses
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import CONF
from hydra._internal import config_loader_impl
from hydra._internal.config_repository import (
    CachingConfigRepository,
    ConfigRepository,
    IConfigRepository,
)
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig
from warm import VARIABLE

from ddp_lab.config import compose

ConfigLoader = config_loader_impl.ConfigLoaderImpl
load_config = ConfigRepository.load_config
merge = ConfigLoader._compose_config_from_defaults_list
parse_rule = OverridesParser.parse_rule
FIXED = {str(CONF), str(compose.CONF)}
CACHE: dict[str, bytes] = {}
PARSED: dict[str, bytes] = {}


def sources_of(repository: IConfigRepository) -> tuple[Any, ...] | None:
    """Return what identifies the files that configs are read from; None if they may change."""
    sources = repository.get_sources()
    if any(source.scheme() == "file" and source.path not in FIXED for source in sources):
        return None
    # plugins, and some tests, register configs in Hydra's store
    stored = len(ConfigStore.instance().repo)
    return stored, *((source.provider, source.path) for source in sources)


def remembered(kind: str, repo: IConfigRepository, choice: Any, make: Callable[[], Any]) -> Any:
    """Return a copy of what `make` once returned for a choice of the files of `repo`."""
    sources = sources_of(repo)
    if sources is None:
        return make()
    key = hashlib.sha256(repr((kind, sources, choice)).encode()).hexdigest()
    if key not in CACHE:
        CACHE[key] = shared(f"composed-{key}", lambda: pickle.dumps(make()))
    return pickle.loads(CACHE[key])


def shared(name: str, make: Callable[[], bytes]) -> bytes:
    """Return the contents of a file in the folder of the server of warm.py, which is written if it
    does not exist.
    """
    if VARIABLE not in os.environ:
        return make()
    path = Path(os.environ[VARIABLE], name)
    if not path.exists():
        written = path.with_name(f"{name}.{os.getpid()}")
        written.write_bytes(make())
        written.rename(path)
    return path.read_bytes()


def quick_load_config(self: ConfigRepository, config_path: str) -> Any:
    return remembered("file", self, config_path, lambda: load_config(self, config_path))


def quick_merge(self: ConfigLoader, defaults: list[Any], repo: IConfigRepository) -> DictConfig:
    return remembered("merged", repo, defaults, lambda: merge(self, defaults, repo))


def quick_defaults_list(
    repo: IConfigRepository, config_name: str, overrides_list: list[Override], **options: bool
) -> DefaultsList:
    """Return the chosen files and, in order, the overrides that are not about such a choice."""
    if any(override.is_sweep_override() for override in overrides_list):
        return create_defaults_list(repo, config_name, overrides_list, **options)
    choices = []
    of_keys = []
    for override in overrides_list:
        is_choice = repo.group_exists(override.key_or_group)
        if is_choice:
            choices.append(override)
        if not is_choice or isinstance(override.value(), dict):
            of_keys.append(override)
    composed = remembered(
        "defaults",
        repo,
        (config_name, [override.input_line for override in choices], options),
        lambda: create_defaults_list(repo, config_name, choices, **options),
    )
    return dataclasses.replace(composed, config_overrides=of_keys)


def quick_parse_rule(self: OverridesParser, text: str, rule_name: str) -> Any:
    """Return a copy of what a parser once returned for an override without a path."""
    if rule_name != "override" or "/" in text:
        return parse_rule(self, text, rule_name)
    if text not in PARSED:
        key = hashlib.sha256(text.encode()).hexdigest()
        PARSED[text] = shared(
            f"parsed-{key}", lambda: pickle.dumps(parse_rule(self, text, rule_name))
        )
    return pickle.loads(PARSED[text])


def quick_init(self: CachingConfigRepository, delegate: ConfigRepository) -> None:
    self.delegate = copy.copy(delegate)  # of which only the list of sources is replaced later
    self.cache = {}


ConfigRepository.load_config = quick_load_config
ConfigLoader._compose_config_from_defaults_list = quick_merge
CachingConfigRepository.__init__ = quick_init
OverridesParser.parse_rule = quick_parse_rule
config_loader_impl.create_defaults_list = quick_defaults_list
