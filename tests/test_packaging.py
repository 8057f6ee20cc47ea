"""What users get without a clone: the wheel, the Dockerfile, CITATION.cff and constraints.txt."""

import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path
from zipfile import ZipFile

import onnxruntime
import pytest
import yaml
from launches import ROOT, read_metrics
from packaging.requirements import Requirement
from wheels import Environment, build_wheel, copy_tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# pip takes what is installed here, and no other: the constraints are the versions of this
# environment.
OFFLINE = "PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1"
ENTRY = """
import json, ddp_lab
from ddp_lab.launchers import schedulers, short_run
command = short_run.command_of(["epochs=1"], 2)[0]
print(json.dumps([ddp_lab.__file__, command[1:], schedulers.SCRIPT.read_text()]))
"""
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
DEPENDENCIES = chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
SYSTEMS = [
    {
        "sys_platform": system,
        "platform_machine": machine,
        "python_version": python,
        "python_full_version": f"{python}.0",
    }
    for system, machine in (("linux", "x86_64"), ("darwin", "arm64"))
    for python in ("3.11", "3.12", "3.13")
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    return Environment(tmp_path_factory.mktemp("fresh") / "env", wheel)


@pytest.mark.slow
def test_wheel_contains_every_module_and_config(wheel):
    package = [path for path in (ROOT / "ddp_lab").rglob("*.py") if "conf" not in path.parts]
    expected = {str(path.relative_to(ROOT)) for path in package}
    expected |= {f"ddp_lab/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    files = (
        "py.typed",
        "launchers/train.sbatch",
        "launchers/trainjob.yaml",
        "observe/house.mplstyle",
        "run/watch.html",
    )
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


def own_project(folder: Path) -> tuple[Path, list[str]]:
    """Copy the example of a user's project, and return its folder and the commands of its README.

    Args:
        folder: for the project's folder.
    """
    example = ROOT / "examples" / "own_project"
    listed = subprocess.run(
        ["git", "ls-files"], cwd=example, check=True, capture_output=True, text=True
    ).stdout
    project = folder / "project"
    for name in listed.splitlines():
        target = project / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(example / name, target)
    readme = (project / "README.md").read_text()
    assert len(readme.splitlines()) <= 12
    return project, re.search(r"```\n(.*?)```", readme, re.DOTALL)[1].splitlines()


@pytest.mark.slow
def test_example_of_a_users_project_runs_from_the_wheel(environment, tmp_path):
    """The commands of its README, in order, in an empty directory with new interpreters."""
    project, commands = own_project(tmp_path)
    images, train, evaluate, predict, export = commands
    outputs = []
    for command in (images, train, evaluate, predict, export):
        done = environment.run(command, project)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    run = project / "runs" / "digits"
    rows = read_metrics(run)
    assert (rows[-1]["epoch"], rows[-1]["world_size"]) == (3, 2)
    # images/val is the validation set, and there is no test set
    best = min(rows, key=lambda row: row["val_loss"])
    assert best["val_accuracy"] > 0.8
    assert (
        f"best.pt, epoch {best['epoch']}: val loss {best['val_loss']:.4f} accuracy "
        f"{best['val_accuracy']:.4f} " in outputs[2]
    )
    assert outputs[2].rstrip().endswith(" on 360 samples (1 x cpu)")
    _, *rows = csv.reader((project / "predictions.csv").open())
    assert len(rows) == len(list((project / "images" / "val" / "3").iterdir()))
    assert sum(row[1] == "3" for row in rows) / len(rows) > 0.6
    (inputs,) = onnxruntime.InferenceSession(project / "digits.onnx").get_inputs()
    assert (inputs.name, inputs.shape[1:]) == ("images", [1, 32, 32])
    proof = environment.run(
        "python -c 'import ddp_lab, json, sys; print(json.dumps([ddp_lab.__file__, sys.path]))'",
        project,
    )
    file, search = json.loads(proof.stdout)
    assert file.startswith(str(environment.programs.parent))
    assert str(ROOT) not in search


@pytest.mark.extra
def test_recipe_of_a_users_project_is_swept_from_the_wheel(environment, tmp_path):
    project, (images, *_) = own_project(tmp_path)
    sweep = "ddp-lab -m --config-dir conf experiment=digits strategy=single epochs=1"
    done = environment.run(f"{images} && {sweep} hydra.sweep.dir=runs/sweep", project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "strategy=single,epochs=1: finished, val loss" in done.stdout


def test_wheel_is_what_a_package_index_accepts(wheel):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_citation_names_the_version_and_the_license_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_dockerfile_has_no_findings_of_hadolint():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_image_of_the_kubernetes_runtime_is_the_one_that_the_dockerfile_builds():
    runtime = (ROOT / "scripts" / "kubernetes" / "runtime.yaml").read_text()
    assert f"docker build --tag {re.search(r'image: (.*)', runtime)[1]} ." in DOCKERFILE


@pytest.mark.slow
def test_commands_of_the_dockerfile_install_the_package_in_a_clean_directory(tmp_path):
    """Its COPY and RUN lines, with a copy of the tree as context and a new environment as image."""
    context = tmp_path / "context"
    root = tmp_path / "image"
    copy_tree(context)
    environment = Environment(tmp_path / "env")
    work = root
    ran = 0
    for line in re.sub(r"\\\n\s*", " ", DOCKERFILE).splitlines():
        word, _, rest = line.partition(" ")
        if word == "WORKDIR":
            work = root / rest.lstrip("/")
            work.mkdir(parents=True)
        elif word == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                copied = context / source
                there = work / target
                if copied.is_dir():
                    shutil.copytree(copied, there, symlinks=True)
                else:
                    shutil.copy(copied, there)
        elif word == "RUN":
            done = environment.run(f"export {OFFLINE}; {rest}", work)
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.splitlines()[-1].startswith(f"ddp_lab {PROJECT['version']}, torch ")
            ran += 1
    assert ran == DOCKERFILE.count("\nRUN ") > 0
    shutil.rmtree(root / "opt")  # what is installed does not need the sources
    manifest = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "trainjob.yaml").read_text())[
        "spec"
    ]["trainer"]
    command = shlex.join([*manifest["command"], *manifest["args"], "--cfg", "job"])
    done = environment.run(command, work)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs_dir: /shared/runs" in done.stdout


def pins(text: str) -> list[Requirement]:
    """Return the requirements of a constraints file."""
    return [Requirement(line) for line in text.splitlines() if not line.startswith("#")]


def pinned(text: str, name: str) -> list[str | None]:
    """Return the version of a package on each of SYSTEMS; None where it has no pin or several."""
    pins_of_name = [pin for pin in pins(text) if pin.name == name]
    by_system = [
        [
            str(pin.specifier)[2:]
            for pin in pins_of_name
            if not pin.marker or pin.marker.evaluate(system)
        ]
        for system in SYSTEMS
    ]
    return [versions[0] if len(versions) == 1 else None for versions in by_system]


@pytest.mark.parametrize(
    "dependency", [each for each in DEPENDENCIES if not each.startswith(PROJECT["name"])]
)
def test_dependency_is_pinned_in_a_version_that_it_allows(dependency):
    wanted = Requirement(dependency)
    versions = pinned(CONSTRAINTS, wanted.name)
    assert all(version and wanted.specifier.contains(version) for version in versions), (
        f"run `make constraints`: {versions}"
    )


def test_constraints_are_exact_versions_that_any_index_can_serve():
    assert "make constraints" in CONSTRAINTS.splitlines()[1]
    assert all([each.operator for each in pin.specifier] == ["=="] for pin in pins(CONSTRAINTS))
    assert not any(pin.url for pin in pins(CONSTRAINTS))
