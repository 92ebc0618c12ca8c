from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser

import pytest

from mkd.commands.report import main
from mkd.report.page import ASSETS, build_page, chart_data
from mkd.report.run_folder import open_runs
from tests.report.run_files import full_run, write_run


class Page(HTMLParser):
    """Collects elements, the text of scripts, and the text of everything else."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.words.append(data)


def test_tables_need_no_script(tmp_path):
    """Everything but the curves is text of the page."""
    page = Page(build_page(open_runs([full_run(tmp_path / "a"), full_run(tmp_path / "b", 2.0)])))
    text = " ".join(" ".join(page.words).split())
    for part in (
        "iteration 100 of 100",
        "kd_loss nats/row a 1.2 at 0 0.2357 at 100",
        "0.75 big",
        "0.5 CE + 0.5 KD",
        "Settings that differ between the runs setting a origin b origin "
        "kd.kd_temperature 1.0 --kd-temperature 2.0 --kd-temperature",
        "step_time_ms ms a 100 201 2.01",
        "a ran on a CPU",
        "50 resume resumed from iteration 50",
        "completion 4",
    ):
        assert part in text, part


def test_the_name_of_a_run_is_the_title(tmp_path):
    """If --name was given; the default names no run, so the folder does."""
    folder = full_run(tmp_path / "a")
    for origin, title in (("--name", "mkd: my run"), ("default", "mkd: a")):
        (folder / "config.yaml").write_text(f'log:\n  name: "my run"  # {origin}\n')
        assert f"<title>{title}</title>" in build_page(open_runs([folder]))


def test_text_of_a_run_is_never_markup(tmp_path):
    """Names, settings, events, samples and keys may hold anything that means something to HTML or JSON."""
    evil = "</script><script>alert(1)</script><!--<img src=x onerror=alert(2)>&lt;'\"]]>{{ 7 * 7 }}"
    name = "<script>alert(3)<" + chr(47) + "script>"  # the separator becomes part of the path
    records = [{"iteration": i, "loss": 1.0, f"kd_loss/{evil}": 2.0} for i in (1, 2)]
    records += [{"iteration": i, "split": evil, "loss": 1.0} for i in (1, 2)]
    folder = write_run(
        tmp_path / name,
        records,
        config_yaml=f"kd:\n  x: {json.dumps(evil)}  # {evil}\n",
        loss_card_txt=f"loss card\n  {evil}  {evil}\n",
        plan_json=json.dumps({"text": evil, "device": evil, "step_time_ms": evil}),
        events_jsonl=json.dumps({"iteration": 1, "kind": evil, "text": evil, "time": evil}),
        samples_jsonl=json.dumps({evil: evil, "n": {"deep": evil}}) + "\n",
    )
    plain, text = build_page(open_runs([full_run(tmp_path / "a")])), build_page(open_runs([folder]), evil)
    safe, page = Page(plain), Page(text)
    assert len(page.scripts) == len(safe.scripts) == 4 and page.scripts[1:] == safe.scripts[1:]
    assert set(page.tags) <= set(safe.tags) and not [
        key for key, _ in page.attributes if key.startswith("on")
    ]
    shown = "".join(page.words)
    assert shown.count(evil) >= 9 and "49" not in shown.replace("2049", "")
    data = json.loads(page.scripts[0])
    assert [one["split"] for one in data["splits"]] == ["train", evil]
    assert f"kd_loss/{evil}" in [panel["key"] for panel in data["panels"]]


def test_the_page_loads_nothing(tmp_path):
    """No element or style names an address, and the policy allows the page's own scripts only."""
    text = build_page(open_runs([full_run(tmp_path / "a")]))
    page = Page(text)
    links = [value for key, value in page.attributes if key in ("src", "href", "action", "srcset")]
    assert [link for link in links if not link.startswith(("#", "data:"))] == []
    assert "url(" not in text and "@import" not in text
    policy = next(value for key, value in page.attributes if key == "content" and "default-src" in value)
    assert (
        policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe-inline' 'sha" not in policy
    )
    assert len(text) < 1e6


def test_the_vendored_library_is_the_published_one():
    """Version and licence stand beside it; a script that ended its element would break the page."""
    library = (ASSETS / "uPlot.iife.min.js").read_text(encoding="utf-8")
    assert "uPlot (v1.6.32)" in library[:80] and "uPlot 1.6.32" in (ASSETS / "report.html.j2").read_text()
    assert "MIT License" in (ASSETS / "uPlot.LICENSE").read_text()
    assert not [path.name for path in ASSETS.glob("*.js") if "</script" in path.read_text(encoding="utf-8")]


def test_the_plots_of_many_long_runs_stay_small(tmp_path):
    """Extremes survive: the one spike of each run is the maximum of its bucket."""
    runs = []
    for run in range(2):
        records = [
            {"iteration": i, "consumed_tokens": 1000 * i, **{f"kd_loss/{k}": i / 7 + k for k in range(40)}}
            for i in range(1500)
        ]
        records[1234]["kd_loss/3"] = 9e9
        runs.append(write_run(tmp_path / f"run{run}", records))
    data = chart_data(open_runs(runs))
    assert len(json.dumps(data)) < 5e6 and all(one["bucket"] > 1 for one in data["splits"])
    assert all(max(one["high"]["kd_loss/3"]) == 9e9 for one in data["splits"])


@pytest.mark.slow
def test_a_million_records(tmp_path, capsys):
    keys = ("loss", "ce_loss", "kd_loss", "grad_norm", "learning_rate", "step_time_ms", "consumed_tokens")
    (tmp_path / "long").mkdir()
    with (tmp_path / "long" / "metrics.jsonl").open("w") as file:
        for step in range(1_000_000):
            values = ", ".join(f'"{key}": {(step * 7919 % 1013) / 997}' for key in keys)
            file.write(f'{{"iteration": {step}, {values}}}\n')
    start = time.monotonic()
    assert main([str(tmp_path / "long")]) == 0
    assert time.monotonic() - start < 120
    assert (tmp_path / "long" / "report.html").stat().st_size < 5e6
    assert re.search(r"mean of \d+ records", (tmp_path / "long" / "report.html").read_text())
