"""The mutants of scripts/mutants.py: one small error in a line, made by Cosmic Ray's operators.

Left out, because no test ought to notice them: mutants of annotations and of code for type
checkers, of `assert`, of `raise`, of what is given to `print` and log calls, of `__all__`, and of
the marks `*` and `/` among parameters. Docstrings have none. An operator is replaced by one of its
own group: others fail for any value (`<<` of dicts) or mean the same (`is` for `==` of small
numbers).
"""

import ast
import difflib
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from parso.tree import Leaf, NodeOrLeaf

FOLDERS = (
    "strategies",
    "tasks",
    "training",
    "lab",
    "data",
    "checkpoints",
    "resilience",
    "launchers",
    "commands",
)
GROUPS = (
    {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"},
    {"BitOr", "BitAnd", "BitXor"},
    {"LShift", "RShift"},
    {"Eq", "NotEq", "Lt", "LtE", "Gt", "GtE"},
    {"Is", "IsNot"},
)
LOGGERS = ("debug", "info", "warning", "error", "exception", "critical", "warn", "print")
# No operator is about these leaves, which are most of a file.
WITHOUT_MUTANTS = ("name", "newline", "endmarker", "string", "fstring_string")
PUNCTUATION = frozenset("()[]{},:.=")

Position = tuple[int, int]  # line, from 1, and column, in characters from 0
Located = ast.stmt | ast.expr | ast.keyword


class Place(NamedTuple):
    """Where an operator of Cosmic Ray can be applied."""

    file: str  # from the root of the tree
    line: int
    operator: str
    occurrence: int  # of those of the operator in the file, from 0
    statement: tuple[int, int]  # first and last line of the innermost statement, or of its header


class Mutant(NamedTuple):
    """A file with an error in it."""

    place: Place
    text: str
    diff: str

    @property
    def name(self) -> str:
        return f"{self.place.file}:{self.place.line} {self.place.operator} {self.place.occurrence}"


def operators() -> dict[str, Any]:
    """Return the operators of Cosmic Ray that need no arguments, by name."""
    classes = {name.removeprefix("core/"): get_operator(name) for name in operator_names()}
    return {
        name: each()
        for name, each in sorted(classes.items())
        if not each.arguments() and name != "NoOp" and stays_in_group(name)
    }


def stays_in_group(operator: str) -> bool:
    """Return whether an operator of Cosmic Ray stays in a group of Python's, or is none."""
    kind, *names = operator.split("_")
    replaces = kind in ("ReplaceBinaryOperator", "ReplaceComparisonOperator")
    return not replaces or any(group.issuperset(names) for group in GROUPS)


class Outline:
    """The statements of a file, and the parts of it that are not mutated."""

    def __init__(self, text: str):
        self.lines = text.splitlines()
        self.left_out: list[tuple[Position, Position]] = []
        self.statements: list[tuple[int, int]] = []
        for node in ast.walk(ast.parse(text)):
            self.left_out += [self.span(each) for each in unmutated(node)]
            if isinstance(node, ast.stmt):
                self.statements.append((node.lineno, last_line(node)))

    def span(self, node: Located) -> tuple[Position, Position]:
        start = self.position(node.lineno, node.col_offset)
        end = self.position(node.end_lineno or node.lineno, node.end_col_offset or 0)
        return start, end

    def position(self, line: int, offset: int) -> Position:
        """Return a position of `ast`, which counts bytes, in characters."""
        return line, len(self.lines[line - 1].encode()[:offset].decode())

    def is_left_out(self, position: Position) -> bool:
        return any(start <= position < end for start, end in self.left_out)

    def statement(self, line: int) -> tuple[int, int]:
        """Return the first and last line of the innermost statement at a line."""
        around = [(first, last) for first, last in self.statements if first <= line <= last]
        return min(around, key=lambda lines: lines[1] - lines[0], default=(line, line))


def last_line(statement: ast.stmt) -> int:
    """Return the last line of a statement, or of its header if it has a body."""
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    if not body:
        return statement.end_lineno or statement.lineno
    first = body[0]
    start = first.pattern.lineno if isinstance(first, ast.match_case) else first.lineno
    decorators = getattr(first, "decorator_list", [])
    start = min([start, *(each.lineno for each in decorators)])
    return max(statement.lineno, start - 1)


def unmutated(node: ast.AST) -> Sequence[Located]:
    """Return the parts of a node whose mutants no test ought to notice."""
    match node:
        case ast.arg(annotation=annotation) if annotation:
            return [annotation]
        case ast.AnnAssign():
            return [node.annotation]
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return [node.returns] if node.returns else []
        case ast.Raise() | ast.Assert():
            return [node]
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)) if name in LOGGERS:
            return [*node.args, *node.keywords]
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return [node]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return [node]
        case _:
            return []


def places(root: Path, file: str) -> Iterator[Place]:
    """Yield the places of a file that can be mutated, by operator and position."""
    text = (root / file).read_text()
    outline = Outline(text)
    all_operators = operators()
    counts = dict.fromkeys(all_operators, -1)
    for node in ast_nodes(get_ast(text)):
        if is_never_mutated(node):
            continue
        for name, operator in all_operators.items():
            for start, _ in operator.mutation_positions(node):
                counts[name] += 1
                if not (outline.is_left_out(start) or is_mark_of_parameters(node)):
                    yield Place(file, start[0], name, counts[name], outline.statement(start[0]))


def is_never_mutated(node: NodeOrLeaf) -> bool:
    return isinstance(node, Leaf) and (node.type in WITHOUT_MUTANTS or node.value in PUNCTUATION)


def is_mark_of_parameters(node: NodeOrLeaf) -> bool:
    """Return whether a node is the `*` or `/` of `def function(a, /, b, *, c)`."""
    parent = node.parent if isinstance(node, Leaf) else None
    return parent is not None and parent.type in ("parameters", "lambdef")


def apply(root: Path, place: Place) -> Mutant | None:
    """Return the mutant of a place; None if it is not valid Python or has the same syntax tree."""
    text = (root / place.file).read_text()
    operator = operators()[place.operator]
    mutated = mutate_code(text, operator, place.occurrence)
    if mutated is None:
        return None
    try:
        same = ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(text))
    except SyntaxError:
        return None
    if same:
        return None
    lines = difflib.unified_diff(text.splitlines(), mutated.splitlines(), lineterm="", n=0)
    without_names = list(lines)[2:]
    return Mutant(place, mutated, "\n".join(without_names))


def sample(root: Path, only: str, size: int, seed: int) -> list[Mutant]:
    """Draw mutants at random, from each folder in proportion to its lines that can be mutated.

    There is at most one for each line. A larger sample of the same seed adds to a smaller one, but
    for rounding.

    Args:
        root: The tree.
        only: The folder or file to mutate, from the root.
        size: The number of mutants; fewer are returned if there are fewer lines.
        seed: Of the choice.
    """
    lines: dict[str, dict[tuple[str, int], list[Place]]] = {}
    for folder in FOLDERS:
        for path in sorted((root / "ddp_lab" / folder).rglob("*.py")):
            file = str(path.relative_to(root))
            if f"{file}/".startswith(f"{only.rstrip('/')}/"):
                for place in places(root, file):
                    lines.setdefault(folder, {}).setdefault((file, place.line), []).append(place)
    quotas = in_proportion({folder: len(each) for folder, each in lines.items()}, size)
    mutants: list[Mutant] = []
    for folder, quota in quotas.items():
        drawn = draw(root, lines[folder], f"{seed} {folder}")
        mutants += itertools.islice(drawn, quota)
    return mutants


def in_proportion(counts: dict[str, int], size: int) -> dict[str, int]:
    """Divide `size` in proportion to counts, by largest remainder."""
    total = sum(counts.values())
    size = min(size, total)
    exact = {name: count * size / total for name, count in counts.items()}
    quotas = {name: int(each) for name, each in exact.items()}
    by_remainder = sorted(exact, key=lambda name: quotas[name] - exact[name])
    for name in by_remainder[: size - sum(quotas.values())]:
        quotas[name] += 1
    return quotas


def draw(root: Path, lines: dict[tuple[str, int], list[Place]], seed: str) -> Iterator[Mutant]:
    """Yield one mutant of each line, of lines in random order."""
    generator = random.Random(seed)
    order = sorted(lines)
    generator.shuffle(order)
    for line in order:
        candidates = generator.sample(lines[line], len(lines[line]))
        mutants = (apply(root, place) for place in candidates)
        if first := next(filter(None, mutants), None):
            yield first
