"""Write docs/configuration.md from the schema, the constructors' docstrings, and conf/.

python scripts/configuration.py
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from ddp_lab.config.build import options  # noqa: E402
from ddp_lab.config.check import describe, is_model  # noqa: E402
from ddp_lab.config.schema import DataConfig, Keys, ModelConfig, RunConfig  # noqa: E402
from ddp_lab.config.types import TRACKERS  # noqa: E402

CONF = ROOT / "conf"
FILE = ROOT / "docs/configuration.md"
INTRODUCTION = """# Configuration

Written by `python scripts/configuration.py` from `ddp_lab/config/schema.py`, the docstrings of the
constructors and `conf/`.

Any key can be set on the command line as `key=value`. A group is chosen as `group=option`, and its
keys are set as `group.key=value`. `null` means none. A list is written as `[a,b]`.
"""
EXPERIMENTS = (
    "`experiment` sets keys of the run and of several groups at once; see the comments in "
    "`conf/experiment/`.\n"
)


class Row(NamedTuple):
    """A key in a table. The default is the one in conf/."""

    key: str
    default: str
    allowed: str
    meaning: str


def load(path: str) -> dict[str, Any]:
    return OmegaConf.to_container(OmegaConf.load(CONF / path), resolve=False)


def comments(path: str) -> dict[str, str]:
    """Return the comments of a file in conf/ by dotted key.

    A comment follows a value, and is continued in lines of its own.
    """
    texts: dict[str, str] = {}
    section = ""
    key = ""
    for line in (CONF / path).read_text().splitlines():
        if entry := re.match(r"( *)(?:- )?([a-z]\w*):([^#]*)(?:# (.+))?", line):
            section = section if entry[1] else entry[2]
            inner = entry[1] and section != "defaults"
            key = f"{section}.{entry[2]}" if inner else entry[2]
            if entry[4]:
                texts[key] = entry[4]
        elif key in texts and (more := re.match(r" +# (.+)", line)):
            texts[key] += f" {more[1]}"
        else:
            key = ""
    return texts


def meanings() -> dict[str, str]:
    """Return the comments of all keys: of the groups, by `group.key`, and of config.yaml."""
    texts = {
        f"{group}.{key}": text
        for group in ("data", "optimizer")
        for name in names(group)
        for key, text in comments(f"{group}/{name}.yaml").items()
    }
    return texts | comments("config.yaml")


def make_rows(schema: type[Keys], values: dict[str, Any], prefix: str = "") -> Iterator[Row]:
    """Yield a row for each of `values` that the schema has; groups in it have their own tables."""
    for name, field in schema.model_fields.items():
        if name in values and field.annotation != dict[str, Any] and not is_model(field.annotation):
            yield Row(
                code(f"{prefix}{name}"),
                show(values[name]),
                describe(field.annotation, field.metadata),
                MEANINGS.get(f"{prefix}{name}") or field.description or "",
            )


def option_rows(group: str, node: dict[str, Any]) -> Iterator[Row]:
    """Yield a row for each key that an option of a group sets; none for a user's constructor."""
    if node.get("_target_") == "???":
        return
    if group == "data":
        yield from option_rows("data.dataset", node["dataset"])
        yield from make_rows(DataConfig, node, "data.")
        if "collate_fn" in node:
            yield Row(
                code("data.collate_fn._target_"),
                show(node["collate_fn"]["_target_"]),
                "the name of a function or class, or null",
                MEANINGS["data.collate_fn"],
            )
    else:
        yield from make_rows(options(group, node), node, f"{group}.")


def group_rows(group: str) -> dict[Row, list[str]]:
    """Return the rows of a group, each with the options that have it."""
    rows: dict[Row, list[str]] = {}
    for name in names(group):
        for row in option_rows(group, load(f"{group}/{name}.yaml")):
            rows.setdefault(row, []).append(code(name))
    return dict(sorted(rows.items(), key=lambda item: item[0].key))


def names(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def code(text: str) -> str:
    return f"`{text}`"


def show(value: Any) -> str:
    """Return a value as it is written on the command line."""
    return code(value if isinstance(value, str) else json.dumps(value))


def table(*lines: tuple[str, ...]) -> str:
    """Return a Markdown table; the first line is its head."""
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(lines[0]) + "|", *body]) + "\n"


def render() -> str:
    """Return the text of docs/configuration.md."""
    run = load("config.yaml")
    run["epochs"] = OmegaConf.load(CONF / "config.yaml").epochs  # without other limits
    chosen = {
        name: option
        for entry in run["defaults"]
        if isinstance(entry, dict)
        for name, option in entry.items()
    }
    groups = [name for name in chosen if not name.startswith("override")]
    lines = [(code(name), show(chosen[name]), ", ".join(map(code, names(name)))) for name in groups]
    parts = [
        INTRODUCTION,
        "## Groups\n",
        table(("group", "default", "options"), *lines),
        EXPERIMENTS,
    ]
    parts += ["## The run\n", table(Row._fields, *make_rows(RunConfig, run))]
    for name, field in RunConfig.model_fields.items():
        if field.annotation == dict[str, Any] or is_model(field.annotation):
            parts += [f"## {code(name)}\n", f"{MEANINGS[name]}\n"]
        if is_model(field.annotation):
            parts += [table(Row._fields, *make_rows(field.annotation, run[name], f"{name}."))]
        if name == "model":
            parts += [table(Row._fields, *make_rows(ModelConfig, run["model"], "model."))]
        if name == "tracker_options":
            nodes = {
                f"{name}.{tracker}": {"_target_": TRACKERS[tracker], **node}
                for tracker, node in run[name].items()
            }
            parts += [
                table(
                    Row._fields,
                    *(row for group, node in nodes.items() for row in option_rows(group, node)),
                )
            ]
        if name in groups and (rows := group_rows(name)):
            parts += [
                table(
                    (name, *Row._fields),
                    *((", ".join(having), *row) for row, having in rows.items()),
                )
            ]
    return "\n".join(parts)


MEANINGS = meanings()

if __name__ == "__main__":
    FILE.write_text(render())
