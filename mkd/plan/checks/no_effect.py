"""The problem that several checks report: a setting that nothing reads."""

from __future__ import annotations

from mkd.errors import UsageError


def no_effect(setting: str, why: str, do: str) -> UsageError:
    """Return the error for `setting`. `do` gives it an effect, or is "remove it"."""
    what = f"{setting} would have no effect"
    return UsageError(what, why, do if do == "remove it" else f"{do}, or remove it", code="remove-flag")
