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
codes in alphabetical order; `...` stands for a value.

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
        + "\n".join(f"| {exit_code} | {cls.__doc__.splitlines()[0]} |" for exit_code, cls in kinds),
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
    """One text of an error, in the order of the page."""

    code: str
    what: str
    file: str
    why: str
    do: str
    exit_code: int

    def entry(self) -> str:
        """Return the item of a list."""
        lines = [f"* **{self.what}**" if re.search("[A-Za-z]", self.what) else "* The text names the cause."]
        lines += [f"  {label}: {text}" for label, text in (("why", self.why), ("do", self.do)) if text]
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
    """Yield code, what, why and do of an error: one set for every text that `what` may have."""
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
            texts = {key: _pattern(_values(tree, call, node)[-1]) for key, node in resolved.items()}
            texts = {key: "" if texts.get(key) == "..." else texts.get(key, "") for key in ("why", "do")}
            yield {"code": code.value, "what": _pattern(what), **texts}


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


def _values(tree: ast.Module, call: ast.Call, node: ast.expr) -> list[ast.expr]:
    """Return what a variable was last set to before `call`, in every branch.

    For a call of a function of the file, return what that function returns; for anything else, `node` itself.
    """
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
    local = [one for one in _nodes(scope) if isinstance(one, ast.Assign) and _line(one) < _line(call)]
    found = [value for name, value in _assigned((*tree.body, *local)) if name == node.id]
    if not found:
        return [node]
    last = max(found, key=_line)
    branches = [
        one
        for one in _nodes(scope)
        if isinstance(one, ast.If) and _holds(one, last) and not _holds(one, call)
    ]
    set_to = [one for one in found if one is last or any(_holds(branch, one) for branch in branches)]
    return [
        one
        for value in set_to
        for one in ([value] if isinstance(value, ast.Name) else _values(tree, call, value))
    ]


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
