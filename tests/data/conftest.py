"""Helpers to write files and corpora."""

from __future__ import annotations

import json

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from mkd.data.corpus.store import TokenStore
from tests.tokenizers.trained import hf_dir, spm_file, tokenizer  # noqa: F401


@pytest.fixture
def write_jsonl(tmp_path):
    """Return write_jsonl(name, record, ...) -> path; a record is an object, or a raw line as bytes."""

    def write(name, *records):
        lines = [record if isinstance(record, bytes) else json.dumps(record).encode() for record in records]
        path = tmp_path / name
        path.write_bytes(b"\n".join(lines) + b"\n")
        return str(path)

    return write


@pytest.fixture
def make_store(tmp_path):
    """Return make_store(documents, masks=None, name=...) -> TokenStore.

    It writes a plain Megatron corpus with these ids.
    """

    def make(documents, masks=None, name="corpus"):
        prefix = str(tmp_path / name)
        builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
        for ids in documents:
            builder.add_document(np.asarray(ids, dtype=np.int32), [len(ids)])
        builder.finalize(prefix + ".idx")
        if masks is not None:
            np.concatenate([np.asarray(mask, dtype=np.uint8) for mask in masks]).tofile(
                prefix + ".loss_mask.bin"
            )
        return TokenStore(prefix)

    return make
