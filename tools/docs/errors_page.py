"""Make docs/errors.md: every error that mkd can report, by code, with its texts.

They are read from the source; `...` marks values. An error is found at each call of an error class that has
a code. Texts may be written there, in a variable, or by the callers of a function that makes the error.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from mkd import errors

SOURCES = ("mkd", "tools", "launch")
_INTRODUCTION = """# Errors

Every error has a code, which never changes: `error[batch-not-divisible]: ...`. The message says what is
wrong, why that matters and what to do. Several problems at once form a numbered list. This page lists all
codes in alphabetical order; `...` stands for a value. Where a text has several reasons (why) or fixes (do), a
message gives those of its case.

| exit code | meaning |
|---|---|
"""


def errors_page(root: Path) -> str:
    """Return the page for the sources below `root`."""
    return page_of(raised_errors(root))


def page_of(raised: Iterable[RaisedError]) -> str:
    """Return the page for these errors."""
    found = sorted(set(raised))
    kinds = sorted(
        {cls.exit_code: cls for cls in reversed(list(error_classes().values()))}.items(),
        key=lambda item: item[0],
    )
    lines = [
        _INTRODUCTION
        + "\n".join(f"| {exit_code} | {cls.__doc__.splitlines()[0]} |" for exit_code, cls in kinds)
        + f"\n| {errors.EXIT_INTERRUPTED} | The second Ctrl-C. The run ended at once, without a save. |",
        "",
    ]
    for code, raised in groupby(found, key=lambda error: error.code):
        texts = list(raised)
        files = ", ".join(sorted({error.file for error in texts}))
        lines += [f"## {code}\n", f"Exit code {texts[0].exit_code}. {files}\n"]
        lines += [*dict.fromkeys(error.entry() for error in texts), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def error_classes() -> dict[str, type[errors.MkdError]]:
    """Return the classes of mkd/errors.py by name, except the list of several errors."""
    return {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.MkdError) and cls is not errors.ErrorList
    }


@dataclass(frozen=True, order=True)
class RaisedError:
    """One text of an error, in the order of the page. Other reasons and fixes of the same text are lines."""

    code: str
    what: str
    file: str
    why: str
    do: str
    exit_code: int

    def entry(self) -> str:
        """Return the item of a list."""
        lines = [f"* **{self.what}**" if re.search("[A-Za-z]", self.what) else "* The text names the cause."]
        for label, texts in (("why", self.why), ("do", self.do)):
            lines += [f"  {label}: {text}" for text in texts.splitlines()]
        return "  \n".join(lines)


def raised_errors(root: Path) -> Iterator[RaisedError]:
    """Yield every error in the sources whose code and first text can be read there."""
    classes = error_classes()
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for call in _calls(tree):
            cls = classes.get(_made_class(tree, call) or "")
            if cls is not None:
                for texts in _texts(tree, call):
                    yield RaisedError(exit_code=cls.exit_code, file=file, **texts)


def _made_class(tree: ast.Module, call: ast.Call) -> str | None:
    """Return the error class of mkd/errors.py that `call` makes, also as the base of a class of this file."""
    if ast.unparse(call.func) not in ("super().__init__", "cls"):
        return call.func.id if isinstance(call.func, ast.Name) else None
    around = [one for one in _nodes(tree) if isinstance(one, ast.ClassDef) and _holds(one, call)]
    bases = [base.id for one in around for base in one.bases if isinstance(base, ast.Name)]
    return bases[0] if bases else None


def _texts(tree: ast.Module, call: ast.Call) -> Iterator[dict[str, str]]:
    """Yield code, what, why and do of an error: one set for every text that `what` may have.

    Its reasons and fixes are those of the same branches.
    """
    given = _bound(("what", "why", "do"), call)
    function = _function_around(tree, call)
    parameters = [one.arg for one in (*function.args.args, *function.args.kwonlyargs)] if function else []
    wrapped = any(isinstance(node, ast.Name) and node.id in parameters for node in given.values())
    callers = [
        one
        for one in _calls(tree)
        if wrapped and isinstance(one.func, ast.Name) and one.func.id == function.name
    ]
    for names in [_bound(parameters, caller) for caller in callers] or [{}]:
        resolved = {
            key: names.get(node.id, node) if isinstance(node, ast.Name) else node
            for key, node in given.items()
        }
        code = resolved.get("code")
        if not isinstance(code, ast.Constant) or "what" not in resolved:
            continue
        for what in _values(tree, call, resolved["what"]):
            texts = {"code": code.value, "what": _pattern(what)}
            for key in ("why", "do"):
                nodes = _values(tree, call, resolved[key], what) if key in resolved else []
                patterns = dict.fromkeys(map(_pattern, nodes))
                texts[key] = "\n".join(one for one in patterns if one != "...")
            yield texts


@lru_cache(maxsize=64)
def _nodes(outer: ast.AST) -> tuple[ast.AST, ...]:
    """Return a node and all below it. A file is searched again for each of its errors."""
    return tuple(ast.walk(outer))


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in _nodes(tree) if isinstance(node, ast.Call))


def _bound(names: Sequence[str], call: ast.Call) -> dict[str, ast.expr]:
    return dict(zip(names, call.args, strict=False)) | {
        word.arg: word.value for word in call.keywords if word.arg
    }


def _function_around(tree: ast.Module, node: ast.AST) -> ast.FunctionDef | None:
    """Return the innermost function that holds `node`."""
    return max(
        (f for f in _nodes(tree) if isinstance(f, ast.FunctionDef) and _holds(f, node)),
        key=_line,
        default=None,
    )


def _values(tree: ast.Module, call: ast.Call, node: ast.expr, what: ast.expr | None = None) -> list[ast.expr]:
    """Return what a variable was last set to before `call`, in every branch that can lead to `what`.

    For a call of a function of the file, return what that function returns, and for an `if` expression both
    values; for anything else, `node` itself.
    """
    if isinstance(node, ast.IfExp):
        return [value for arm in (node.body, node.orelse) for value in _values(tree, call, arm, what)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        made_by = [
            one for one in _nodes(tree) if isinstance(one, ast.FunctionDef) and one.name == node.func.id
        ]
        returned = [
            one.value for function in made_by for one in _nodes(function) if isinstance(one, ast.Return)
        ]
        return [value for value in returned if value is not None] or [node]
    if not isinstance(node, ast.Name):
        return [node]
    scope = _function_around(tree, call) or tree
    end = min(_line(call), _line(node))
    local = [one for one in _nodes(scope) if isinstance(one, ast.Assign) and one.end_lineno < end]
    found = [value for name, value in _assigned((*tree.body, *local)) if name == node.id]
    if not found:
        return [node]
    entered = _arms(scope, call) | (_arms(scope, what) if what is not None else set())
    return [
        one
        for value in _last_of(found, entered, scope)
        for one in ([value] if isinstance(value, ast.Name) else _values(tree, call, value, what))
    ]


def _last_of(values: Iterable[ast.expr], entered: set[Arm], scope: ast.AST) -> list[ast.expr]:
    """Return the values that the last assignments may have made, if the arms of `entered` were entered."""
    found: list[ast.expr] = []
    taken: set[frozenset[Arm]] = set()  # the arms that lead to each value, without those of `entered`
    for value in sorted(values, key=_line, reverse=True):
        arms = _arms(scope, value)
        if any((branch, not side) in entered for branch, side in arms):
            continue
        found.insert(0, value)
        taken.add(frozenset(arms - entered))
        if _cover_all(taken):
            break
    return found


Arm = tuple[ast.If, bool]  # True: its `if`; False: its `else`


def _arms(scope: ast.AST, node: ast.AST) -> set[Arm]:
    """Return the arms of the `if` statements that lead to a node."""
    branches = (one for one in _nodes(scope) if isinstance(one, ast.If) and _holds(one, node))
    sides = ((one, side, one.body if side else one.orelse) for one in branches for side in (True, False))
    return {(one, side) for one, side, body in sides if any(_holds(statement, node) for statement in body)}


def _cover_all(taken: set[frozenset[Arm]]) -> bool:
    """Return True if one of these sets of arms is entered in any case."""
    if frozenset() in taken:
        return True
    for arms in taken:
        for branch, side in arms:
            rest = arms - {(branch, side)}
            if rest not in taken and rest | {(branch, not side)} in taken:
                return _cover_all({*taken, rest})
    return False


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that statements assign, alone or in a tuple, and their values."""
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                yield from zip(map(ast.unparse, names), values, strict=False)
            case ast.Assign(targets=[target], value=value):
                yield ast.unparse(target), value


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return outer.lineno <= inner.lineno and inner.end_lineno <= outer.end_lineno


def _line(node: ast.AST) -> int:
    return node.lineno


def _pattern(node: ast.expr) -> str:
    """Return the text that an expression makes, on one line, with `...` for its values."""
    text = "..."
    match node:
        case ast.Constant(value=str(written)):
            text = written.replace("\n", " ")
        case ast.JoinedStr(values=values):
            text = "".join(_pattern(value) for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            text = _pattern(left) + _pattern(right)
        case ast.IfExp(body=body):
            text = _pattern(body)
    return re.sub(r"\.{4,}", "...", text)
