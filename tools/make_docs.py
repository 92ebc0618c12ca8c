"""Write the pages of docs/ that are made from code: flags, metrics, and the list of errors in troubleshooting.

python tools/make_docs.py            # write them
python tools/make_docs.py --check    # change nothing; exit code 1 where a page is not what the code says
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd import errors  # noqa: E402
from mkd.config import megatron_flags  # noqa: E402
from mkd.config.options import FIRST_TEACHER, Option, all_options, section_types  # noqa: E402
from mkd.log.metrics import AUXILIARY, METRICS, PER_TEACHER, Metric  # noqa: E402
from mkd.log.progress import LOSS_FIELDS  # noqa: E402

NOTE = "<!-- made by tools/make_docs.py: change the code it is made from, then run that -->\n"
ERRORS_BELOW = "<!-- below: made by tools/make_docs.py from the errors in mkd/, tools/ and launch/ -->\n"
SOURCES = ("mkd", "tools", "launch")  # of errors
_FILE_NAMES = {
    "flags": "docs/flags.md",
    "metrics": "docs/metrics.md",
    "troubleshooting": "docs/troubleshooting.md",
}


def pages() -> dict[Path, str]:
    """Path -> what it should hold."""
    texts = {"flags": flags_page(), "metrics": metrics_page(), "troubleshooting": troubleshooting_page()}
    return {ROOT / _FILE_NAMES[name]: text for name, text in texts.items()}


def flags_page() -> str:
    """Every option by section, then Megatron's flags that mkd has not."""
    parts = [
        NOTE,
        "# Flags\n",
        "Every flag is also a key of the YAML file, with underscores, in the section of its heading (inside it, without the "
        "section's name). The command line wins over the file, the file over defaults. A setting that says *YAML* has no "
        "flag. `--no-NAME` turns off what is on.\n",
        "`--config FILE.yaml` names the file; `--help` prints this page.\n",
    ]
    for section, cls in [*section_types().items(), ("", None)]:
        options = [option for option in all_options() if option.section == section]
        parts += [
            f"## {_title(section)}\n",
            *([cls.__doc__.strip() + "\n"] if cls else []),
            *_table(_option_rows(options)),
        ]
    parts += ["## Flags of Megatron-LM that mkd has not\n", "Each is an error, which says what to do.\n"]
    parts += _table([("flag", "use instead"), *_by_reason(megatron_flags.USE_INSTEAD)])
    parts += [
        "Safe to drop:\n",
        *_table([("flag", "why nothing is lost"), *_by_reason(megatron_flags.SAFE_TO_DROP)]),
    ]
    parts += ["Not yet:\n", *_table([("flag", "until then"), *_by_reason(megatron_flags.NOT_YET)])]
    return "\n".join(parts).rstrip("\n") + "\n"


def _title(section: str) -> str:
    if section.startswith(FIRST_TEACHER):
        return "`teachers:` (a list)" + (", each `xtoken:`" if section != FIRST_TEACHER else "")
    return f"`{section}:`" if section else "top level"


def _option_rows(options: Sequence[Option]) -> Iterator[tuple[str, ...]]:
    yield "flag", "value", "default", "meaning"
    for option in options:
        name = f"`{option.flag}`" if option.has_flag else f"`{option.field}` (YAML)"
        kind = {int: "N", float: "X", str: "TEXT", tuple: "TEXT ...", bool: "on, off"}[option.kind]
        yield name, ", ".join(option.choices) if option.choices else kind, _default(option), option.help


def _default(option: Option) -> str:
    if option.default is None or option.default == () or "required" in option.help:
        return ""
    return ("on" if option.default else "off") if option.kind is bool else f"`{option.default}`"


def _by_reason(table: dict[str, str]) -> list[tuple[str, str]]:
    """One row for the flags that share a text, in the order of the code."""
    reasons: dict[str, list[str]] = {}
    for flag, reason in table.items():
        reasons.setdefault(reason, []).append(f"`{flag}`")
    return [(", ".join(flags), reason) for reason, flags in reasons.items()]


def metrics_page() -> str:
    """Every key of metrics.jsonl, and where it stands in the progress line."""
    labels: dict[str, list[str]] = {}
    for label, key in LOSS_FIELDS.items():
        labels.setdefault(key, []).append(label)
    head = ("key", "unit", "type", "meaning", "over a log interval", "in the progress line")

    def row(metric: Metric, name: str) -> tuple[str, ...]:
        shown = ", ".join(f"`{label}`" for label in labels.get(metric.name, ()))
        return f"`{name}`", metric.unit, metric.number.__name__, metric.help, metric.reduction.value, shown

    return (
        "\n".join(
            [
                NOTE,
                "# Metrics\n",
                "`metrics.jsonl` has one JSON object a line: one per log interval of training, and one per evaluation, with "
                '`"split": "valid"`. TensorBoard and W&B get the same numbers as `train/<key>` and `<split>/<key>`. A value that '
                "a run does not compute, or that is not finite, is `null`. A log interval is summed and divided once, so that "
                "token means of several lines, weighted by `num_loss_tokens`, average exactly.\n",
                "`teacher_ce` and `teacher_entropy` of a teacher with the student's tokenizer are over the ids that both models "
                "have, as the divergence is; of a teacher with its own tokens they are over all of its ids.\n",
                *_table([head, *(row(metric, metric.name) for metric in METRICS)]),
                "Several teachers, or one with its own tokens, also have a value for each: `kd_loss/<teacher>`, "
                "`teacher_ce/<teacher>`, `teacher_entropy/<teacher>`, `top1_agreement/<teacher>`, and:\n",
                *_table([head, *(row(metric, f"{metric.name}/<teacher>") for metric in PER_TEACHER)]),
                "Losses that the student's layers add by themselves have a value each:\n",
                *_table([head, row(AUXILIARY, f"{AUXILIARY.name}/<name>")]),
                'Held-out tasks have lines of their own, with `"split": "tasks"`: see [evaluation.md](evaluation.md).',
            ]
        )
        + "\n"
    )


def troubleshooting_page() -> str:
    """The written part of the page, and below it every error of mkd."""
    path = ROOT / _FILE_NAMES["troubleshooting"]
    written = path.read_text(encoding="utf-8").partition(ERRORS_BELOW)[0]
    parts = [written + ERRORS_BELOW, "## Every error\n"]
    parts += ["`...` stands for what differs from case to case; the file is where the check is.\n"]
    found = sorted(set(raised_errors()))
    for code in dict.fromkeys(error.exit_code for error in found):
        kind = next(error.kind for error in found if error.exit_code == code)
        parts.append(f"### Exit code {code}: {getattr(errors, kind).__doc__.splitlines()[0]}\n")
        parts += [error.entry() for error in found if error.exit_code == code]
        parts.append("")
    return "\n".join(parts).rstrip("\n") + "\n"


@dataclass(frozen=True, order=True)
class RaisedError:
    """One place in the code that makes an error for users; in the order of the page."""

    exit_code: int
    file: str
    what: str
    why: str
    do: str
    kind: str  # class

    def entry(self) -> str:
        lines = [f"* **{self.what}** ({self.file})"]
        lines += [f"  {label}: {text}" for label, text in (("why", self.why), ("do", self.do)) if text]
        return "  \n".join(lines)


def raised_errors() -> Iterator[RaisedError]:
    """Every call of an error class whose first argument is written there, in a variable, or where its function is called."""
    classes = {
        name: cls
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.MkdError)
    }
    for path in sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for call in _calls(tree):
            if call.func.id in classes:
                for texts in _texts(tree, call):
                    yield RaisedError(
                        kind=call.func.id,
                        exit_code=classes[call.func.id].exit_code,
                        file=path.relative_to(ROOT).as_posix(),
                        **texts,
                    )


def _texts(tree: ast.Module, call: ast.Call) -> Iterator[dict[str, str]]:
    """What, why and do of an error: one set for every text that the first of them may have."""
    given = _bound(("what", "why", "do"), call)
    function = _function_around(tree, call)
    parameters = [one.arg for one in function.args.args] if function else []
    wrapped = isinstance(given.get("what"), ast.Name) and given["what"].id in parameters
    callers = [one for one in _calls(tree) if wrapped and one.func.id == function.name]
    for names in [_bound(parameters, caller) for caller in callers] or [{}]:
        resolved = {
            key: names.get(node.id, node) if isinstance(node, ast.Name) else node
            for key, node in given.items()
        }
        for what in _values(tree, call, resolved["what"]) if "what" in resolved else ():
            texts = {key: _pattern(_values(tree, call, node)[-1]) for key, node in resolved.items()} | {
                "what": _pattern(what)
            }
            if re.search("[A-Za-z]", texts["what"]):
                yield {"why": "", "do": ""} | {
                    key: "" if text == "..." else text for key, text in texts.items()
                }


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name))


def _bound(names: Sequence[str], call: ast.Call) -> dict[str, ast.expr]:
    return dict(zip(names, call.args, strict=False)) | {
        word.arg: word.value for word in call.keywords if word.arg
    }


def _function_around(tree: ast.Module, node: ast.AST) -> ast.FunctionDef | None:
    """The innermost one."""
    return max(
        (f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and _holds(f, node)),
        key=_line,
        default=None,
    )


def _values(tree: ast.Module, call: ast.Call, node: ast.expr) -> list[ast.expr]:
    """What a variable was last set to before `call`, in every branch, what a function of the file returns, or `node` itself."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        made_by = [
            one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one.name == node.func.id
        ]
        returned = [
            one.value for function in made_by for one in ast.walk(function) if isinstance(one, ast.Return)
        ]
        return [value for value in returned if value is not None] or [node]
    if not isinstance(node, ast.Name):
        return [node]
    scope = _function_around(tree, call) or tree
    local = [one for one in ast.walk(scope) if isinstance(one, ast.Assign) and _line(one) < _line(call)]
    found = [
        one
        for one in (*tree.body, *local)
        if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == node.id
    ]
    if not found:
        return [node]
    last = max(found, key=_line)
    branches = [
        one
        for one in ast.walk(scope)
        if isinstance(one, ast.If) and _holds(one, last) and not _holds(one, call)
    ]
    set_to = [one.value for one in found if one is last or any(_holds(branch, one) for branch in branches)]
    return [
        one
        for value in set_to
        for one in ([value] if isinstance(value, ast.Name) else _values(tree, call, value))
    ]


def _holds(outer: ast.AST, inner: ast.AST) -> bool:
    return outer.lineno <= inner.lineno and inner.end_lineno <= outer.end_lineno


def _line(node: ast.AST) -> int:
    return node.lineno


def _pattern(node: ast.expr) -> str:
    """The text that an expression makes on one line, `...` for its values."""
    text = "..."
    match node:
        case ast.Constant(value=str(written)):
            text = written.replace("\n", " ")
        case ast.JoinedStr(values=values):
            text = "".join(_pattern(value) for value in values)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            text = _pattern(left) + _pattern(right)
    return re.sub(r"\.{4,}", "...", text)


def _table(rows: Iterator[tuple[str, ...]] | Sequence[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    lines = [head, ("---",) * len(head), *body]
    return [
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |"
        for line in lines
    ] + [""]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="change nothing, say which pages are out of date"
    )
    args = parser.parse_args(argv)
    stale = {
        path: text
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        print(f"{'out of date' if args.check else 'written'}: {path.relative_to(ROOT)}")
        if not args.check:
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
