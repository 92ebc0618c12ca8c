"""Clean up when a run ends, however it ends: the last thing that was begun is ended first."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


class Cleanup:
    """A context whose actions all run at its end: a failing action neither prevents the others nor hides the
    run's error.
    """

    def __init__(self):
        self._actions: list[Callable[[BaseException | None], None]] = []

    def add(self, action: Callable[[BaseException | None], None]) -> None:
        """Call `action` at the end, before the actions added earlier, with the error that ended the run or
        None.
        """
        self._actions.append(action)

    def __enter__(self) -> Cleanup:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Run the actions. If the run itself succeeded, raise the first error of an action; print all other
        errors.
        """
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
