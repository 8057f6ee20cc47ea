"""ddp_lab installed from its wheel works outside the clone."""

import json
from zipfile import ZipFile

import pytest
from launches import ROOT
from wheels import Environment, build_wheel

ENTRY = """
import json, ddp_lab
from ddp_lab.launch import slurm, torchrun
print(json.dumps([ddp_lab.__file__, torchrun.world_command(["epochs=1"], 2)[1:], slurm.SCRIPT.read_text()]))
"""
# The same value as in the composed config of a clone: a group of the user's that overrides conf/.
EXPERIMENT = "# @package _global_\nepochs: 7\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("fresh") / "env", wheel)


def test_wheel_contains_every_module_and_config(wheel):
    package = [path for path in (ROOT / "ddp_lab").rglob("*.py") if "conf" not in path.parts]
    expected = {str(path.relative_to(ROOT)) for path in package}
    expected |= {f"ddp_lab/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    expected |= {"ddp_lab/launch/train.sbatch", "ddp_lab/observe/house.mplstyle"}
    contained = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert len(expected) > 100
    assert contained == expected


def test_wheel_relaunches_the_module_and_has_the_slurm_script(environment, tmp_path):
    (tmp_path / "train.py").touch()  # a file of the user's
    done = environment.run(f"python -c '{ENTRY}'", tmp_path)
    assert done.returncode == 0, done.stderr
    file, command, script = json.loads(done.stdout)
    assert file.startswith(str(environment.programs.parent))
    assert command == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "ddp_lab", "epochs=1"]
    assert script == (ROOT / "scripts" / "slurm" / "train.sbatch").read_text()


def test_wheel_composes_the_config_with_yaml_of_the_user(environment, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "seven.yaml").write_text(EXPERIMENT)
    done = environment.run("python -m ddp_lab name=x --config-dir own experiment=seven --cfg job", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"epochs: 7", "name: x", "runs_dir: runs"} <= set(done.stdout.splitlines())
