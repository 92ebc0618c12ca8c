"""Write the generated pages: flags, metrics, models and cards in docs/, and the table of measured figures.

python tools/make_docs.py                  # write them
python tools/make_docs.py --check          # change nothing; exit with 1 if a page is out of date
python tools/make_docs.py --errors FILE    # write a page of all errors, which is not in docs/
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mkd.config import megatron_flags  # noqa: E402
from mkd.config.flags import FIRST_FLAGS  # noqa: E402
from mkd.config.options import FIRST_TEACHER, Option, all_options, section_types  # noqa: E402
from mkd.kinds.known_kinds import METRICS  # noqa: E402
from mkd.log.compact import ONLY_HELD_OUT, CompactLines  # noqa: E402
from mkd.log.metrics import AUXILIARY, PER_TAG, PER_TEACHER, Metric  # noqa: E402
from tools.benchmarks import results  # noqa: E402
from tools.docs.cards_page import cards  # noqa: E402
from tools.docs.errors_page import errors_page  # noqa: E402
from tools.docs.models_page import models_page  # noqa: E402

NOTE = "<!-- made by tools/make_docs.py: change the code it is made from, then run that -->\n"
DEFAULT_IN_HELP = re.compile(r" \(default: ([^()]*)\)$")  # the value that applies if the default is None
CARDS = "docs/cards"  # a file for each family and each recipe, and their index
_FILE_NAMES = {
    "flags": "docs/flags.md",
    "metrics": "docs/metrics.md",
    "models": "docs/models.md",
    "figures": "tools/benchmarks/results/LATEST.md",
}

OTHER_LABELS = {
    "iteration": "first",
    "learning_rate": "`lr`",
    "grad_norm": "`norm`",
    "step_time_ms": "before `tok/s`",
    "tokens_per_s_per_gpu": "`tok/s`",
    "skipped_iterations": "`skipped`, if any",
    "loss_spikes": "`spikes`, if any",
}
"""Metric -> its place in the progress line, of those that are not columns."""


FIGURE_TERMS = {
    "u": "bytes of one model's logits",
    "peak": "peak memory beyond the inputs; of the largest rank in `step`",
    "bare products": "the matrix products that a loss with LM heads cannot avoid",
    "MFU": "FLOPs of loss and context tokens over 989 TFLOP/s: student 6P, teacher 2P, causal attention of "
    "the documents. Padding and recomputation never count",
    "cases of `head`": "rows, student's and teacher's hidden size, vocabulary",
    "pairs of `step` and `pipeline`": "a Qwen3-1.7B-shaped student and an 8B-shaped teacher, random weights, "
    "packs of 8,192 tokens of chat-like documents",
}
"""Term or unit of the table of figures -> its meaning."""


def pages() -> dict[Path, str]:
    """Return path -> contents of every generated page."""
    texts = {"flags": flags_page(), "metrics": metrics_page(), "figures": figures_page()}
    texts["models"] = f"{NOTE}\n{models_page()}"
    found = {ROOT / _FILE_NAMES[name]: text for name, text in texts.items()}
    return found | {ROOT / CARDS / name: f"{NOTE}\n{text}" for name, text in cards().items()}


def flags_page() -> str:
    """Return the page of all options by section, then Megatron's flags that mkd does not have."""
    parts = [
        NOTE,
        "# Flags\n",
        "Every flag is also a key of the YAML file, with underscores, in the section of its heading (inside "
        "it, without the section's name). The command line wins over the file, the file over defaults. A "
        "setting marked *YAML* has no flag. `--no-NAME` turns off a setting that is on.\n",
        "`--config FILE.yaml` names the file; `--help-all` prints this page. `--nproc-per-node N` of "
        "`mkd train` starts N processes on this machine and is not a key of the file (default: one per "
        "visible GPU).\n",
        *_first_flags(),
    ]
    for section, cls in [*section_types().items(), ("", None)]:
        options = [option for option in all_options() if option.section == section]
        parts += [
            f"## {_title(section)}\n",
            *([cls.__doc__.strip() + "\n"] if cls else []),
            *_table(_option_rows(options)),
        ]
    parts += ["## Flags of Megatron-LM that mkd does not have\n", "Each is an error that says what to do.\n"]
    parts += _table([("flag", "use instead"), *_by_reason(megatron_flags.USE_INSTEAD)])
    parts += [
        "Safe to drop:\n",
        *_table([("flag", "why nothing is lost"), *_by_reason(megatron_flags.SAFE_TO_DROP)]),
    ]
    parts += ["Not yet:\n", *_table([("flag", "until then"), *_by_reason(megatron_flags.NOT_YET)])]
    return "\n".join(parts).rstrip("\n") + "\n"


def _first_flags() -> list[str]:
    by_flag = {option.flag: option for option in all_options() if option.has_flag}
    rows = _option_rows([by_flag[flag] for flag in FIRST_FLAGS])
    return ["## The ten flags you need\n", *_table(rows), "All others have defaults that suit a first run.\n"]


def _title(section: str) -> str:
    if section.startswith(FIRST_TEACHER):
        name = section.removeprefix(FIRST_TEACHER).removeprefix(".")
        return "`teachers:` (a list)" + (f", each `{name}:`" if name else "")
    return f"`{section}:`" if section else "top level"


def _option_rows(options: Sequence[Option]) -> Iterator[tuple[str, ...]]:
    yield "flag", "value", "default", "meaning"
    for option in options:
        name = f"`{option.flag}`" if option.has_flag else f"`{option.field}` (YAML)"
        kind = {int: "N", float: "X", str: "TEXT", tuple: "TEXT ...", bool: "on, off"}[option.kind]
        kind = ", ".join([kind, *option.words])
        meaning, default = split_default(option)
        yield name, ", ".join(option.choices) if option.choices else kind, default, meaning


def split_default(option: Option) -> tuple[str, str]:
    """Return an option's help without its `(default: ...)`, and the text of its default."""
    if written := DEFAULT_IN_HELP.search(option.help):
        return option.help[: written.start()], written.group(1)
    if option.default is None or option.default == () or "required" in option.help:
        return option.help, ""
    if option.kind is bool:
        return option.help, "on" if option.default else "off"
    text = " ".join(option.default) if option.kind is tuple else str(option.default).replace("\n", "\\n")
    return option.help, f"`{text}`"


def _by_reason(table: dict[str, str]) -> list[tuple[str, str]]:
    """Return one row for all flags that share a text, in the order of the code."""
    reasons: dict[str, list[str]] = {}
    for flag, reason in table.items():
        reasons.setdefault(reason, []).append(f"`{flag}`")
    return [(", ".join(flags), reason) for reason, flags in reasons.items()]


def _example_lines() -> str:
    """Return a line of a step and one of an evaluation."""
    record = dict(iteration=120, loss=2.7231, kd_loss=1.0811, ce_loss=4.3651, top1_agreement=0.4981)
    record |= dict(learning_rate=9.3e-4, grad_norm=1.07, step_time_ms=812.0, tokens_per_s_per_gpu=5040.0)
    lines = CompactLines(1000)
    return f"{lines.train(record)}\n{lines.valid(record | dict(teacher_ce=2.8061, gap_closed=0.31))}"


def metrics_page() -> str:
    """Return the page of all keys of metrics.jsonl, with their labels in the progress line."""
    columns = CompactLines(1, METRICS.metrics).columns | ONLY_HELD_OUT
    labels = {key: f"`{label}`" for key, (label, _) in columns.items()} | OTHER_LABELS
    head = ("key", "unit", "type", "meaning", "over a log interval", "in the progress line")

    def row(metric: Metric, name: str) -> tuple[str, ...]:
        shown = labels.get(metric.name, "")
        return f"`{name}`", metric.unit, metric.number.__name__, metric.help, metric.reduction.value, shown

    return (
        "\n".join(
            [
                NOTE,
                "# Metrics\n",
                "`metrics.jsonl` has one JSON object a line: one per log interval of training, and one per "
                'evaluation, with `"split": "valid"`. [Loggers](loggers.md) get the same numbers as '
                "`train/<key>` and `<split>/<key>`. A value that is not computed or not finite is `null`. A "
                "log interval is summed and divided once, so that token means of several lines, weighted by "
                "`num_loss_tokens`, average exactly.\n",
                "For a teacher with the student's tokenizer, `teacher_ce` and `teacher_entropy` cover the "
                "ids that both models have, as the divergence does. For a cross-tokenizer teacher they "
                "cover all of its ids.\n",
                "The terminal shows a short line of them, at the end of every log interval and after every "
                "evaluation (`--log-format compact`). Labels keep their columns; those that a run does not "
                "have are left out. Evaluations of held-out text end with the word held-out:\n",
                "```\n" + _example_lines() + "\n```\n",
                "`--log-format megatron` prints Megatron-LM's long line with mkd's fields instead, for "
                "scripts that grep it. Its `lm loss` is `ce_loss`.\n",
                *_table([head, *(row(metric, metric.name) for metric in METRICS.metrics)]),
                "With several teachers, or a cross-tokenizer teacher, each teacher also has its own values: "
                "`kd_loss/<teacher>`, `teacher_ce/<teacher>`, `teacher_entropy/<teacher>`, "
                "`top1_agreement/<teacher>`, and:\n",
                *_table([head, *(row(metric, f"{metric.name}/<teacher>") for metric in PER_TEACHER)]),
                "With `teacher_combination: route`, each tag also has `kd_loss/<tag>`, and:\n",
                *_table([head, *(row(metric, f"{metric.name}/<tag>") for metric in PER_TAG)]),
                "Losses that the student's layers add themselves have a value each:\n",
                *_table([head, row(AUXILIARY, f"{AUXILIARY.name}/<name>")]),
                'Held-out tasks have their own lines, with `"split": "tasks"`: see '
                "[evaluation.md](evaluation.md).",
            ]
        )
        + "\n"
    )


def figures_page() -> str:
    """Return the page of the latest medians of all benchmarks."""
    terms = [("term", "meaning"), *FIGURE_TERMS.items()]
    parts = [
        NOTE,
        "# All figures\n",
        "The latest median of every arm, from the CSV files beside this page, which have every run with "
        "date, machine, commit and command. *Latest median* is the median run of the last day on which the "
        "arm was measured. *Spread* is the lowest and the highest value over all recorded runs and machines. "
        "[Performance](../../../docs/performance.md) explains the benchmarks.\n",
        *_table(terms),
        *_table(results.latest_medians()),
    ]
    return "\n".join(parts).rstrip("\n") + "\n"


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
    parser.add_argument("--errors", type=Path, metavar="FILE", help="write every error by its code, and end")
    args = parser.parse_args(argv)
    if args.errors:
        args.errors.write_text(errors_page(), encoding="utf-8")
        return 0
    stale = {
        path: text
        for path, text in pages().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        print(f"{'out of date' if args.check else 'written'}: {path.relative_to(ROOT)}")
        if not args.check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
