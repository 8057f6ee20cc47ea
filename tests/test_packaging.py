"""What the package index, the image and those who cite get: the wheel's metadata, the Dockerfile, CITATION.cff."""

import email
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from launches import ROOT
from wheels import Environment, build_wheel, copy_tree

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
# pip takes what is installed here, and no other: the constraints are the versions of this environment.
OFFLINE = "PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 PIP_DISABLE_PIP_VERSION_CHECK=1"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_wheel_is_what_a_package_index_accepts(wheel):
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", wheel], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_metadata_of_the_wheel_is_complete(wheel):
    with ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        licenses = [each for each in archive.namelist() if each.endswith("licenses/LICENSE")]
    assert len(licenses) == 1
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert set(metadata.get_all("Provides-Extra")) == {*PROJECT["optional-dependencies"]}
    assert {"Operating System :: POSIX :: Linux", "Typing :: Typed"} <= set(metadata.get_all("Classifier"))
    assert metadata["Keywords"]
    assert metadata.get_payload().startswith("# ddp_lab\n")


def test_citation_names_the_version_and_the_license_of_the_package():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["title"], citation["version"]) == (PROJECT["name"], PROJECT["version"])
    assert citation["license"] == PROJECT["license"]
    assert citation["authors"] == PROJECT["authors"]


def test_dockerfile_has_no_findings_of_hadolint():
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_image_of_the_kubernetes_runtime_is_the_one_that_the_dockerfile_builds():
    runtime = (ROOT / "scripts" / "kubernetes" / "runtime.yaml").read_text()
    assert f"docker build --tag {re.search(r'image: (.*)', runtime)[1]} ." in DOCKERFILE


def test_commands_of_the_dockerfile_install_the_package_in_a_clean_directory(tmp_path):
    """Its COPY and RUN lines, with a copy of what git tracks as the build context and a new environment as the image."""
    context, root = tmp_path / "context", tmp_path / "image"
    copy_tree(context)
    environment = Environment(tmp_path / "env")
    work, ran = root, 0
    for line in re.sub(r"\\\n\s*", " ", DOCKERFILE).splitlines():
        word, _, rest = line.partition(" ")
        if word == "WORKDIR":
            work = root / rest.lstrip("/")
            work.mkdir(parents=True)
        elif word == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                copied, there = context / source, work / target
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
    manifest = yaml.safe_load((ROOT / "scripts" / "kubernetes" / "trainjob.yaml").read_text())["spec"]["trainer"]
    command = shlex.join([*manifest["command"], *manifest["args"], "--cfg", "job"])
    done = environment.run(command, work)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs_dir: /shared/runs" in done.stdout
