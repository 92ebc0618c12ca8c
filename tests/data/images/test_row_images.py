"""The images of a micro-batch: pixels of the owners alone, places and positions of the whole row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mkd.data.corpus.store import TokenStore
from mkd.data.corpus.store_builder import build_store
from mkd.data.dataset import PackedDataset
from mkd.data.images.image_table import grids_of
from mkd.data.images.row_images import ImageLayout, rotary_positions
from mkd.data.loader import EvalStream, TrainStream
from mkd.errors import DataError
from mkd.parallel.image_row import num_patches
from mkd.parallel.zigzag import RowShard
from tests.data.images.test_conversation import asked, data_uri
from tests.data.images.tiny_processors import image_file, picture
from tests.reported import refused

SIZES = [(40, 40), (60, 20), (16, 16), (24, 50), (9, 9), (30, 30)]


@pytest.fixture
def open_data(reader, write_jsonl, tmp_path):
    """Return open_data(family) -> data set of documents with one to three images, in packs of 256 tokens."""

    def open_(family="qwen2_5_vl"):
        images, records = reader(family), []
        for number, size in enumerate(SIZES):
            path = tmp_path / "pictures" / f"{number}.png"
            path.write_bytes(image_file(picture(*size)))
            held = [data_uri(image_file(picture(*other))) for other in SIZES[: number % 3]]
            records += [asked(path.name, *held), {"text": "the quick brown fox"}]
        prefix = str(tmp_path / "out" / family)
        tokenizer = images.processor.tokenizer
        build_store([write_jsonl("a.jsonl", *records)], prefix, tokenizer, True, images=images)
        options = dict(vocab_size=400, pad_id=0, seq_length=256, document_multiple=4, images=images)
        return PackedDataset(TokenStore(prefix), **options)

    return open_


def steps(dataset, **layout):
    sizes = dict(micro_batch_size=2, global_batch_size=2, seed=3)
    stream = TrainStream(dataset, **sizes, **layout)
    return [stream.next_step()[0] for _ in range(2)]


def features(batch):
    """Return one number for each feature of this rank's images: the mean of its patches, [slots]."""
    image, values, row = batch.images, [], 0
    for grid in image.grids:
        rows = num_patches(grid) if image.pixels.dim() == 2 else grid[0]
        pixels = image.pixels[row : row + rows].float().flatten(1)
        values.append(pixels.reshape(num_patches(grid) // 4, -1).mean(1))
        row += rows
    assert row == len(image.pixels)
    found = torch.zeros(image.slots)
    joined = torch.cat(values) if values else found[:0]
    found[: len(joined)] = joined
    return found


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_every_image_token_takes_the_feature_of_its_own_image(open_data, family):
    """The whole row on one rank against each image read and processed by itself."""
    dataset = open_data(family)
    processor, table = dataset.images.processor, dataset.store.images
    for batch in steps(dataset):
        row = torch.full((batch.tokens.shape[1],), -1.0)
        row[batch.images.rows] = features(batch)[batch.images.features]
        assert torch.equal(row >= 0, batch.tokens[0] == processor.image_token_id)
        wanted = []
        for sample in batch.sample_ids:
            for document in dataset.index.pieces_of(sample).document.tolist():
                for record in table.between(document, document + 1):
                    pixels = processor.pixels(table.decode(record, dataset.images.source))
                    num_tokens = num_patches(grids_of(record[None])[0]) // 4
                    wanted.append(pixels.astype(np.float32).reshape(num_tokens, -1).mean(1))
        torch.testing.assert_close(row[row >= 0], torch.from_numpy(np.concatenate(wanted)))


@pytest.mark.parametrize(
    "tp,cp,sequence_parallel", [(2, 1, False), (2, 1, True), (1, 2, False), (2, 2, True)]
)
def test_dealt_images_join_to_the_whole_row(open_data, tp, cp, sequence_parallel):
    dataset = open_data()
    alone = steps(dataset)
    ranks = [(c, t) for c in range(cp) for t in range(tp)]
    shares = []
    for c, t in ranks:
        share = (t, tp) if sequence_parallel else (0, 1)
        layout = ImageLayout(c * tp + t, tp * cp, *share)
        shares.append(steps(dataset, shard=RowShard(c, cp), images=layout))
    for step, whole in enumerate(alone):
        parts = [share[step] for share in shares]
        assert sum(len(part.images.pixels) for part in parts) == len(whole.images.pixels)
        assert all(len(part.images.pixels) for part in parts), "every rank has images"
        gathered = torch.cat([features(part) for part in parts])
        row = features(whole)[whole.images.features]
        held = torch.full((whole.tokens.shape[1],), -1.0)
        held[whole.images.rows] = row
        for (c, t), part in zip(ranks, parts, strict=True):
            rows = torch.arange(held.numel())
            if cp > 1:
                rows = RowShard(c, cp).rows(whole.cu_seqlens_padded)
            rows = rows.view(tp, -1)[t] if sequence_parallel else rows
            local = torch.full((len(rows),), -1.0)
            local[part.images.rows] = gathered[part.images.features]
            assert torch.equal(local, held[rows])
            assert torch.equal(part.images.positions, whole.images.positions)


def test_positions_start_at_zero_in_every_document(open_data):
    dataset = open_data()
    for batch in steps(dataset):
        borders, document = batch.cu_seqlens_padded.tolist(), 0
        for sample in batch.sample_ids:
            pieces = dataset.index.pieces_of(sample)
            for number in pieces.document.tolist():
                records = dataset.store.images.between(number, number + 1)
                images = list(zip(records["first"].tolist(), grids_of(records), strict=True))
                first, last = borders[document], borders[document + 1]
                wanted = rotary_positions(last - first, images, 2)
                np.testing.assert_array_equal(batch.images.positions[:, first:last].numpy(), wanted)
                document += 1
        assert document == len(borders) - 1


def test_later_stages_get_positions_alone(open_data, monkeypatch):
    dataset = open_data()
    whole = steps(dataset)
    monkeypatch.setattr("mkd.data.images.image_table.decode_image", None)  # nothing is decoded
    for batch, other in zip(steps(dataset, images=ImageLayout(runs_tower=False)), whole, strict=True):
        assert batch.images.pixels.shape == (0, 96) and batch.images.grids == ()
        assert torch.equal(batch.images.positions, other.images.positions)


def test_workers_and_a_later_start_change_nothing(open_data):
    dataset = open_data()
    first, second = steps(dataset)
    read_ahead = steps(dataset, num_workers=1)
    (resumed,) = TrainStream(
        dataset, seed=3, consumed_samples=2, micro_batch_size=2, global_batch_size=2
    ).next_step()
    for one, other in ((read_ahead[0], first), (read_ahead[1], second), (resumed, second)):
        assert torch.equal(one.images.pixels, other.images.pixels) and one.images.grids == other.images.grids
        assert torch.equal(one.images.rows, other.images.rows) and torch.equal(one.tokens, other.tokens)


def test_a_step_filled_up_with_empty_packs_has_its_images(open_data):
    dataset = open_data()
    stream = EvalStream(dataset, eval_iters=9, micro_batch_size=1, global_batch_size=2 * len(dataset) + 1)
    batches = [batch for step in stream for batch in step]
    empty = [batch for batch in batches if batch.sample_ids == (-1,)]
    assert len(empty) == len(dataset) + 1 and all(len(batch.images.pixels) == 0 for batch in empty)
    total = sum(num_patches(grid) for grid in grids_of(dataset.store.images.between(0, len(dataset.store))))
    assert sum(len(batch.images.pixels) for batch in batches) == total


def test_an_image_that_changes_ends_the_run(open_data, tmp_path):
    """Every rank would see other pixels than its tokens say: exit code 65."""
    dataset = open_data()
    (tmp_path / "pictures" / "0.png").write_bytes(image_file(picture(40, 40, seed=1)))
    stream = EvalStream(dataset, eval_iters=99, micro_batch_size=1, global_batch_size=1)
    with refused("image-changed", DataError) as caught:
        list(stream)
    assert caught.value.exit_code == 65
