"""Run every command of docs/tutorial.md and compare the output with the one in the text.

```bash blocks are run in order, in one fresh copy of the working tree, on the CPU. Each is followed
by an ```output block with everything that the command prints. In it a line `...` stands for any
lines, and `...` within a line for any text. Numbers must have the same number of decimals as shown.
A number before a unit of time or speed may have any value, and so may numbers with a decimal point
in an ```output timings block. All other numbers must be equal, those with a decimal point within
TOLERANCE. ```text blocks are not run. A ```python block is an excerpt of the file that its first
line names.
"""

import os
import re
import socket
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from launches import ROOT, finish
from small_digits import ALL_DIGITS
from warm import programs
from wheels import copy_tree

TUTORIAL = ROOT / "docs" / "tutorial.md"
FENCED = re.compile(r"^```(\S.*)\n((?:.*\n)*?)```$", re.MULTILINE)
NUMBER = r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]\d+)?"
RATE = re.compile(r" (s|ms|samples/s|s/epoch)\b")
# of losses and accuracies: two of 360 test images, as versions of torch round differently
TOLERANCE = 0.006
# Lines that only a slow machine prints: what has taken a while, and the progress within an epoch of
# 10 s or more.
SLOW = re.compile(
    r"^((preparing|loading|epoch \d+: evaluating).* \.\.\.|epoch \d+, step \d+: .* of the run)\n",
    re.MULTILINE,
)
# of numbers in scientific notation like 1.2e-07, which are differences due to rounding
SMALL = 1e-5
LIMIT = 480  # seconds for a block, on a busy machine


class Block(NamedTuple):
    info: str
    text: str


def blocks() -> list[Block]:
    return [Block(*groups) for groups in FENCED.findall(TUTORIAL.read_text())]


def close(shown: str, real: str, timings: bool) -> bool:
    if "." not in shown and "e" not in shown:
        return shown == real
    difference = abs(float(shown.replace(",", "")) - float(real.replace(",", "")))
    return timings or difference <= (SMALL if "e" in shown else TOLERANCE)


def shape(number: str) -> str:
    """Return a regular expression for numbers with as many decimals as `number`."""
    decimals = number.partition("e")[0].partition(".")[2]
    of_decimals = rf"\.\d{{{len(decimals)}}}" if decimals else ""
    exponent = r"e[-+]\d+" if "e" in number else ""
    return rf"(\d+(?:,\d{{3}})*{of_decimals}{exponent})"


def same_line(shown: str, real: str, timings: bool = False) -> bool:
    """Return whether a printed line matches the shown one. Consecutive blanks count as one."""
    shown = " ".join(shown.split())
    real = " ".join(real.split())
    parts = re.split(rf"(\.\.\.|{NUMBER})", shown)
    pattern = ""
    for i, part in enumerate(parts):
        if i % 2 == 0:
            pattern += re.escape(part)
        elif part == "...":
            pattern += ".*?"
        else:
            pattern += shape(part)

    match = re.fullmatch(pattern, real)
    if not match:
        return False
    numbers = [(part, parts[i + 1]) for i, part in enumerate(parts) if i % 2 and part != "..."]
    pairs = zip(numbers, match.groups(), strict=True)
    return all(
        RATE.match(after) or close(number, shown_number, timings)
        for (number, after), shown_number in pairs
    )


def missing(shown: str, real: str, timings: bool = False) -> str | None:
    """Return the first shown line that is missing or misplaced in the real output, or None."""
    lines = real.splitlines()
    at = 0
    floating = False
    for line in shown.splitlines():
        if line == "...":
            floating = True
            continue
        start = at
        while at < len(lines) and not same_line(line, lines[at], timings):
            at += 1
        if at == len(lines) or (at > start and not floating):
            return line
        at = at + 1
        floating = False
    return f"(the end, before {lines[at]!r})" if at < len(lines) and not floating else None


def run(command: str, exported: str, tree: Path) -> tuple[int, str]:
    path = os.pathsep.join([str(programs()), str(Path(sys.executable).parent), os.environ["PATH"]])
    process = subprocess.Popen(
        ["bash", "-euo", "pipefail", "-c", exported + command],
        cwd=tree,
        env=os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": "", ALL_DIGITS: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    code, output = finish(process, LIMIT)
    output = re.sub(rf"\bon {re.escape(socket.gethostname())}\b", "on laptop", output)
    return code, SLOW.sub("", output).replace(str(tree), "~/ddp_lab")


@pytest.mark.slow  # 100 s, a quarter of all other tests; .ci/run runs it
def test_every_command_prints_the_output_in_the_text(tmp_path):
    tree = tmp_path / "ddp_lab"
    copy_tree(tree)
    exported = ""
    wrong = []
    all_blocks = blocks()
    for block, shown in pairwise(all_blocks):
        if block.info != "bash":
            continue
        code, output = run(block.text, exported, tree)
        exported += "".join(
            line + "\n" for line in block.text.splitlines() if line.startswith("export ")
        )
        stated = re.search(r"# exits with (\d+)", block.text)
        line = missing(shown.text, output, "timings" in shown.info)
        if code != int(stated[1] if stated else 0) or line is not None:
            wrong.append(
                f"$ {block.text}exit code {code}; shown but not printed: {line}\n--- printed\n"
                f"{output}"
            )
    assert not wrong, "\n".join(wrong)


def test_blocks_have_known_kinds_and_python_excerpts_exist():
    all_blocks = blocks()
    assert {block.info for block in all_blocks} <= {
        "bash",
        "output",
        "output timings",
        "python",
        "text",
    }
    followed = list(pairwise(all_blocks))
    assert all(
        (block.info == "bash") == after.info.startswith("output") for block, after in followed
    )
    assert sum(block.info == "bash" for block in all_blocks) >= 15, (
        "too few blocks: the fences may not be parsed correctly"
    )
    for block in all_blocks:
        if block.info == "python":
            named, _, excerpt = block.text.partition("\n")
            assert excerpt in (ROOT / named.removeprefix("# ")).read_text(), named
