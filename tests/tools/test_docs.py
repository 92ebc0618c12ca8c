"""docs/flags.md, docs/metrics.md and the errors of docs/troubleshooting.md say what the code says."""

from __future__ import annotations

import re
from itertools import combinations

from mkd.config.options import all_options
from mkd.config.schema import Config
from mkd.log.metrics import METRICS
from tools import make_docs


def test_the_pages_are_what_the_code_says(capsys):
    assert make_docs.main(["--check"]) == 0, capsys.readouterr().out + "run: python tools/make_docs.py"


def test_the_order_of_errors_is_that_of_their_texts():
    """Also of those that differ in their fix alone, whose order in a set is another in every process."""
    errors = list(make_docs.raised_errors())
    twins = [(a, b) for a, b in combinations(errors, 2) if (a.file, a.what) == (b.file, b.what) and a != b]
    assert twins and all((a < b) != (b < a) for a, b in twins)


def test_every_option_and_metric_is_in_a_table():
    flags, metrics = make_docs.flags_page(), make_docs.metrics_page()
    for option in all_options():
        assert f"| `{option.flag if option.has_flag else option.field}`" in flags
        assert option.help.replace("|", "\\|") in flags
    assert f"| `{Config().optimizer.lr}` |" in flags
    assert all(f"| `{metric.name}` | {metric.unit} |" in metrics for metric in METRICS)


def test_tables_have_as_many_cells_in_every_row():
    for text in (make_docs.flags_page(), make_docs.metrics_page()):
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(counts) == 1, table


def test_errors_are_found_with_their_texts_and_exit_codes():
    found = {error.what: error for error in make_docs.raised_errors()}
    divisible = found[
        "global-batch-size ... is not divisible by micro-batch-size ... x data-parallel ... = ..."
    ]
    assert (divisible.exit_code, divisible.file) == (64, "mkd/plan/batch.py")
    assert divisible.why == "every data-parallel rank runs the same number of whole micro-batches in a step"
    assert divisible.do == "use ..."
    assert {error.exit_code for error in found.values()} >= {64, 65, 66, 70}


def test_texts_in_variables_functions_and_callers_are_found():
    """Set before the raise, in branches, by a function, or given to the one that raises; in mkd/, tools/ and launch/."""
    found = {(error.file, error.what): error for error in make_docs.raised_errors()}
    for file, what in (
        ("mkd/operations/profiling.py", "--profile-ranks ... do not exist"),
        ("mkd/operations/disk.py", "cannot make ...: ... is a file"),
        ("mkd/operations/disk.py", "cannot write to ...: ... is read-only for this user"),
        ("mkd/train/nonfinite.py", "...; logits that are not finite: ..."),
        ("mkd/xtoken/loss_settings.py", "xtoken top-k is ..."),
        ("mkd/checkpoint/verifying.py", "... is missing"),
        ("tools/make_student.py", "--num-layers ... cannot be picked from ... layers"),
        ("launch/submit.py", "--time ... is not a time that Slurm reads"),
    ):
        assert (file, what) in found
    missing = found["mkd/checkpoint/pickles.py", "... is missing"]
    assert missing.why == "it says what kind of checkpoint this is"
    assert missing.do == "choose another checkpoint with --ckpt-step N"  # a constant of the file
    memory = found["mkd/operations/out_of_memory.py", "GPU memory is not enough on rank ..."]
    assert memory.why.startswith("planned for pipeline rank") and memory.do.startswith("one of these")
    for error in found.values():
        assert "\n" not in error.entry().replace("  \n", "") and "......" not in error.entry()


def test_a_stale_page_is_named_and_rewritten(tmp_path, monkeypatch, capsys):
    """On copies: the pages of the repository stay as they are."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkd").mkdir()
    written = make_docs.ROOT / "docs" / "troubleshooting.md"
    (tmp_path / "docs" / "troubleshooting.md").write_text(
        written.read_text(encoding="utf-8"), encoding="utf-8"
    )
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    assert make_docs.main(["--check"]) == 1
    assert "out of date: docs/flags.md" in capsys.readouterr().out
    assert make_docs.main([]) == 0 and make_docs.main(["--check"]) == 0
    assert "out of date" not in capsys.readouterr().out
