"""What a launch must fit is refused with one message, before the ranks and on them."""

import subprocess
import sys

import pytest
from hydra.utils import get_object
from launches import ROOT

from ddp_lab.config.build import construct
from ddp_lab.config.errors import ConfigError
from ddp_lab.config.worlds import ONE_PROCESS, check_world
from ddp_lab.launchers.command_line import compose_config
from ddp_lab.models.lenet import lenet
from ddp_lab.run.build import make_sizes
from ddp_lab.world.planned import PlannedRuntime

REFUSED = {
    ("strategy=single", 2): "strategy=single: runs in one process, and not on 2 ranks. Start",
    ("strategy=dp", 3): "strategy=dp: runs in one process, and not on 3 ranks. Start",
    ("strategy=split", 2): "strategy=split: runs in one process, and not on 2 ranks. Start",
    ("strategy=ddp batch_size=2", 4): "batch_size=2: is the global batch and must be divisible by "
    "the 4 replicas that share it; use 4, or scaling=weak",
    ("strategy=fsdp batch_size=65", 2): "batch_size=65: is the global batch and must be divisible",
    ("strategy=tp strategy.tp=2", 3): "strategy.tp=2: cannot lay 3 ranks on a mesh of dp x tp",
    ("strategy=tp strategy.tp=2 batch_size=9", 4): "batch_size=9: is the global batch and must be",
    ("strategy=ddp_pipeline strategy.pp=3", 4): "strategy.pp=3: cannot lay 4 ranks on a mesh of",
    ("strategy=mesh strategy.pp=2 strategy.tp=2", 6): "strategy.pp=2 strategy.tp=2: cannot lay 6 ",
    ("strategy=mesh strategy.shard=3", 4): "strategy.shard=3: must divide the 4 ranks along dp",
    ("strategy=pipeline strategy.num_microbatches=2", 3): "strategy.num_microbatches=2: "
    "strategy.schedule=1f1b needs at least one for each of the 3 ranks in a pipeline",
    ("strategy=pipeline strategy.num_microbatches=65", 2): "strategy.num_microbatches=65: must not "
    "exceed the 64 samples that a pipeline gets at once",
    ("strategy=ddp_pipeline batch_size=8 accumulate=2", 2): "strategy.num_microbatches=8: must not "
    "exceed the 4 samples that a pipeline gets at once",
}
ALLOWED = [
    ("strategy=single", 1),
    ("strategy=ddp batch_size=2 scaling=weak", 4),
    ("strategy=ddp batch_size=auto", 3),
    ("strategy=tp", 3),
    ("strategy=mesh strategy.tp=2 strategy.shard=null", 4),
    ("strategy=mesh strategy.num_microbatches=64 batch_size=2", 2),  # no pipeline
    ("strategy=scratch strategy._target_=mine.Scaled batch_size=3", 2),
    ("strategy=tp strategy.tp=-1", 2),  # by itself not allowed, as `check` reports
    ("strategy=ddp batch_size=-3", 2),
]


@pytest.mark.parametrize(("line", "ranks"), REFUSED)
def test_launch_that_cannot_fit_is_refused_before_the_ranks_as_on_them(line, ranks):
    cfg = compose_config(line.split(), None)
    with pytest.raises(ConfigError) as early:
        check_world(cfg, ranks, 1)
    assert str(early.value).startswith(REFUSED[line, ranks])
    with pytest.raises(ConfigError) as late:
        make_on_ranks(cfg, ranks)
    assert str(late.value) == str(early.value)


def make_on_ranks(cfg, ranks: int) -> None:
    """Make what refuses a launch on its ranks, as `run.build` does."""
    strategy = construct(
        "strategy", cfg.strategy, PlannedRuntime(ranks, ranks, "float32", 1, "cpu")
    )
    dataset = type("Dataset", (), {"train": type("Train", (), {"size": 1000})})
    sizes = make_sizes(cfg, strategy, dataset)
    strategy.partition(lenet(1, 28, 10, None), sizes.samples_at_once)


@pytest.mark.parametrize(("line", "ranks"), ALLOWED)
def test_launch_that_may_fit_is_not_refused(line, ranks):
    check_world(compose_config(line.split(), None), ranks, 1)


def test_ranks_of_all_machines_count():
    cfg = compose_config(["strategy=ddp", "batch_size=6"], None)
    check_world(cfg, 3, 2)
    with pytest.raises(ConfigError, match="by the 8 replicas"):
        check_world(cfg, 4, 2)


def test_strategies_of_one_process_are_known():
    classes = {
        path.stem: compose_config([f"strategy={path.stem}"], None).strategy["_target_"]
        for path in (ROOT / "conf" / "strategy").glob("*.yaml")
    }
    expected = {target: name for name, target in classes.items() if get_object(target).one_process}
    assert expected == ONE_PROCESS


def test_launch_is_refused_without_importing_torch():
    program = """
import sys
from ddp_lab.config.build import construct
from ddp_lab.config.errors import ConfigError
from ddp_lab.launchers.start_ranks import read_options
try:
    read_options(sys.argv[1:])
except ConfigError as error:
    print(error)
assert "torch" not in sys.modules
"""
    for line, message in {
        "--nproc 2 strategy=single": "strategy=single: runs in one process",
        "--nproc=4 strategy=ddp batch_size=2 --nnodes 2 --rdzv-endpoint=a:1": "batch_size=2: is ",
    }.items():
        done = subprocess.run(
            [sys.executable, "-c", program, *line.split()],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(message)
