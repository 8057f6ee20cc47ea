"""One file of Python from templates: branches are chosen, and what is not used is left out.

A template is a valid file of Python. It imports the constants and choices that it reads from
settings.py, and functions from other templates. The files of a run become one as follows:

    if STRATEGY == "ddp":        a condition on settings alone: the branch that is taken remains
    from settings import LR      the constant is set at the top, with the comment of settings.py
    from ddp import distribute   is dropped, because the function is in the same file
    torch.optim.SGD(...)         `replacements` put other expressions in place of examples

Functions, constants and imports that are not used then are left out.
"""

import ast
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parent / "templates"
SETTINGS = "settings"
NAMES = {path.stem for path in TEMPLATES.glob("*.py")}
WIDTH = 100  # columns


def assemble(
    docstring: str,
    names: Iterable[str],
    settings: Mapping[str, Any],
    replacements: Mapping[str, str],
    imports: Iterable[str] = (),
) -> str:
    """Return the text of a file of Python.

    Args:
        docstring: of the file.
        names: of the templates whose functions it has, in order.
        settings: values of the constants and choices that settings.py lists.
        replacements: by a text that occurs in the templates, what replaces it.
        imports: further lines of imports.
    """
    lines = [*imports]
    bodies: list[str] = []
    for name in names:
        text = (TEMPLATES / f"{name}.py").read_text()
        for old, new in replacements.items():
            text = text.replace(old, new)
        of_file, body = split_imports(text)
        lines += of_file
        bodies.append(fold(body, settings).strip("\n"))
    code = without_unused("\n\n\n".join(bodies) + "\n")
    used = names_in(code)
    parts = [f'"""{docstring}\n"""', *sorted_imports(lines, used)]
    constants = [line for name, line in constant_lines(settings) if name in used]
    if constants:
        parts.append("\n".join(constants))
    return "\n\n".join(parts) + "\n\n\n" + code


def split_imports(text: str) -> tuple[list[str], str]:
    """Return the imports at the top of a template from elsewhere, and the text after them."""
    lines = text.splitlines(keepends=True)
    imports: list[str] = []
    end = 0
    for node in ast.parse(text).body:
        is_docstring = isinstance(node, ast.Expr)
        if not is_docstring and not isinstance(node, ast.Import | ast.ImportFrom):
            break
        assert node.end_lineno is not None
        end = node.end_lineno
        if isinstance(node, ast.ImportFrom) and node.module not in NAMES:
            imports += [f"from {node.module} import {alias_text(each)}" for each in node.names]
        elif isinstance(node, ast.Import):
            imports += [f"import {alias_text(each)}" for each in node.names]
    return imports, "".join(lines[end:])


def alias_text(alias: ast.alias) -> str:
    """Return what an import imports, with the name that it gets."""
    return alias.name if alias.asname is None else f"{alias.name} as {alias.asname}"


def sorted_imports(lines: Iterable[str], used: set[str]) -> list[str]:
    """Return the imports of used names as blocks: the standard library, packages, own modules.

    Args:
        lines: imports of one name each, `import a.b as c` or `from a import b`.
        used: names in the code.
    """
    plain: set[str] = set()
    by_module: dict[str, set[str]] = {}
    for line in lines:
        (node,) = ast.parse(line).body
        assert isinstance(node, ast.Import | ast.ImportFrom)
        (alias,) = node.names
        name = alias.asname or alias.name.partition(".")[0]
        if name not in used:
            continue
        if isinstance(node, ast.Import):
            plain.add(line)
        else:
            by_module.setdefault(node.module or "", set()).add(alias_text(alias))

    blocks: dict[int, list[str]] = {}
    for line in sorted(plain, key=lambda line: line.split()[1]):
        blocks.setdefault(place_of(line.split()[1]), []).append(line)
    for module, aliases in sorted(by_module.items()):
        line = f"from {module} import {', '.join(sorted(aliases, key=sorting_key))}"
        blocks.setdefault(place_of(module), []).append(line)
    return ["\n".join(blocks[place]) for place in sorted(blocks)]


def sorting_key(alias: str) -> tuple[int, str]:
    """Return by what the names of an import are sorted: constants, classes, then functions."""
    if alias.isupper():
        return 0, alias
    return (1 if alias[0].isupper() else 2), alias


def place_of(module: str) -> int:
    """Return the number of the block that imports a module: of the standard library, or others."""
    return 0 if module.partition(".")[0] in sys.stdlib_module_names else 1


def fold(text: str, settings: Mapping[str, Any]) -> str:
    """Return code in which conditions on settings alone are replaced by the branch that is taken.

    Of conditions `A and b` and `A or b` of which A is one on settings, b remains, or nothing.
    """
    while True:
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.If))
        static = next((node for node in nodes if is_static(first_condition(node), settings)), None)
        if static is None:
            # a branch that is left out leaves its blank lines
            return re.sub(r"\n\n\n+(?=[ ])", "\n\n", text)
        text = fold_one(text, static, settings)


def first_condition(node: ast.If) -> ast.expr:
    """Return the condition of an `if`, of several the first one."""
    return node.test.values[0] if isinstance(node.test, ast.BoolOp) else node.test


def is_static(test: ast.expr, settings: Mapping[str, Any]) -> bool:
    """Return whether a condition reads settings, and nothing else."""
    names = [node.id for node in ast.walk(test) if isinstance(node, ast.Name)]
    calls = any(isinstance(node, ast.Call | ast.Attribute) for node in ast.walk(test))
    return bool(names) and not calls and all(name in settings for name in names)


def fold_one(text: str, node: ast.If, settings: Mapping[str, Any]) -> str:
    """Return the code with the branch of one `if` that is taken in place of the statement."""
    lines = text.splitlines(keepends=True)
    indent = node.col_offset
    assert node.test.end_lineno is not None
    assert node.end_lineno is not None
    end = node.end_lineno
    end_of_body = start_of_orelse(lines, node) if node.orelse else end
    body = lines[node.test.end_lineno : end_of_body]
    orelse = lines[end_of_body:end]
    value = bool(evaluate(first_condition(node), settings))
    # `and` is decided by a condition that is false, `or` by one that is true
    decides = not isinstance(node.test, ast.BoolOp) or value == isinstance(node.test.op, ast.Or)
    if decides and value:
        branch = dedent(body, indent)
    elif decides:
        branch = else_branch(orelse, indent) if orelse else []
    else:
        assert isinstance(node.test, ast.BoolOp)
        operator = " or " if isinstance(node.test.op, ast.Or) else " and "
        conditions = [ast.get_source_segment(text, value) for value in node.test.values[1:]]
        head = f"{' ' * indent}if {operator.join(map(str, conditions))}:\n"
        branch = [head, *body, *orelse]
    return "".join([*lines[: node.lineno - 1], *branch, *lines[end:]])


def start_of_orelse(lines: list[str], node: ast.If) -> int:
    """Return the index of the line of `else` or `elif` of an `if` statement."""
    last = node.body[-1].end_lineno
    assert last is not None
    indent = " " * node.col_offset
    places = range(last, len(lines))
    return next(i for i in places if lines[i].startswith((f"{indent}else:", f"{indent}elif ")))


def else_branch(lines: list[str], indent: int) -> list[str]:
    """Return the statements after `else:`, or those of an `elif`, which becomes an `if`."""
    first = lines[0].lstrip()
    if first.startswith("elif "):
        return [f"{' ' * indent}{first.removeprefix('el')}", *lines[1:]]
    return dedent(lines[1:], indent)


def dedent(lines: list[str], indent: int) -> list[str]:
    """Return a block of lines with an indent, in columns."""
    text = textwrap.indent(textwrap.dedent("".join(lines)), " " * indent)
    return text.splitlines(keepends=True)


def evaluate(test: ast.expr, settings: Mapping[str, Any]) -> Any:
    """Return the value of a condition on settings."""
    code = compile(ast.Expression(test), "<template>", "eval")
    return eval(code, {"__builtins__": {}}, dict(settings))


def names_in(code: str) -> set[str]:
    """Return the names that code reads or sets."""
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def without_unused(code: str) -> str:
    """Return code without the functions, classes and constants at its top that nothing reads."""
    while True:
        tree = ast.parse(code)
        for node in tree.body:
            name = defined_by(node)
            others = (each for each in tree.body if each is not node)
            read = {
                inner.id
                for each in others
                for inner in ast.walk(each)
                if isinstance(inner, ast.Name)
            }
            if name is not None and name not in read:
                code = without_statement(code, node)
                break
        else:
            return code


def defined_by(node: ast.stmt) -> str | None:
    """Return the name that a statement defines; None: it defines none."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return None


def without_statement(code: str, node: ast.stmt) -> str:
    """Return code without a statement at its top, and the blank lines after it."""
    lines = code.splitlines(keepends=True)
    decorators = getattr(node, "decorator_list", [])
    start = min([node.lineno, *(each.lineno for each in decorators)]) - 1
    assert node.end_lineno is not None
    rest = "".join(lines[node.end_lineno :]).lstrip("\n")
    return "".join(lines[:start]) + rest


def constant_lines(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return name and line of each constant of settings.py, with the value of `settings`."""
    lines: list[tuple[str, str]] = []
    for line in (TEMPLATES / f"{SETTINGS}.py").read_text().splitlines():
        match = re.match(r"([A-Z_]+) = ", line)
        if match:
            name = match[1]
            _, mark, comment = line.partition("  # ")
            short = f"{name} = {literal(settings[name])}"
            with_comment = f"{short}{mark}{comment}"
            lines.append((name, with_comment if len(with_comment) <= WIDTH else short))
    return lines


def literal(value: Any) -> str:
    """Return a value as a formatter of Python writes it."""
    text = repr(value)
    if isinstance(value, str) and '"' not in value and "\\" not in value:
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(each)}' for key, each in value.items())}}}"
    return text
