"""The manual as a site: mkdocs.yml builds strictly, its links lead somewhere, and a browser shows it without other hosts."""

import functools
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from browser import open_page
from launches import ROOT

LOADING = {"script", "img", "link", "iframe", "source", "video", "audio"}  # elements whose addresses the browser fetches


class Page(HTMLParser):
    """The addresses in a page, with the elements that have them, and its anchors."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors = {""}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        self.links += [(tag, given[name]) for name in ("href", "src") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {path: Page(path) for path in site.rglob("*.html")}


def test_site_has_every_document(site):
    documents = {path.relative_to(ROOT).with_suffix(".html") for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]}
    documents = {Path("index.html") if path.stem == "README" else path for path in documents}
    assert len(documents) > 15
    assert not [path for path in documents if not (site / path).exists()]


def test_links_of_the_site_lead_to_files_and_anchors(site, pages):
    broken, checked = [], 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links start at the root of a server
            continue
        for _, link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            target = target / "index.html" if target.is_dir() else target
            checked += 1
            if not target.exists() or (target in pages and unquote(address.fragment) not in pages[target].anchors):
                broken.append(f"{path.relative_to(site)}: {link}")
    assert checked > 500
    assert not broken


def test_site_loads_nothing_from_other_hosts(site, pages):
    loaded = [link for page in pages.values() for tag, link in page.links if tag in LOADING]
    assert len(loaded) > 20
    assert not [link for link in loaded if urlsplit(link).netloc]
    assert not [path for path in site.rglob("*.css") if re.search(r"url\(['\"]?(https?:)?//|@import", path.read_text())]


def test_browser_shows_the_site_and_finds_its_files(site, tmp_path):
    asked: list[tuple[str, int]] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, code="-", size="-") -> None:
            asked.append((self.path, int(code)))

    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=site)) as server:
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
