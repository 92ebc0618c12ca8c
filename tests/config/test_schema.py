from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from mkd.config.options import all_options, section_types
from mkd.config.schema import Config

ROOT = Path(__file__).resolve().parents[2]


def test_importing_the_config_is_light():
    modules = "mkd.config, mkd.config.load, mkd.plan.checks.problems"
    heavy = ("torch", "numpy", "transformers", "megatron")
    code = f"import sys, {modules}; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_names_and_paths_are_unique():
    options = all_options()
    for attribute in ("name", "path", "flag"):
        values = [getattr(option, attribute) for option in options]
        assert len(set(values)) == len(values)
    assert not {option.name for option in options} & {*section_types(), "teachers", "config", "help"}


def test_every_option_has_help_and_a_default_it_accepts():
    for option in all_options():
        assert option.help
        if option.choices and option.default is not None:
            assert option.default in option.choices
        if option.default is None:
            assert option.optional, option.path
        else:
            assert isinstance(option.default, option.kind), option.path


def test_help_texts_keep_the_rules_of_writing():
    """Sentences have at most 25 words. `(default: ...)` ends a text, only if the default is None or empty."""
    for option in all_options():
        assert "not given" not in option.help.lower(), option.path
        sentences = re.split(r"(?<=\.)\s", option.help)
        assert max(len(sentence.split()) for sentence in sentences) <= 25, option.path
        if "default:" in option.help:
            assert re.search(r" \(default: [^()]+\)$", option.help), option.path
            assert option.default in (None, ()), option.path
        assert not option.help.endswith("."), option.path


def test_every_section_says_what_it_is_for():
    assert all(cls.__doc__ and not cls.__doc__.startswith(cls.__name__) for cls in section_types().values())


def test_defaults_build_a_config():
    assert Config().teachers == () and Config().kd.kd_ratio == 0.5
