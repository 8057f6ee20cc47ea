"""Make one file of a sharded checkpoint, for other programs or to move it.

ddp-lab merge runs/mine              the newest checkpoint, as runs/mine/step_NNNNNNNN.pt
ddp-lab merge runs/mine --checkpoint best --output best.pt

The file is what rank 0 writes with checkpoint.format=full. resume=FILE and model.weights=FILE
accept it. It takes as much host memory as the file has bytes, in one process. Nothing is removed.
"""

import argparse
from pathlib import Path

from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.arguments import Parser, check_output, refuse_ranks, write_errors


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab merge", __doc__)
    parser.add_run("last")
    parser.add_output(
        "file to write (default: the checkpoint's name, in the run directory)", required=False
    )
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    refuse_ranks("ddp-lab merge")
    from ddp_lab.checkpoints.files import write_file
    from ddp_lab.checkpoints.find import open_checkpoint
    from ddp_lab.launchers.read_config import require_run
    from ddp_lab.run.trained import checkpoint_of
    from ddp_lab.world.runtime import Runtime

    runtime = Runtime("cpu")
    require_run(namespace.run)
    checkpoint = checkpoint_of(namespace.run, namespace.checkpoint, runtime)
    if not checkpoint.is_dir():
        raise ConfigError(f"--checkpoint {namespace.checkpoint}: {checkpoint} is one file already")

    output: Path = namespace.output or namespace.run / f"{checkpoint.resolve().stem}.pt"
    check_output(output, namespace.force)
    state = open_checkpoint(checkpoint, key="--checkpoint ").content()
    with write_errors(output):
        write_file(output, state)

    progress = state["progress"]
    print(
        f"{output}: {checkpoint}, step {progress['step']}; {output.stat().st_size / 2**20:,.1f} MiB"
    )
