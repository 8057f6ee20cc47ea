"""ddp_lab installed from its wheel works outside the clone."""

import csv
import json
import re
import shutil
from zipfile import ZipFile

import onnxruntime
import pytest
from launches import ROOT, read_metrics
from wheels import Environment, build_wheel

ENTRY = """
import json, ddp_lab
from ddp_lab.launchers import schedulers, short_run
print(json.dumps([ddp_lab.__file__, short_run.command_of(["epochs=1"], 2)[0][1:], schedulers.SCRIPT.read_text()]))
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
    files = ("py.typed", "launchers/train.sbatch", "launchers/trainjob.yaml", "observe/house.mplstyle")
    expected |= {f"ddp_lab/{name}" for name in files}
    contained = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert len(expected) > 100
    assert contained == expected


def test_wheel_relaunches_the_module_and_has_the_slurm_script(environment, tmp_path):
    (tmp_path / "train.py").touch()  # a file of the user's
    done = environment.run(f"python -c '{ENTRY}'", tmp_path)
    assert done.returncode == 0, done.stderr
    file, command, script = json.loads(done.stdout)
    assert file.startswith(str(environment.programs.parent))
    assert command == ["-m", "ddp_lab", "train", "--nproc", "2", "epochs=1"]
    assert script == (ROOT / "scripts" / "slurm" / "train.sbatch").read_text()


def test_wheel_composes_the_config_with_yaml_of_the_user(environment, tmp_path):
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "seven.yaml").write_text(EXPERIMENT)
    done = environment.run("ddp-lab name=x --config-dir own experiment=seven --cfg job", tmp_path)
    assert done.returncode == 0, done.stderr
    assert {"epochs: 7", "name: x", "runs_dir: runs"} <= set(done.stdout.splitlines())


@pytest.mark.slow
def test_example_of_a_users_project_runs_from_the_wheel(environment, tmp_path):
    """The commands of its README, in order, in an empty directory with new interpreters."""
    project = tmp_path / "project"
    tracked = environment.run(f"git -C {ROOT} ls-files examples/own_project", tmp_path).stdout.splitlines()
    for name in tracked:
        (target := project / name.removeprefix("examples/own_project/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    readme = (project / "README.md").read_text()
    assert len(readme.splitlines()) <= 12
    images, train, evaluate, predict, export = re.search(r"```\n(.*?)```", readme, re.DOTALL)[1].splitlines()
    outputs = []
    for command in (images, train, evaluate, predict, export):
        done = environment.run(command, project)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    run = project / "runs" / "digits"
    rows = read_metrics(run)
    assert (rows[-1]["epoch"], rows[-1]["world_size"]) == (3, 2)
    best = min(rows, key=lambda row: row["val_loss"])  # images/val is the validation set, and there is no test set
    assert best["val_accuracy"] > 0.8
    assert f"best.pt, epoch {best['epoch']}: val loss {best['val_loss']:.4f} accuracy {best['val_accuracy']:.4f} " in outputs[2]
    assert outputs[2].rstrip().endswith(" on 360 samples (1 x cpu)")
    _, *rows = csv.reader((project / "predictions.csv").open())
    assert len(rows) == len(list((project / "images" / "val" / "3").iterdir()))
    assert sum(row[1] == "3" for row in rows) / len(rows) > 0.6
    (inputs,) = onnxruntime.InferenceSession(project / "digits.onnx").get_inputs()
    assert (inputs.name, inputs.shape[1:]) == ("images", [1, 32, 32])
    proof = environment.run("python -c 'import ddp_lab, json, sys; print(json.dumps([ddp_lab.__file__, sys.path]))'", project)
    file, search = json.loads(proof.stdout)
    assert file.startswith(str(environment.programs.parent))
    assert str(ROOT) not in search
    sweep = "ddp-lab -m hydra/launcher=torchrun --config-dir conf experiment=digits"
    done = environment.run(f"{sweep} strategy=single epochs=1 hydra.sweep.dir=runs/sweep", project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strategy=single,epochs=1: finished, val loss" in done.stdout
