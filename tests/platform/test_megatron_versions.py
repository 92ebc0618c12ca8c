"""Check what newer versions of megatron-core are kept from saying, and that nothing else is lost."""

from __future__ import annotations

import logging
import warnings

import pytest

from mkd.platform.megatron_versions import LOG_LINES, WARNINGS, quiet_newer_versions


@pytest.mark.parametrize("name", LOG_LINES)
def test_only_known_log_lines_are_dropped(name, caplog):
    quiet_newer_versions()
    quiet_newer_versions()
    logger = logging.getLogger(name)
    logger.warning("%s and more", LOG_LINES[name])
    logger.warning("something new")
    assert caplog.messages == ["something new"]


def test_only_known_warnings_are_dropped():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet_newer_versions()
        for message in (*WARNINGS, "something new"):
            warnings.warn(f"{message} and more", UserWarning, stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["something new and more"]
