"""Clean up when a run ends, however it ends: what was started last is ended first."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


class Cleanup:
    """Run all actions at the end, in reverse order, even if one fails. The run's error comes first."""

    def __init__(self) -> None:
        self._actions: list[Callable[[BaseException | None], None]] = []

    def add(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action` at the end with the run's error or None. Later actions run earlier."""
        self._actions.append(action)

    def __enter__(self) -> Cleanup:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Run the actions. Raise the first error if the run itself succeeded; print all others."""
        first = None
        for action in reversed(self._actions):
            try:
                action(error)
            except Exception as found:
                if error is None:
                    error = first = found
                else:
                    text = "".join(traceback.format_exception(found))
                    print("while the run ended:", text, file=sys.stderr, flush=True)
        if first is not None:
            raise first
