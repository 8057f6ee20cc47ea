"""What became of a launch: outcome.py LAUNCH [train.py's words] prints the status that this launch, by torchrun's run id, has
left in the run directory that the words name. For train.sbatch; torch is not loaded, which takes seconds on a busy disk."""

import json
import re
import sys
from pathlib import Path

from hydra import compose, initialize_config_dir

ROOT = Path(__file__).resolve().parents[2]
WHERE = re.compile(r"\+{0,2}(name|runs_dir|experiment)=")


def outcome(launch: str, words: list[str]) -> str:
    """`status` of its status.json; "none" where this launch has written no status."""
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        cfg = compose("config", overrides=[word for word in words if WHERE.match(word)])
    try:
        record = json.loads(Path(cfg.runs_dir, cfg.name, "status.json").read_text())
    except OSError:
        return "none"
    return record["status"] if record["launch"] == launch else "none"  # an earlier or another launch's says nothing


if __name__ == "__main__":
    print(outcome(sys.argv[1], sys.argv[2:]))
