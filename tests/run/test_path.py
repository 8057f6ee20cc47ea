"""How far it is from the command to what it is about: files that are loaded, and files that a call passes through."""

import json
from pathlib import Path

from launches import SMALL, main_in_world
from paths import after_each, files_on_stack
from torch.nn.parallel import DistributedDataParallel
from worlds import run_world

MOST_TO_DDP = 8  # files from train.py to the constructor of torch's class, with train.py


def way_to_ddp(folder: Path) -> list[str]:
    """Train with strategy=ddp; return the files on the way to torch's class."""
    found: list[list[str]] = []
    after_each(DistributedDataParallel, "__init__", lambda: found.append(files_on_stack()))
    main_in_world(*SMALL, "strategy=ddp", "epochs=1", f"runs_dir={folder}", "name=run")
    return found[0]


def test_way_to_distributed_data_parallel_is_short(tmp_path):
    way = run_world(2, way_to_ddp, tmp_path)[0]
    assert way[-1] == "strategies/ddp.py"
    assert not [name for name in way if name.startswith(("lab/", "advise/"))]
    assert len(["train.py", *way]) <= MOST_TO_DDP, json.dumps(way, indent=1)
