"""Teacher and student see the same images in their own tokens; the chunks of the text stay aligned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mkd.data.aligned.teacher_side import TeacherText
from mkd.data.images.conversation import image_reader
from mkd.data.images.image_table import grids_of
from mkd.data.images.row_images import ImageLayout
from mkd.data.loader import TrainStream
from mkd.errors import ErrorList
from mkd.parallel.image_row import num_patches
from mkd.parallel.zigzag import RowShard
from mkd.tokenizers.hugging_face import load_hugging_face
from tests.data.datasets import open_datasets
from tests.data.images.test_conversation import ANSWER, asked
from tests.data.images.tiny_processors import image_file, make_qwen, make_smolvlm, picture

SIZES = [(40, 40), (60, 20), (16, 16), (24, 50), (9, 9)]
MAX_PIXELS = 1 << 20


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    parent = tmp_path_factory.mktemp("pairs")
    return {
        "qwen": make_qwen(parent / "qwen", most_pixels=16 * 16),
        "finer": make_qwen(parent / "finer"),
        "smolvlm": make_smolvlm(parent / "smolvlm"),
    }


@pytest.fixture
def open_pair(folders, tmp_path, write_jsonl):
    """Return open_pair(student, teacher) -> data set of conversations with up to two images."""
    records = []
    for number, size in enumerate(SIZES):
        (tmp_path / f"{number}.png").write_bytes(image_file(picture(*size)))
        messages = asked(*(f"{n}.png" for n in range(number, min(number + 2, len(SIZES)))))["messages"]
        records.append({"messages": [*messages, {"role": "user", "content": "why?"}, ANSWER]})
    records.append({"messages": [{"role": "user", "content": "the lazy dog"}, ANSWER]})
    path = write_jsonl("a.jsonl", *records)

    def open_(student, teacher, max_patches=None, **options):
        readers = [
            image_reader(folders[name], load_hugging_face(str(folders[name])), str(tmp_path), MAX_PIXELS)
            for name in (student, teacher)
        ]
        text = TeacherText(tokenizer=readers[1].processor.tokenizer, vocab_size=400, images=readers[1])
        given = dict(tokenizer=readers[0].processor.tokenizer, seq_length=192, vocab_size=400)
        given |= dict(images=readers[0], teachers=[replace(text, **options)], document_multiple=4)
        given |= dict(max_patches_per_pack=max_patches)
        return open_datasets(data_path=[path], cache_dir=str(tmp_path / "cache"), **given)[0]

    return open_


def batches(dataset, **layout):
    stream = TrainStream(dataset, micro_batch_size=len(dataset), global_batch_size=len(dataset), **layout)
    return stream.next_step()[0]


@pytest.mark.parametrize(
    "student,teacher", [("qwen", "smolvlm"), ("smolvlm", "qwen"), ("qwen", "finer")], ids="-".join
)
def test_chunks_are_the_same_text_and_images_are_whole_on_both_sides(open_pair, student, teacher):
    dataset = open_pair(student, teacher)
    batch, side = batches(dataset), dataset.members[0].teachers[0]
    rows = (batch, batch.teacher_inputs[0])
    tokenizers = (dataset.images.processor.tokenizer, side.text.tokenizer)
    chunks = rows[1].chunks
    pieces = []
    for tokenizer, part in zip(tokenizers, (chunks.student, chunks.teacher), strict=True):
        offsets, labels = part.offsets.tolist(), part.labels.tolist()
        spelled = [tokenizer.decode(labels[a:b]) for a, b in zip(offsets, offsets[1:], strict=False)]
        pieces.append([text.replace("<end_of_utterance>", "<|im_end|>") for text in spelled])
    assert pieces[0] == pieces[1]
    assert "".join(sorted("".join(pieces[0]))).count("x") == 11, "each of 11 answers is in a chunk"
    if student == "qwen" and teacher == "finer":
        assert (chunks.kinds == 0).all() and rows[1].tokens.shape[1] > batch.tokens.shape[1]
    for row, reader in zip(rows, (dataset.images, side.text.images), strict=True):
        is_image = row.tokens[0] == reader.processor.image_token_id
        assert torch.equal(is_image.nonzero().flatten(), row.images.rows)
        wanted = []
        for sample in batch.sample_ids:
            for number in dataset.members[0].index.pieces_of(sample).document.tolist():
                wanted += [reader.processor.pixels(picture(*size)) for size in SIZES[number : number + 2]]
        np.testing.assert_array_equal(row.images.pixels.numpy(), np.concatenate(wanted))
        assert (row.images.positions is None) == (not reader.processor.has_mrope)


def test_dealt_images_of_a_teacher_join_to_all(open_pair):
    dataset = open_pair("smolvlm", "qwen")
    whole = batches(dataset).teacher_inputs[0].images
    parts = [batches(dataset, shard=RowShard(rank, 2), images=ImageLayout(rank, 2)) for rank in (0, 1)]
    shares = [part.teacher_inputs[0].images for part in parts]
    assert sum(len(share.pixels) for share in shares) == len(whole.pixels)
    assert sum(len(share.rows) for share in shares) == len(whole.rows)
    assert all(torch.equal(share.positions, whole.positions) for share in shares)


def test_a_teacher_without_room_keeps_whole_images(open_pair):
    dataset = open_pair("qwen", "smolvlm", seq_length=96)
    side, seen = dataset.members[0].teachers[0], 0
    for index in range(len(dataset)):
        pack = dataset[index].teacher_inputs[0]
        image = side.text.images.processor.image_token_id
        num_tokens = sum(num_patches(grid) // 4 for grid in grids_of(pack.images.records))
        assert int((pack.tokens == image).sum()) == num_tokens
        seen += len(pack.images.records)
    assert 0 < seen < len(side.store.images)


def test_a_text_model_beside_images_is_refused(open_pair):
    with pytest.raises(ErrorList) as caught:
        open_pair("qwen", "smolvlm", images=None)
    assert set(caught.value.codes) == {"images-not-read", "too-many-bad-records"}


def test_packs_are_bounded_by_the_patches_of_either_model(open_pair):
    """The finer teacher has more patches than the student; both stay below the limit."""
    found = []
    for limit in (None, 200):
        dataset, most = open_pair("qwen", "finer", max_patches=limit), 0
        for index in range(len(dataset)):
            pack = dataset[index]
            sides = (pack.images, pack.teacher_inputs[0].images)
            patches = [sum(map(num_patches, grids_of(side.records))) for side in sides]
            assert patches[0] <= patches[1], "the teacher's grid is finer"
            most = max(most, *patches)
        found.append(most)
    assert found[0] > 200 >= found[1] > 100
    alike, finer = (open_pair("qwen", one, max_patches=100).describe()[0] for one in ("qwen", "finer"))
    assert "dropped" not in alike
    assert finer.endswith(", documents dropped: 1 beyond --max-patches-per-pack"), "those of the teacher"
