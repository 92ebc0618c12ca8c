"""The tensors of a `torch_dist` checkpoint: which rank writes which, the files, and their index `.metadata`.

The files equal those of `megatron.core.dist_checkpointing.save`, whose writer makes all ranks wait forever if
one cannot write. Here planning is collective, and writing is local, can run in a thread and waits for no
other rank.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem

from mkd.checkpoint.hashed_file import HashedFile
from mkd.checkpoint.manifest import FileEntry
from mkd.platform import usable_cores

METADATA_FILE = ".metadata"
MAX_FILES = 4  # per rank
SHARD_FILE = "__{rank}_{number}.distcp"


@dataclass(frozen=True)
class Shards:
    """The items that this rank writes."""

    items: Sequence[tuple[WriteItem, Tensor | io.BytesIO]]
    metadata: Metadata | None  # of the whole checkpoint, on rank 0


@dataclass(frozen=True)
class Written:
    """The place of one written item."""

    index: MetadataIndex
    place: _StorageInfo


def plan_shards(sharded: ShardedStateDict, group: dist.ProcessGroup, copied: bool) -> Shards:
    """Divide the tensors among the ranks of `group` that hold equal copies. Collective over all ranks.

    If `copied`, the items are copies in host memory, which later training steps do not change.
    """
    wrapper = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    wrapper.apply_saving_parallelization(sharded)
    flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, keep_only_main_replica=True)
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    is_coordinator = dist.get_rank() == 0
    planner.set_up_planner(mcore_to_pyt_state_dict(flat, False), is_coordinator=is_coordinator)
    plan = planner.create_local_plan()
    plans = [None] * dist.get_world_size() if is_coordinator else None
    dist.gather_object(plan, plans, dst=0)
    metadata = planner.create_global_plan(plans)[1] if is_coordinator else None
    resolved = ((item, planner.resolve_data(item)) for item in plan.items)
    items = [(item, data.detach() if isinstance(data, Tensor) else data) for item, data in resolved]
    if copied:
        items = [(i, data.to("cpu", copy=True) if isinstance(data, Tensor) else data) for i, data in items]
    return Shards(items, metadata)


def write_shards(
    shards: Shards, folder: Path, rank: int, on_item: Callable[[], None]
) -> tuple[dict[str, FileEntry], list[Written]]:
    """Write this rank's files and return (manifest entries, places). Call `on_item` before each item."""
    buckets = [bucket for bucket in _balanced(shards.items) if bucket]
    names = [SHARD_FILE.format(rank=rank, number=number) for number in range(len(buckets))]
    with ThreadPoolExecutor(MAX_FILES) as pool:
        paths = [folder / name for name in names]
        results = list(pool.map(lambda path, bucket: _write_file(path, bucket, on_item), paths, buckets))
    entries = {name: entry for name, (entry, _) in zip(names, results, strict=True)}
    return entries, [one for _, written in results for one in written]


def write_metadata(metadata: Metadata, written: Sequence[Written], folder: Path) -> None:
    """Write `.metadata`: the size of every tensor, its file and its place there."""
    metadata.storage_data = {one.index: one.place for one in written}
    with open(folder / METADATA_FILE, "wb") as file:
        pickle.dump(metadata, file)


def _balanced(items: Sequence[tuple[WriteItem, Tensor | io.BytesIO]]) -> list[list]:
    """Divide the items into lists of about equal bytes, one for each file and thread."""
    files = min(MAX_FILES, usable_cores())
    buckets, loads = [[] for _ in range(files)], [0] * files
    for item, data in sorted(items, key=lambda pair: -pair[1].nbytes if isinstance(pair[1], Tensor) else 0):
        lightest = loads.index(min(loads))
        loads[lightest] += data.nbytes if isinstance(data, Tensor) else data.getbuffer().nbytes
        buckets[lightest].append((item, data))
    return buckets


def _write_file(path: Path, bucket: list, on_item: Callable[[], None]) -> tuple[FileEntry, list[Written]]:
    written = []
    with HashedFile(path) as file:
        for item, data in bucket:
            on_item()
            start = file.size
            if isinstance(data, Tensor):
                data = data.cpu()
                # torch would save the whole storage of a view.
                if data.untyped_storage().nbytes() != data.nbytes:
                    data = data.clone()
                torch.save(data, file)
            else:
                file.write(data.getbuffer())
            written.append(Written(item.index, _StorageInfo(path.name, start, file.size - start)))
    return file.entry, written
