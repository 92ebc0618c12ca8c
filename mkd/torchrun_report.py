"""Why a rank ends, for torchrun or mkd's own launcher, and for the other ranks of this machine.

A launcher sends SIGTERM to all ranks as soon as one has ended, even to a rank that is about to print the
error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torchrun, which shows the file's content as the root cause
PATIENCE_S = 10.0  # how long a rank waits for rank 0 to print an error that all ranks have
POLL_S = 0.02


def tell_torchrun(text: str) -> None:
    """Leave `text` for torchrun, which reports it as the root cause.

    Without it torchrun prints a bare exit code. The file has the format of torch.distributed.elastic's
    ErrorHandler. If a process writes several texts, the first one stays.
    """
    path = os.environ.get(ERROR_FILE)
    if not path or os.path.exists(path):
        return
    message = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(int(time.time()))}}
    try:
        Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")
    except OSError as error:
        print(f"cannot write {path}: {error}", file=sys.stderr, flush=True)


def rank_0_has_reported() -> bool:
    """Wait until the first rank of this machine has told the launcher its error. Return False if it does not.

    Return True at once if no launcher would end that rank, or if this rank is the first one here.
    """
    path, local_rank = os.environ.get(ERROR_FILE), os.environ.get("LOCAL_RANK", "0")
    if not path or local_rank == "0":
        return True
    first = Path(path).parents[1] / "0" / Path(path).name  # each rank has a folder, named by its number
    deadline = time.monotonic() + PATIENCE_S
    while not first.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
