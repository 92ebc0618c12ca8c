"""A save in three steps: all ranks capture the state, each writes its files, all complete the checkpoint.

Order on disk: files in `iter_N.partial`, then the manifest, then the folder's name, then the pointer.
Wherever a save stops, the pointer names a complete checkpoint. If one rank fails, all raise its error.
"""

from __future__ import annotations

import copy
import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess

from mkd.checkpoint.folders import (
    COMMON_FILE,
    HF_FOLDER,
    PARTIAL,
    STATE_FILE,
    Retention,
    TrainingPosition,
    abandon,
    apply_retention,
    iteration_folder,
    later_than_pointer,
    publish,
    remove_stumps,
    write_pointer,
)
from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.checkpoint.manifest import MANIFEST_FILE, FileEntry, manifest_text, seal, sync
from mkd.checkpoint.shards import Written, plan_shards, write_metadata, write_shards
from mkd.errors import CheckpointError, first_line
from mkd.parallel.agreement import agree, attempt, on_rank_0
from mkd.parallel.context import ParallelContext


@dataclass(frozen=True)
class Contents:
    """Content of a checkpoint besides the tensors."""

    position: TrainingPosition
    state: dict  # other entries of mkd.json: layout, optimizer, fingerprints
    assets: HFAssets | None  # the student's


def announce_nothing(moment: str, iteration: int) -> None:
    """Ignore the moments of a save that has no followers."""


@dataclass
class Save:
    """One save. `start` and `finish` are collective; `write` is local and may run in a thread."""

    directory: Path
    contents: Contents
    context: ParallelContext
    retention: Retention = Retention()
    announce: Callable[[str, int], None] = announce_nothing  # (moment, iteration), see operations.phases
    entries: dict[str, FileEntry] = field(default_factory=dict)  # one for each file of this rank
    written: list[Written] = field(default_factory=list)
    problem: CheckpointError | None = None
    write_s: float = 0.0  # from the start until this rank has written its files

    @property
    def folder(self) -> Path:
        """Folder of the complete checkpoint."""
        return iteration_folder(self.directory, self.contents.position.iteration)

    @property
    def partial(self) -> Path:
        """Folder while it is being written."""
        return self.folder.with_name(self.folder.name + PARTIAL)

    def start(self, sharded: ShardedStateDict, copied: bool) -> Save:
        """Capture the tensors, as copies or as they are, and plan which rank writes which. Collective."""
        self.begun = time.monotonic()
        on_rank_0(self._make_room, self._explain)
        tensors, common = save_preprocess(sharded)
        self.common = copy.deepcopy(common) if copied else common
        self.shards = plan_shards(tensors, self.context.copies_group, copied)
        return self

    def write(self) -> Save:
        """Write, hash and sync this rank's files; keep an error for `finish`."""
        _, self.problem = attempt(self._write, self._explain)
        self.write_s = time.monotonic() - self.begun
        return self

    def finish(self) -> Path:
        """Complete the checkpoint, move the pointer to it and return its folder. Collective."""
        try:
            agree(self.problem)
            parts = [None] * self.context.world_size if self.context.rank == 0 else None
            dist.gather_object((self.entries, self.written), parts, dst=0)
            on_rank_0(lambda: self._complete(parts), self._explain)
        except CheckpointError:
            if self.context.rank == 0:
                shutil.rmtree(self.partial, ignore_errors=True)
            raise
        return self.folder

    def _make_room(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_stumps(self.directory)
        self.partial.mkdir()

    def _write(self) -> None:
        self._passed("before_shard")
        on_item = partial(self._passed, "mid_shard")
        self.entries, self.written = write_shards(self.shards, self.partial, self.context.rank, on_item)
        self._passed("after_shards")

    def _complete(self, parts: list[tuple[dict[str, FileEntry], list[Written]]]) -> None:
        """Write the small files, the manifest, the folder's name and the pointer. Runs on rank 0."""
        position = self.contents.position
        write_metadata(self.shards.metadata, [one for _, written in parts for one in written], self.partial)
        torch.save(self.common, self.partial / COMMON_FILE)
        save_config(CheckpointingConfig("torch_dist", 1), str(self.partial))
        content = {**asdict(position), **self.contents.state, "manifest": MANIFEST_FILE}
        (self.partial / STATE_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        if self.contents.assets is not None:
            self.contents.assets.copy_to(self.partial / HF_FOLDER)
        entries = {name: entry for files, _ in parts for name, entry in files.items()}
        files = (path for path in self.partial.rglob("*") if path.is_file())
        names = {path.relative_to(self.partial).as_posix() for path in files}
        entries |= seal(self.partial, sorted(names - entries.keys()))
        self._passed("before_manifest")
        (self.partial / MANIFEST_FILE).write_text(manifest_text(entries), encoding="utf-8")
        sync(self.partial / MANIFEST_FILE)
        for path in (self.partial, *(path for path in self.partial.rglob("*") if path.is_dir())):
            sync(path)
        publish(self.partial, self.folder)
        self._passed("before_pointer")
        abandon(folder for folder in later_than_pointer(self.directory) if folder != self.folder)
        write_pointer(self.directory, position.iteration, lambda: self._passed("mid_pointer"))
        self._passed("after_pointer")
        apply_retention(self.directory, self.retention, position.iteration)

    def _explain(self, error: Exception) -> CheckpointError:
        failed = f"iteration {self.contents.position.iteration} could not be saved in {self.directory}"
        kept = "earlier checkpoints are unchanged"
        of_disk = [cause for cause in _causes(error) if isinstance(cause, OSError)]
        met = {cause.errno for cause in of_disk}
        do = "free some space and restart with --load; --keep-checkpoints K deletes old checkpoints"
        if errno.ENOSPC in met:
            free_gib = shutil.disk_usage(self.directory).free / 2**30
            what = f"{failed}: the disk is full ({free_gib:.2f} GiB are free)"
            return CheckpointError(what, kept, do, code="save-disk-full")
        if errno.EDQUOT in met:
            what = f"{failed}: the disk quota of this user or group is used up"
            return CheckpointError(what, kept, do, code="save-disk-full")
        if errno.EFBIG in met:
            what = f"{failed}: a file would be larger than this process or its file system allows"
            do = "raise the limit (ulimit -f shows that of a process) and restart with --load"
            return CheckpointError(what, kept, do, code="save-disk-full")
        cause = first_line(of_disk[0] if of_disk else error)  # torch reports only that it could not write
        do = "remove the cause and restart with --load"
        return CheckpointError(f"{failed}: {cause} (rank {self.context.rank})", kept, do, code="save-failed")

    def _passed(self, moment: str) -> None:
        self.announce(moment, self.contents.position.iteration)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
