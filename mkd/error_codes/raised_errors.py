"""Read from the sources of mkd every error that it can report, with its texts; `...` marks values.

An error is found at each call of an error class that has a code. Texts may be written there, in a variable,
or by the callers of a function that makes the error. An installed mkd has its sources, as a checkout does.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mkd import errors

_PACKAGE = Path(__file__).resolve().parent.parent

Placed = ast.stmt | ast.expr  # nodes that have lines
Arm = tuple[ast.If, bool]  # True: its `if`; False: its `else`


def error_classes() -> dict[str, type[errors.MkdError]]:
    """Return the classes of mkd/errors.py by name, except the list of several errors."""
    return {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.MkdError) and cls is not errors.ErrorList
    }


def exit_codes() -> dict[int, str]:
    """Return exit code -> meaning, of the errors that have one; in order."""
    classes = {cls.exit_code: cls for cls in reversed(list(error_classes().values()))}
    return {exit_code: (cls.__doc__ or "").splitlines()[0] for exit_code, cls in sorted(classes.items())}


@dataclass(frozen=True, order=True)
class RaisedError:
    """One text of an error, in the order of the page. Other reasons and fixes of the same text are lines."""

    code: str
    what: str
    file: str
    why: str
    do: str
    exit_code: int

    @property
    def first_line(self) -> str:
        """The text itself, if it is more than values."""
        return self.what if re.search("[A-Za-z]", self.what) else "(the text names the cause)"

    @property
    def other_lines(self) -> list[str]:
        """`why: TEXT` for every reason, and `do: TEXT` for every fix."""
        texts = (("why: ", self.why), ("do:  ", self.do))
        return [label + text for label, lines in texts for text in lines.splitlines()]


def source_folders() -> list[Path]:
    """Return the folders with the sources of this mkd: the package, and tools and launch of a checkout."""
    checkout = _PACKAGE.parent
    is_checkout = (checkout / "pretrain_kd.py").is_file()  # as in mkd/config/packaged.py
    return [_PACKAGE, *(checkout / name for name in ("tools", "launch") if is_checkout)]


def raised_errors(folders: Iterable[Path], code: str = "") -> Iterator[RaisedError]:
    """Yield every error of the sources in `folders` whose code and first text can be read there.

    With `code`, read only the files that have this code, which takes a fraction of the time.
    """
    classes = error_classes()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if code not in text:
                continue
            file = path.relative_to(folder.parent).as_posix()
            tree = ast.parse(text)
            for call in _calls(tree):
                cls = classes.get(_made_class(tree, call) or "")
                if cls is None:
                    continue
                for found, what, why, do in _texts(tree, call):
                    if found == code or not code:
                        yield RaisedError(found, what, file, why, do, cls.exit_code)


def _made_class(tree: ast.Module, call: ast.Call) -> str | None:
    """Return the error class of mkd/errors.py that `call` makes, also as the base of a class of this file."""
    if ast.unparse(call.func) not in ("super().__init__", "cls"):
        return call.func.id if isinstance(call.func, ast.Name) else None
    around = [one for one in _nodes(tree) if isinstance(one, ast.ClassDef) and _holds(one, call)]
    bases = [base.id for one in around for base in one.bases if isinstance(base, ast.Name)]
    return bases[0] if bases else None


def _texts(tree: ast.Module, call: ast.Call) -> Iterator[tuple[str, str, str, str]]:
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
        if function and wrapped and isinstance(one.func, ast.Name) and one.func.id == function.name
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
            lines = []
            for key in ("why", "do"):
                nodes = _values(tree, call, resolved[key], what) if key in resolved else []
                patterns = dict.fromkeys(map(_pattern, nodes))
                lines.append("\n".join(one for one in patterns if one != "..."))
            yield str(code.value), _pattern(what), lines[0], lines[1]


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


def _function_around(tree: ast.Module, node: Placed) -> ast.FunctionDef | None:
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
    scope: ast.AST = _function_around(tree, call) or tree
    end = min(_line(call), _line(node))
    local = [one for one in _nodes(scope) if isinstance(one, ast.Assign) and _end(one) < end]
    found = [value for name, value in _assigned([*tree.body, *local]) if name == node.id]
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


def _arms(scope: ast.AST, node: Placed) -> set[Arm]:
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


def _holds(outer: Placed, inner: Placed) -> bool:
    return outer.lineno <= inner.lineno and _end(inner) <= _end(outer)


def _line(node: Placed) -> int:
    return node.lineno


def _end(node: Placed) -> int:
    return node.end_lineno or node.lineno


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
