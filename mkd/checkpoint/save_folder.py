"""The --save folder before the first save: the lock that admits one writer."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from mkd.checkpoint.folders import SLURM_JOB
from mkd.errors import CheckpointError
from mkd.parallel.agreement import on_rank_0
from mkd.parallel.context import ParallelContext

LOCK_FILE = "writer.lock"
HELD = frozenset({errno.EACCES, errno.EAGAIN})


def lock_folder(directory: Path, context: ParallelContext) -> WriterLock | None:
    """Create the save folder and return its lock on rank 0, None elsewhere. Collective."""

    def take() -> WriterLock:
        directory.mkdir(parents=True, exist_ok=True)
        return WriterLock.take(directory)

    def explain(error: Exception) -> CheckpointError:
        what, do = f"cannot write to {directory}: {error}", "choose another --save"
        return CheckpointError(what, do=do, code="save-not-writable")

    return on_rank_0(take, explain)


@dataclass
class WriterLock:
    """The lock that rank 0 holds for as long as the run may save.

    The operating system's lock on the file decides. It ends with the process, however the process ends. The
    text in the file is for people, and decides only on a file system without locks. A writer is then a live
    process of this host, or any process of another host, unless it belongs to the same Slurm job.
    """

    path: Path
    descriptor: int | None

    @classmethod
    def take(cls, directory: Path) -> WriterLock:
        """Take the lock. Raises CheckpointError, with host and process, if another process holds it."""
        path = directory / LOCK_FILE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            holder = _read(descriptor)
            try:
                # Unlike flock, lockf does not share the lock with forked children.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = False
            except OSError as error:
                is_held = error.errno in HELD or _is_writer(holder)
            if is_held:
                raise _refusal(path, holder)
            own = dict(host=socket.gethostname(), pid=os.getpid(), slurm_job=os.environ.get(SLURM_JOB))
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(own).encode() + b"\n", 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self) -> None:
        """Release the lock. The empty file stays, because deleting it could delete the next writer's lock."""
        if self.descriptor is not None:
            os.ftruncate(self.descriptor, 0)
            os.close(self.descriptor)
            self.descriptor = None

    def __del__(self):
        if self.descriptor is not None:
            os.close(self.descriptor)


def _read(descriptor: int) -> dict:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_writer(holder: dict) -> bool:
    """Return True if the process named in the file may still write; {} names none."""
    if not holder:
        return False
    if holder.get("host") != socket.gethostname():
        return holder.get("slurm_job") is None or holder["slurm_job"] != os.environ.get(SLURM_JOB)
    return isinstance(holder.get("pid"), int) and Path(f"/proc/{holder['pid']}").exists()


def _refusal(path: Path, holder: dict) -> CheckpointError:
    who = f"process {holder.get('pid', 'unknown')} on {holder.get('host', 'an unknown host')}"
    return CheckpointError(
        f"{path.parent} is the save folder of another run: {who}",
        "two runs that save in one folder would overwrite each other's checkpoints",
        f"stop that run, choose another --save, or delete {path} if you are sure that it has ended",
        code="save-in-use",
    )
