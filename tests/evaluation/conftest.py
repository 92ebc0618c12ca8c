"""Define the fixtures of the tests of held-out tasks."""

from __future__ import annotations

from tests.data.conftest import write_jsonl

__all__ = ["write_jsonl"]
