"""Print the outcome of a launch, for train.sbatch.

python -m ddp_lab.launch.outcome LAUNCH [OVERRIDE...] prints the status that the launch with torchrun's run id LAUNCH
recorded in the run directory that the overrides determine. It does not load torch, which takes seconds on a busy disk.
"""

import json
import re
import sys
from pathlib import Path

from ddp_lab.launch.command_line import compose_config, split_config_dir

WHERE = re.compile(r"\+{0,2}(name|runs_dir|experiment)=")


def outcome(launch: str, arguments: list[str]) -> str:
    """Return the `status` of status.json; "none" if this launch has not written one."""
    config_dir, overrides = split_config_dir(arguments)
    cfg = compose_config([override for override in overrides if WHERE.match(override)], config_dir)
    try:
        record = json.loads(Path(cfg.runs_dir, cfg.name, "status.json").read_text())
    except OSError:
        return "none"
    return record["status"] if record["launch"] == launch else "none"  # another launch wrote it


if __name__ == "__main__":
    print(outcome(sys.argv[1], sys.argv[2:]))
