"""Print the outcome of a launch, for train.sbatch.

outcome.py LAUNCH [OVERRIDE...] prints the status that the launch with torchrun's run id LAUNCH recorded in the run directory
that the overrides of train.py determine. It does not load torch, which takes seconds on a busy disk.
"""

import json
import re
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parents[2]
WHERE = re.compile(r"\+{0,2}(name|runs_dir|experiment)=")


def outcome(launch: str, overrides: list[str]) -> str:
    """Return the `status` of status.json; "none" if this launch has not written one."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[override for override in overrides if WHERE.match(override)])
    try:
        record = json.loads(Path(cfg.runs_dir, cfg.name, "status.json").read_text())
    except OSError:
        return "none"
    return record["status"] if record["launch"] == launch else "none"  # another launch wrote it


if __name__ == "__main__":
    print(outcome(sys.argv[1], sys.argv[2:]))
