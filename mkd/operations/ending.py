"""What is left to do when a run ends, however it ends: the last thing that was begun is ended first."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


class Ending:
    """A context. Of the actions none keeps another from being done, and none hides why the run has ended."""

    def __init__(self):
        self._actions: list[Callable[[BaseException | None], None]] = []

    def add(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action` at the end, before those that were added earlier, with what the run has failed of."""
        self._actions.append(action)

    def __enter__(self) -> Ending:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Raises the first error of an action where the run itself has none; the others are printed."""
        first = None
        for action in reversed(self._actions):
            try:
                action(error)
            except Exception as found:
                if error is None:
                    error = first = found
                else:
                    print(
                        "while the run ended:",
                        "".join(traceback.format_exception(found)),
                        file=sys.stderr,
                        flush=True,
                    )
        if first is not None:
            raise first
