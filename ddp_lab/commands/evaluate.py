"""Evaluate a trained run under any strategy: the metrics that training logged, from a checkpoint.

ddp-lab evaluate runs/mine                                     on the test set, if it has one
ddp-lab evaluate runs/mine split=val                           on the validation set
ddp-lab evaluate runs/mine strategy=single data.root=/data     any override of the run's config
ddp-lab evaluate runs/mine --checkpoint best --json best.json
torchrun --nproc_per_node=2 -m ddp_lab evaluate runs/mine strategy=ddp   the same numbers

The weights are the best ones if a validation set chose them, else those of the newest checkpoint.
It prints one line, and writes nothing but the file of --json.
"""

import argparse
from pathlib import Path

from ddp_lab.config.errors import count
from ddp_lab.launchers.arguments import Parser, check_folder, write_errors
from ddp_lab.world.process import env_int


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser("ddp-lab evaluate", __doc__)
    parser.add_run()
    parser.add_overrides("split=val or test; Hydra overrides of the run's config, as strategy=ddp")
    parser.add_config_dir()
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the metrics to this file, too"
    )
    return parser.parse_intermixed_args(arguments)


def main(arguments: list[str]) -> None:
    namespace = parse(arguments)
    if namespace.json and env_int("RANK", 0) == 0:
        check_folder(namespace.json, "--json")
    from ddp_lab.launchers.read_config import read_config
    from ddp_lab.observe.metrics_file import describe_metrics, without_nan
    from ddp_lab.resilience.run_directory import write_json
    from ddp_lab.run.build_trained import evaluate_run
    from ddp_lab.world.runtime import Runtime

    splits = [
        override.removeprefix("split=")
        for override in namespace.overrides
        if override.startswith("split=")
    ]
    overrides = [override for override in namespace.overrides if not override.startswith("split=")]
    cfg = read_config(namespace.run, overrides, namespace.config_dir)
    with Runtime(cfg.device, cfg.precision, cfg.timeout) as runtime:
        metrics = evaluate_run(
            cfg, runtime, namespace.run, namespace.checkpoint, splits[-1] if splits else None
        )

    if runtime.is_main:
        where = f"on {count(metrics['samples'], 'sample')} ({metrics['where']})"
        print(
            f"{metrics['checkpoint']}, epoch {metrics['epoch']}: {describe_metrics(metrics)} "
            f"{where}"
        )
        if namespace.json:
            with write_errors(namespace.json, "--json"):
                write_json(namespace.json, without_nan(metrics))
