"""Check the recorded figures, and the table of their latest medians."""

from __future__ import annotations

import re

from tools.benchmarks.results import BENCHMARKS, RESULTS, append_figures, latest_medians, read_figures

HEADER = "date,machine,commit,command,case,arm,quantity,unit,median,lowest,highest\n"


def test_every_recorded_figure_is_whole():
    assert {path.stem for path in RESULTS.glob("*.csv")} == set(BENCHMARKS)
    for benchmark in BENCHMARKS:
        for figure in read_figures(benchmark):
            assert re.fullmatch(r"\d{4}-\d\d-\d\d", figure.date) and figure.machine and figure.commit
            assert figure.command and figure.case and figure.arm and figure.quantity
            assert figure.median or (figure.lowest and figure.highest)
            assert all(float(number) >= 0 for number in figure.numbers())


def test_a_row_has_the_latest_median_and_the_spread_of_all_runs(tmp_path):
    for benchmark in BENCHMARKS:
        (tmp_path / f"{benchmark}.csv").write_text(HEADER)
    rows = [
        "2026-01-01,A,c1,head,1x2,ours,time,ms,5.0,,",
        "2026-01-02,A,c2,head,1x2,ours,time,ms,4.10,,",
        "2026-01-02,B,c2,head,1x2,ours,time,ms,9.0,,",
        "2026-01-02,C,c2,head,1x2,ours,time,ms,4.5,,",
        "2026-01-03,D,c3,head,1x2,ours,time,ms,,3.9,4.0",
        "2026-01-02,A,c2,head,1x2,ours,peak,GiB,2.0,,",
        "2026-01-02,A,c2,head,1x2,peer,time / ours,,1.5,,",
        "2026-01-02,A,c2,head,1x2,peer,peak,GiB,1.0,,",
        "2026-01-02,B,c2,head,1x2,peer,peak,GiB,3.0,,",
    ]
    (tmp_path / "head.csv").write_text(HEADER + "\n".join(rows) + "\n")
    assert latest_medians(tmp_path)[1:] == [
        ("head", "1x2", "ours", "4.5 ms", "3.9 to 9.0", "peak 2.0 GiB", "2026-01-02"),
        ("head", "1x2", "peer", "time / ours 1.5", "", "peak 1.0 GiB (1.0 to 3.0)", "2026-01-02"),
    ]


def test_a_range_alone_has_no_median(tmp_path):
    for benchmark in BENCHMARKS:
        (tmp_path / f"{benchmark}.csv").write_text(HEADER)
    (tmp_path / "step.csv").write_text(HEADER + "2026-01-03,D,c3,step,one,KD step,time,ms,,3.9,4.0\n")
    assert latest_medians(tmp_path)[1:] == [("step", "one", "KD step", "", "3.9 to 4.0", "", "2026-01-03")]


def test_appended_medians_are_read_back(tmp_path):
    path = tmp_path / "step.csv"
    append_figures(path, "CPU", ["step", "--flags", "--lr 0"], {"one GPU": {"KD step": 12.3456}})
    append_figures(path, "CPU", ["step"], {"one GPU": {"KD step": 12.0}})
    first, second = read_figures("step", tmp_path)
    assert (first.case, first.arm, first.median, first.unit) == ("one GPU", "KD step", "12.35", "ms")
    assert first.command == "step --flags '--lr 0'" and second.median == "12"
