"""Every command in README and docs is run by a test, or named as one that needs more than a test has."""

from __future__ import annotations

import re

from mkd.__main__ import COMMANDS
from mkd.commands.completion import flags_of
from tests.docs.documented_commands import NEEDS, ROOT, RUN_BY, runs, shown_commands

WRONG_ON_PURPOSE = ["--learning-rate"]  # what a page says is answered with another name
SHOWN = list(shown_commands())


def test_commands_are_found():
    assert len(SHOWN) > 100 and {"train", "plan", "make-student"} <= {one.command for one in SHOWN}


def test_every_command_has_a_test_or_a_reason():
    unknown = [(one.page, one.text) for one in SHOWN if runs(one) is None]
    assert unknown == [], "add the test that runs them to tests/docs/documented_commands.py"
    files = {one for one in map(runs, SHOWN) if one not in NEEDS}
    assert [file for file in sorted(files) if not (ROOT / file).is_file()] == []


def test_every_flag_of_a_documented_command_exists():
    wrong = []
    known = {name: set(flags_of(name)) for name in {one.command for one in SHOWN} & set(COMMANDS)}
    for one in SHOWN:
        if one.command is None:
            continue
        flags = known.get(one.command, set()) | {"--help", "--help-all", "--nproc-per-node", "--config"}
        negated = {flag.replace("--no-", "--") for flag in flags}
        wrong += [(one.page, one.command, flag) for flag in one.flags if flag not in flags | negated]
        wrong += [(one.page, one.command, "is no command")] if one.command not in COMMANDS else []
    assert [flag for _, _, flag in wrong] == WRONG_ON_PURPOSE, wrong


def test_scripts_that_pages_run_exist():
    gone = [one for one in SHOWN if re.match(r"(?:python|torchrun .*?) (tools|launch)/", one.text)]
    paths = {(one.page, re.search(r"(?:tools|launch)/[\w./]+", one.text)[0]) for one in gone}
    studies = ("distillation_pays", "fp8_quality", "on_policy_pays", "reward_gain", "vlm_distillation_pays")
    missing = [(page, path) for page, path in sorted(paths) if not (ROOT / path).is_file()]
    assert [one for one in missing if not one[1].endswith(tuple(f"{name}.py" for name in studies))] == []


def test_every_entry_of_the_registry_is_needed():
    texts = [re.sub(r"(--nproc-per-node) \d+", r"\1 N", one.text) for one in SHOWN]
    assert [start for start in RUN_BY if not any(text.startswith(start) for text in texts)] == []
