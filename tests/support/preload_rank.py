"""The modules that every rank needs, and what else is slow only the first time.

Slurm jobs import these alone.
"""

import functools
import gc
import importlib
import importlib.metadata
import inspect
import multiprocessing.popen_fork  # noqa: F401
import pkgutil
import string

import empty_pictures
import hydra
import hydra._internal.core_plugins
import hydra._internal.hydra
import launches
import PIL.Image
import psutil  # noqa: F401
import quick_compose  # noqa: F401
import small_digits
import torch
import torch.distributed.rendezvous
import torch.distributed.run
import torch.utils.serialization.config
import torch.utils.tensorboard
from hydra.core.override_parser.overrides_parser import OverridesParser

import ddp_lab
import ddp_lab.config.check

for package in (ddp_lab, hydra._internal.core_plugins):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)

# Operations that are slow only the first time: torchrun's agent calls inspect.stack(), which looks
# at the file of every loaded module (0.7 s), Hydra's parser fills its caches by the characters that
# it has seen (0.05 s), pydantic builds its validators, a process group looks for backends in all
# installed packages (0.05 s), an optimizer's step imports parts of torch.
inspect.stack()
NAMES = string.ascii_letters + string.digits + "_"
VALUES = ("1", "-0.25", "1e-3", "true", "false", "null", "[a,1,0.5]", "{a: 1, b: null}", "auto")
VALUES += (string.ascii_lowercase, string.digits, "'a b'", "/tmp/x-gw0/a.b_c", "a:1", "")
OverridesParser.create().parse_overrides(
    [f"{name}={value}" for value in VALUES for name in ("a", "a.b", "+a.b", "++a", NAMES)]
)
importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
importlib.metadata.entry_points(group="torch.distributed.backends")
with hydra.initialize_config_dir(str(launches.ROOT / "conf"), version_base="1.3"):
    cfg = hydra.compose(
        "config",
        ["strategy=ddp", "name=warm", "optimizer.lr=0.1", "batch_size=24", "data.mean=[0.5]"],
    )
ddp_lab.config.check.check(cfg)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
optimizer.step()
PIL.Image.preinit()

small_digits.use_few_digits()
empty_pictures.draw_none()

# Before it composes the config, Hydra composes it once more, only to read hydra.mode, which conf/
# leaves at null.
hydra._internal.hydra.Hydra.get_mode = lambda *_, **__: None

# by default 700 new objects start a collection, which takes a twentieth of the time
gc.set_threshold(20_000)
