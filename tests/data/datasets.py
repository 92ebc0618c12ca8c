"""Data sets from settings by name, for tests that do not configure a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mkd.config.run_files import rule_for_conversations
from mkd.data.build import DataBuilder
from mkd.data.dataset import BlendedDataset
from mkd.data.packing.pack_settings import PackSettings

OF_OPEN = ("valid_data_path", "split", "is_builder", "share")


def open_datasets(
    *,
    data_path: Sequence[str],
    seq_length: int,
    pack: str = "bfd",
    overlong: str = "split",
    overlong_conversations: str | None = None,
    document_multiple: int = 1,
    max_patches_per_pack: int | None = None,
    **settings: Any,  # of `DataBuilder` and its `open`
) -> tuple[BlendedDataset, BlendedDataset | None]:
    """Return the training and the validation data set, as a run with these settings has them."""
    packing = PackSettings(
        seq_length,
        pack,
        overlong,
        document_multiple,
        overlong_conversations=rule_for_conversations(overlong, overlong_conversations),
        max_patches=max_patches_per_pack,
    )
    paths = {name: settings.pop(name) for name in OF_OPEN if name in settings}
    return DataBuilder(packing=packing, **settings).open(data_path, **paths)
