"""Requests with images: what is read, what stays in memory, and which answers can be scored."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from mkd.data.images.conversation import image_reader
from mkd.data.images.image_files import ImageSource
from mkd.evaluation.requests import RequestPacks, encode_pairs
from mkd.evaluation.tasks import read_tasks
from mkd.tokenizers.hugging_face import load_hugging_face
from tests.data.images.tiny_processors import image_file, make_qwen, picture
from tests.reported import refused
from tests.train.command import write_records

FILES = {f"{number}.png": image_file(picture(40, 24, number)) for number in range(2)}
CHOICES = ["red", "a brown fox", "over"]


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    folder = make_qwen(tmp_path_factory.mktemp("student"))
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return image_reader(folder, load_hugging_face(str(folder)), str(folder), 1 << 20)


def encode(reader, pairs):
    return encode_pairs(pairs, reader.processor.tokenizer, 256, 400, reader)


def test_each_image_is_read_once_and_a_file_does_not_stay_in_memory(reader, tmp_path, monkeypatch):
    records = [dict(question="what?", choices=CHOICES, answer=0, images=[name]) for name in FILES]
    (task,) = read_tasks([write_records(tmp_path / "what.jsonl", *records)], [])
    pairs, read, read_path = task.pairs(), [], ImageSource.read_path
    assert len(pairs) == 2 * 2 * 3

    def counted(self, name):
        read.append(name)
        return read_path(self, name)

    monkeypatch.setattr(ImageSource, "read_path", counted)
    requests = encode(reader, pairs)
    assert read == list(FILES)
    assert [request.images[0].source.path for request in requests] == [one.images[0] for one in pairs]
    assert not any(request.images[0].source.content for request in requests)
    packs = RequestPacks(requests, 256, 1, 0)
    assert len(packs._images._content) == len("".join(FILES))
    for images in (packs[index].pack.images for index in range(len(packs))):
        for record in images.records:
            wanted = [picture(40, 24, number) for number in range(2)]
            found = images.table.decode(record, reader.source)
            assert any(np.array_equal(found, one) for one in wanted)


def test_bytes_of_a_record_are_held_once(reader, tmp_path):
    content = FILES["0.png"]
    images = ["data:image/png;base64," + base64.b64encode(content).decode()]
    record = dict(question="what?", choices=CHOICES, answer=0, images=images)
    (task,) = read_tasks([write_records(tmp_path / "what.jsonl", record)], [])
    packs = RequestPacks(encode(reader, task.pairs()), 256, 1, 0)
    assert packs._images._content == content and len(packs._images) > 1


def test_bytes_are_those_of_the_text_that_is_scored(reader, tmp_path):
    """A conversation has no white space around an answer."""
    record = dict(prompt="what?", completion="  a fox\n", images=["0.png"])
    (task,) = read_tasks([], [write_records(tmp_path / "say.jsonl", record, dict(record, images=None))])
    beside_image, alone = (record.completion for record in task.records)
    assert (beside_image, alone) == ("a fox", "  a fox\n")
    (request,) = encode(reader, task.pairs()[:1])
    assert reader.processor.tokenizer.decode(request.labels.tolist()) == "a fox"


def test_an_answer_with_a_special_token_is_refused(reader, tmp_path):
    record = dict(prompt="what?", completion="a fox<|im_end|> jumps", images=["0.png"])
    (task,) = read_tasks([], [write_records(tmp_path / "say.jsonl", record)])
    with refused("continuation-not-scorable: the answer has the special token"):
        encode(reader, task.pairs())
