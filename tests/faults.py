"""Print the fault table, as a pytest plugin.

    make faults
    python -m pytest -p tests.faults -m fault [tests/...]

A test names the faults that it covers with `@pytest.mark.fault(3)` or `@pytest.mark.fault("13 save", 14)`. At
the end each row of `ROWS` is printed with its result. Cases of a row that could hide each other are separate
rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

ROWS = {
    1: ("stop at N, go on to 2N", "same hash as without a stop"),
    2: ("kill -9 at 20 random steps", "goes on, same hash, 20/20"),
    3: ("kill -9 at each point of a save", "old or new checkpoint, never none"),
    4: ("pointer empty, partial, garbage, astray", "newest whole one and a warning, else exit 66"),
    5: ("a flipped bit in any file", "seen, file named, older one used"),
    6: ("files cut, emptied, gone, of two steps", "seen"),
    7: ("torn manifest on rank 0", "all ranks fail together in 5 s"),
    8: ("full disk during a save", "said clearly, older one intact"),
    9: ("I/O error on one rank", "all ranks know in 10 s, pointer stays"),
    10: ("state changes during a background save", "values of the step of the call"),
    11: ("background writer dies", "pointer stays, next save works"),
    12: ("retention beside torn folders", "last whole one is kept"),
    13: ("SIGTERM, SIGUSR1 or Ctrl-C between steps", "one step saved by all, PREEMPTED, exit 75"),
    "13 first step": ("... before the first step", "the same, nothing lost"),
    "13 data build": ("... while data are tokenised", "the same, the unfinished file is lost"),
    "13 evaluation": ("... during an evaluation", "the same, without the rest of it"),
    "13 save": ("... during a save", "the save is finished, the same"),
    "13 twice": ("a second Ctrl-C", "all ranks end with 130, without a traceback; earlier checkpoints stay"),
    14: ("a signal to data workers too", "still saved"),
    15: ("Slurm: --signal=USR1@T, three requeues", "goes on, same hash"),
    16: ("the same step crashes three times", "exit 76"),
    17: ("SIGSTOP or a hang of one rank", "ends in time with stacks"),
    18: ("a rank raises, exits, skips a collective", "others down in 10 s, its traceback on top"),
    19: ("NaN or Inf of one rank", "no update anywhere; exit 70, or a skip with ids"),
    20: ("NaN or Inf of the teacher", "teacher and sample named"),
    21: ("a loss spike of 10", "flagged; no false alarm in 500 steps"),
    22: ("a crash loop over an epoch", "each sample once"),
    23: ("DP, TP, PP changed at a restart", "same parameters, same samples"),
    24: ("bad records", "line and reason listed, others intact; exit 65"),
    25: ("empty, one-token, overlong, 20 MB documents", "defined packing, seconds"),
    26: ("text that spells special tokens", "plain text"),
    27: (".bin cut, .idx wrong", "refused before the first step"),
    28: ("another tokenizer of the same size", "refused by content"),
    29: ("teacher vocabulary wider, padded columns", "equals the unpadded reference"),
    30: ("crafted pickles", "refused, nothing is run"),
    31: ("unsafe weight_map, absurd safetensors", "refused, tensor named"),
    32: ("auto_map code, YAML tags and typos", "not run, named"),
    33: ("two runs in one folder, read-only folder", "second refused, said clearly"),
    34: ("export to Hugging Face interrupted", "index last, never half an export"),
    35: ("all loss tokens masked", "contribute nothing; all data: refused"),
    36: ("soak: a random fault every 15 steps", "same hash, 5 seeds"),
    "37 killed": ("teacher's own processes: kill -9 of each", "others down in 10 s, all name it; resumes"),
    "37 stopped": ("... SIGSTOP of each", "others down in 30 s, all name it"),
    "37 hang": ("... a hang of one", "all down in the time of a step, with stacks"),
    "37 error": ("... one raises, or has no memory", "others down in 10 s, its traceback on top"),
    "37 start": ("... one cannot start, or has other settings", "all end with its exit code"),
    "37 signal": ("... a signal to one or all, in every phase", "one step saved, exit 75 of all"),
    "37 no end": ("... a student that never ends them", "all end in the time of a save after the signal"),
    "37 reading": ("... a student that reads its data for longer than a step may take", "its teacher waits"),
    "37 busy": ("... a busy or paused machine", "no false alarm"),
}
"""{row: (fault, what is expected)}, a short form of the acceptance page."""


@dataclass
class Seen:
    """Results of the tests of one row."""

    counts: Counter = field(default_factory=Counter)  # {passed, failed, skipped: number of cases}
    reasons: set = field(default_factory=set)  # reasons of skips
    duration_s: float = 0.0

    def verdict(self) -> str:
        if not self.counts:
            return "no test"
        if self.counts["failed"]:
            return "NO"
        return "yes" if self.counts["passed"] else "not run"

    def describe(self) -> str:
        cases = ", ".join(f"{number} {outcome}" for outcome, number in sorted(self.counts.items()))
        reasons = f" ({'; '.join(sorted(self.reasons))})" if self.reasons else ""
        return f"{cases}{reasons}, {self.duration_s:.0f} s" if cases else ""


def pytest_itemcollected(item):
    """Store the rows in the reports, so that the table is complete if workers run the tests."""
    rows = list(dict.fromkeys(row for mark in item.iter_markers("fault") for row in mark.args))
    if unknown := [row for row in rows if row not in ROWS]:
        raise ValueError(f"{item.nodeid}: no such row of the fault table: {unknown}")
    item.user_properties.extend(("fault", row) for row in rows)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("faults")
    for line in table(terminalreporter.stats):
        terminalreporter.write_line(line)


def table(stats: dict[str, list]) -> list[str]:
    """Return the lines of the table, from pytest's {outcome: reports}."""
    seen = defaultdict(Seen)
    for outcome, reports in stats.items():
        for report in reports:
            for name, row in getattr(report, "user_properties", ()):
                if name == "fault":
                    _add(seen[row], "failed" if outcome == "error" else outcome, report)
    cells = [("row", "fault", "expected", "passed", "seen")]
    for row, (fault, expected) in ROWS.items():
        cells.append((str(row), fault, expected, seen[row].verdict(), seen[row].describe()))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _add(seen: Seen, outcome: str, report) -> None:
    """Add a report. `outcome` is "" for a set-up or tear-down without errors, which only adds time."""
    seen.duration_s += report.duration
    if outcome in ("passed", "failed", "skipped"):
        seen.counts[outcome] += 1
    if outcome == "skipped":
        seen.reasons.add(report.longrepr[2].removeprefix("Skipped: "))
