"""Check that generated pages are fresh: flags, metrics, and the table of all figures."""

from __future__ import annotations

import re

from mkd.config.options import all_options
from mkd.config.schema import Config
from mkd.kinds.known_kinds import METRICS
from tools import make_docs


def test_the_pages_are_what_the_code_says(capsys):
    assert make_docs.main(["--check"]) == 0, capsys.readouterr().out + "run: python tools/make_docs.py"


def test_every_option_and_metric_is_in_a_table():
    flags, metrics = make_docs.flags_page(), make_docs.metrics_page()
    for option in all_options():
        assert f"| `{option.flag if option.has_flag else option.field}`" in flags
        meaning, default = make_docs.split_default(option)
        assert f"| {default} | {meaning} |".replace("|", "\\|") in flags.replace("\\|", "|").replace(
            "|", "\\|"
        )
    assert f"| `{Config().optimizer.lr}` |" in flags
    assert all(f"| `{metric.name}` | {metric.unit} |" in metrics for metric in METRICS.metrics)


def test_ten_flags_come_before_the_table_of_all():
    head, _, rest = make_docs.flags_page().partition("## `student:`")
    assert len(make_docs.FIRST_FLAGS) == 10 and rest
    assert re.findall(r"^\| `(--[\w-]+)`", head, re.M) == list(make_docs.FIRST_FLAGS)


def test_a_default_that_the_help_states_moves_to_its_column():
    by_name = {option.name: option for option in all_options()}
    meaning, default = make_docs.split_default(by_name["global_batch_size"])
    assert (meaning, default) == (
        "packs of one optimizer step",
        "one micro-batch on every data-parallel rank",
    )
    assert make_docs.split_default(by_name["train_iters"])[1] == ""
    assert make_docs.split_default(by_name["append_eod"])[1] == "on"


def test_tables_have_as_many_cells_in_every_row():
    for text in (make_docs.flags_page(), make_docs.metrics_page()):
        for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
            counts = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
            assert len(counts) == 1, table


def test_a_stale_page_is_named_and_rewritten(tmp_path, monkeypatch, capsys):
    """Work on copies, so that the pages of the repository stay as they are."""
    for folder in ("docs/cards", "mkd", "tools/benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(make_docs, "ROOT", tmp_path)
    assert make_docs.main(["--check"]) == 1
    assert "out of date: docs/flags.md" in capsys.readouterr().out
    assert make_docs.main([]) == 0 and make_docs.main(["--check"]) == 0
    assert "out of date" not in capsys.readouterr().out


def test_the_table_of_models_is_that_of_the_registries():
    from mkd.families.registry import FAMILIES
    from mkd.families.vision import VISION_FAMILIES, WITH_IMAGES

    rows = {cells[1].strip(" `"): [one.strip() for one in cells[2:-1]] for cells in table_of_models()}
    assert [*rows] == [*FAMILIES, *VISION_FAMILIES]
    assert rows["qwen3_5_moe"] == ["yes", "yes", "yes", "yes", "no"]
    assert rows["deepseek_v3"] == ["yes", "yes", "no", "no: latent attention", "no"]
    assert rows["llama"] == ["yes", "no", "no", "yes", "yes"]
    assert {name for name, cells in rows.items() if cells[2] == "yes"} == set(WITH_IMAGES)


def table_of_models():
    page = make_docs.models_page()
    return [line.split("|") for line in page.splitlines() if line.startswith("| `")][1:]
