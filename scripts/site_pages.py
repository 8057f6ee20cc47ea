"""The files of the site, a hook of mkdocs.yml: documents, and the code that they link to.

They have the same places as in the repository.

So a link that works in the repository works on the site. docs/ alone would not do: its pages link
to code, and README.md to it.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("conf", "ddp_lab", "docs", "examples", "scripts", "tests")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Return the documents and code of the repository, and the files of the theme in `files`."""
    paths = [
        *ROOT.glob("*.md"),
        ROOT / "LICENSE",
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")),
    ]
    kept = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    theme = [file for file in files if file.src_dir != config.docs_dir]
    made = [
        File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in kept
    ]
    return Files([*theme, *made])
