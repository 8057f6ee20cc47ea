"""The subpackages of ddp_lab are few, have a docstring, and import in one direction only.

Links of documents work.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from launches import ROOT

from ddp_lab.__main__ import COMMANDS

PACKAGE = ROOT / "ddp_lab"
# From the bottom up: a subpackage may import itself and those before it. The docstring of the
# package lists them.
LISTED = (
    (PACKAGE / "__init__.py")
    .read_text()
    .partition("(tests/test_layout.py):\n\n")[2]
    .partition("\n\n")[0]
)
ORDER = [*re.findall(r"^(\w+) ", LISTED, re.MULTILINE), "__main__"]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def height(module: str) -> int:
    """Return how many subpackages are below that of a module, which is named without `ddp_lab.`."""
    return ORDER.index(module.partition(".")[0])


def imports_of(path: Path) -> list[str]:
    """Return the modules of ddp_lab that a file imports, anywhere in it, without `ddp_lab.`."""
    imported = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ddp_lab":
            if (PACKAGE.parent / node.module.replace(".", "/")).is_dir():
                imported += [f"{node.module}.{name.name}" for name in node.names]
            else:
                imported.append(node.module)
        elif isinstance(node, ast.Import):
            imported += [name.name for name in node.names if name.name.startswith("ddp_lab.")]
    return [name.removeprefix("ddp_lab.") for name in imported]


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_module_imports_only_subpackages_below_its_own(path):
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    upward = [
        name
        for name in imports_of(path)
        if height(name) > height(module) or name.partition(".")[0] == "commands"
    ]
    assert not upward, f"{path} imports {upward}"


# with omegaconf or hydra; all else gets values
READS_CONFIG = ("config", "commands", "launchers")
BUILDS_RUN = {
    "run.build",
    "run.build_data",
    "run.build_model",
    "run.build_settings",
    "run.build_trained",
}
# that build several runs of one command, with changes of its config
BUILDS_SEVERAL = {
    "advise.advisor",
    "advise.fit",
    "advise.plan",
    "proof.subject",
    "proof.verify_run",
}


def test_config_is_read_in_one_place():
    def imports_config(path: Path) -> bool:
        """Whether a file imports omegaconf, hydra or the type Config, anywhere in it."""
        names = []
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                names += [f"{node.module or ''}.{name.name}" for name in node.names]
            elif isinstance(node, ast.Import):
                names += [name.name for name in node.names]
        return any(
            name.split(".")[0] in ("omegaconf", "hydra") or name == "ddp_lab.config.build.Config"
            for name in names
        )

    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in FILES}
    readers = {name for name, path in modules.items() if imports_config(path)}
    others = {name for name in readers if name.partition(".")[0] not in READS_CONFIG}
    expected = BUILDS_RUN | BUILDS_SEVERAL
    assert others == expected, "all others get values and callables, and no part of the config"


# The subpackages that others do without, with the commands that are theirs.
OPTIONAL = {
    "eject": {"commands.eject"},
    "exercises": {"commands.exercise"},
    "proof": {"commands.verify", "exercises"},
}


@pytest.mark.parametrize("name", OPTIONAL)
def test_nothing_else_imports_an_optional_subpackage(name):
    """Without it and its commands all others work."""
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in FILES}
    importers = {
        module
        for module, path in modules.items()
        if any(imported.partition(".")[0] == name for imported in imports_of(path))
    }
    theirs = OPTIONAL[name]
    others = {
        module for module in importers if not {module, module.partition(".")[0]} & {name, *theirs}
    }
    assert not others
    scripts = [path for path in (ROOT / "scripts").glob("*.py") if name in imports_of(path)]
    assert not scripts


def test_models_are_known_to_nobody_above_them():
    """What a strategy or an option needs of a layer, the layer says by an attribute or its type."""
    configs = "".join(path.read_text() for path in (ROOT / "conf/model").glob("*.yaml"))
    models = set(re.findall(r"^_target_: ddp_lab\.(models\.\w+)\.", configs, re.MULTILINE))
    assert len(models) > 5
    above = [
        path for path in FILES if height(path.relative_to(PACKAGE).parts[0]) > height("models")
    ]
    importers = [path.name for path in above if models & {*imports_of(path)}]
    assert not importers


def assigned_attributes(path: Path) -> list[str]:
    """Return the assignments of a file to attributes of a strategy or a task from outside of it."""
    assigned = []
    for node in ast.walk(tree_of(path)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Attribute):
                name = ast.unparse(target.value).rpartition(".")[2]
                if name in ("strategy", "mesh", "task"):
                    assigned.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    return assigned


def test_strategies_and_tasks_set_their_attributes_themselves():
    """What others know of a run they pass to `Strategy.expect`, `place` and `use_compiled`."""
    assert not [line for path in FILES for line in assigned_attributes(path)]


VAGUE = {"found", "given", "held", "own", "what"}


def vague_names(path: Path) -> list[str]:
    """Return the names of a file that say nothing of what they are the name of."""
    vague = []
    for node in ast.walk(tree_of(path)):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        if name.strip("_") in VAGUE:
            vague.append(f"{path.name}:{node.lineno}: {name}")
    return vague


def test_names_say_what_they_name():
    folders = ("ddp_lab", "scripts", "tests", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    assert not [line for path in sorted(files) for line in vague_names(path)]


def packed_assignments(path: Path) -> list[str]:
    """Return the lines of a file that assign several values at once."""
    packed = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Assign):
            unpacks = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            if unpacks or len(node.targets) > 1:
                packed.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    return packed


def test_a_line_assigns_one_value():
    folders = ("ddp_lab", "scripts", "tests", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert not [line for path in sorted(files) for line in packed_assignments(path)]


def test_every_command_is_listed():
    assert {path.stem for path in (PACKAGE / "commands").glob("[a-z]*.py")} == set(COMMANDS)


def test_tensorboard_of_make_binds_to_localhost():
    (line,) = [
        line for line in (ROOT / "Makefile").read_text().splitlines() if "/tensorboard " in line
    ]
    assert line.endswith(" --host localhost")


def test_tests_that_the_makefile_and_the_manual_name_exist():
    quick = re.search(r"^QUICK := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    cells = re.findall(r"\|([^|]*)\|$", (ROOT / "docs/reliability.md").read_text(), re.MULTILINE)
    named = re.findall(r"`(.*?)`", " ".join(cells))
    faults = (ROOT / "tests/resilience/test_faults.py").read_text()
    paths = [f"tests/{path}" for path in quick] + [name for name in named if "/" in name]
    missing = [path for path in paths if not (ROOT / path).exists()]
    missing += [
        name
        for name in named
        if "/" not in name and not re.search(rf"^def test_\w*{name}", faults, re.MULTILINE)
    ]
    assert len(named) > 10
    assert not missing


def test_files_of_tests_that_documents_name_exist():
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    paths = [re.findall(r"\btests/[\w/]+\.py\b", path.read_text()) for path in documents]
    named = {name for names in paths for name in names}
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / name).exists()]


def test_top_level_has_subpackages_with_docstrings_only():
    entries = {
        path.stem
        for path in PACKAGE.iterdir()
        if path.name not in ("__pycache__", "__init__.py", "py.typed", "conf")
    }
    assert entries == set(ORDER)
    assert len(entries) <= 20, "too many subpackages to keep in mind"
    files = [PACKAGE / name / "__init__.py" for name in ORDER if (PACKAGE / name).is_dir()]
    missing = [str(path) for path in files if not ast.get_docstring(tree_of(path))]
    assert not missing, "each needs a docstring that describes what belongs there"


FOLDERS = ["conf", "ddp_lab", "docs", "examples", "scripts", "tests"]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
)


def text_without_code(path: Path) -> str:
    """Return the text of a Markdown file without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors_of(path: Path) -> set[str]:
    """Return the anchors of a Markdown file: GitHub's of its headings, and those it sets."""
    text = text_without_code(path)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    made = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]*)"', text))


def leads_nowhere(document: Path, link: str) -> bool:
    """Whether a relative link of a document names a file or an anchor that does not exist."""
    file, _, anchor = link.partition("#")
    target = document.parent / file if file else document
    return not target.exists() or (anchor != "" and anchor not in anchors_of(target))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_of_documents_lead_to_files_and_headings(path):
    links = re.findall(r'\]\(([^)\s]+)\)|src="([^"]+)"', text_without_code(path))
    relative = [
        link for pair in links for link in pair if link and not link.startswith(("http:", "https:"))
    ]
    assert not [link for link in relative if leads_nowhere(path, link)]


def test_documents_that_code_refers_to_exist():
    files = [
        path
        for folder in FOLDERS
        for kind in ("py", "yaml", "sh")
        for path in (ROOT / folder).rglob(f"*.{kind}")
    ]
    named = {
        (path, name) for path in files for name in re.findall(r"docs/[\w/-]+\.md", path.read_text())
    }
    assert len(named) > 10
    assert not [f"{path}: {name}" for path, name in named if not (ROOT / name).exists()]


def test_test_files_have_names_of_their_own():
    """pytest imports a test file by its name alone."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}
