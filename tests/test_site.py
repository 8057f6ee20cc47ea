"""The manual as a site.

mkdocs.yml builds strictly, its links lead somewhere, and a browser shows it without other hosts.
"""

import functools
import inspect
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from browser import open_page
from launches import ROOT

import ddp_lab
from ddp_lab import Lab, launch, tasks

LOADED = re.compile(
    r"""<(?:script|img|link|iframe|source|video|audio)\b[^>]*? (?:href|src)=["']?([^"'\s>]+)"""
)

Trainer = inspect.signature(Lab.trainer).return_annotation
TRAINER = f"{Trainer.__module__}.{Trainer.__name__}"
TASKS = [getattr(tasks, name) for name in tasks.__all__]


def members_of(kind: type) -> list[str]:
    """Return the names of the public methods and properties that a class defines itself."""
    return [
        name
        for name, member in vars(kind).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, (classmethod, property)))
    ]


PUBLIC = [Lab, launch, Trainer, *TASKS]
METHODS = [getattr(kind, name) for kind in (Lab, Trainer, tasks.Task) for name in members_of(kind)]
CALLED = [each for each in (*PUBLIC, *METHODS) if callable(each)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_site_has_every_document(site):
    documents = {
        path.relative_to(ROOT).with_suffix(".html")
        for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    }
    documents = {Path("index.html") if path.stem == "README" else path for path in documents}
    assert len(documents) > 15
    assert not [path for path in documents if not (site / path).exists()]


@pytest.mark.slow
def test_site_loads_nothing_from_other_hosts(site):
    loaded = [link for path in site.rglob("*.html") for link in LOADED.findall(path.read_text())]
    assert len(loaded) > 20
    assert not [link for link in loaded if re.match(r"(https?:)?//", link)]
    assert not [
        path
        for path in site.rglob("*.css")
        if re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text())
    ]


def test_page_of_the_api_names_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    made = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    public = [f"ddp_lab.{name}" for name in ddp_lab.__all__ if name != "tasks"]
    public += [f"ddp_lab.tasks.{name}" for name in tasks.__all__]
    reports = [f"ddp_lab.proof.report.{name}" for name in ("Report", "Row", "Difference")]
    assert sorted(made) == sorted([*public, *reports, TRAINER])
    assert "`tasks`" in page


@pytest.mark.slow
def test_page_of_the_api_has_every_method(site):
    page = (site / "docs" / "api.html").read_text()
    anchors = set(re.findall(r'id="(ddp_lab\.[\w.]+)"', page))
    places = {"ddp_lab.Lab": Lab, TRAINER: Trainer, "ddp_lab.tasks.Task": tasks.Task}
    expected = {f"{place}.{name}" for place, kind in places.items() for name in members_of(kind)}
    assert len(expected) > 25
    assert not expected - anchors


@pytest.mark.parametrize("each", CALLED, ids=lambda each: each.__qualname__)
def test_docstring_describes_every_argument(each):
    described = set(re.findall(r"^ +(\w+): ", inspect.getdoc(each) or "", re.MULTILINE))
    arguments = {name for name in inspect.signature(each).parameters if name != "self"}
    assert not arguments - described


@pytest.mark.slow
def test_browser_shows_the_site_and_finds_its_files(site, tmp_path):
    asked: list[tuple[str, int]] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code="-", size="-") -> None:
            asked.append((self.path, int(code)))

    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=site)
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/docs/strategies.html"
        shown = open_page(address, tmp_path, "--dump-dom", "--virtual-time-budget=5000")
        server.shutdown()
    title = re.search(r"^# (.*)$", (ROOT / "docs" / "strategies.md").read_text(), re.MULTILINE)[1]
    assert re.search(rf"<h1[^>]*>{title}<", shown)
    assert "<table>" in shown
    assert 'class="js' in shown, "the theme's script has run"
    assert {code for _, code in asked} <= {200, 304}, asked
    assert any(path.endswith(".css") for path, _ in asked)
