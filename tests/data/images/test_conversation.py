"""Conversations with images become tokens, masks and a table; bad images are listed and skipped."""

from __future__ import annotations

import base64
import io
import json
import os
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from mkd.data.aligned.aligned_documents import align_record
from mkd.data.aligned.aligned_ids import Pair
from mkd.data.corpus.documents import encode_documents, encode_record
from mkd.data.corpus.store import StoreFiles, TokenStore
from mkd.data.corpus.store_builder import build_store, cache_key
from mkd.data.images.conversation import ConversationImages
from mkd.data.images.image_decoding import decode_image
from mkd.data.images.image_files import ImageSource
from mkd.data.images.processors import load_image_processor
from mkd.data.records.parsing import parse_row
from mkd.errors import DataError
from mkd.tokenizers.hugging_face import load_hugging_face
from tests.data.images.conftest import MAX_PIXELS
from tests.data.images.tiny_processors import SMOLVLM_TOKENS, image_file, make_smolvlm, picture
from tests.reported import refused

ANSWER = {"role": "assistant", "content": "a fox"}


def asked(*images, text="what is it?"):
    parts = [{"type": "image", "image": image} for image in images]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}, ANSWER]}


def data_uri(content, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def encode(record, images):
    return encode_record(parse_row(json.dumps(record).encode()), images.processor.tokenizer, True, images)


def bomb():
    """Return a PNG whose header says 30,000 x 30,000 pixels."""
    header, pixels = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0), zlib.compress(bytes(1000))
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    written = (struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "smolvlm"])
def test_placeholders_grow_and_only_answers_have_loss(reader, family, tmp_path):
    """The document is the rendered conversation with each image's tokens at its place."""
    images = reader(family)
    for number, size in enumerate([(40, 40), (100, 33)]):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(image_file(picture(*size)))
    document = encode(asked("0.png", "1.png"), images)
    tokenizer, image = images.processor.tokenizer, images.processor.image_token_id
    rendered, mask = tokenizer.apply_chat_template(parse_row(asked("0.png", "1.png")).values[0])
    wanted, loss, shapes = [], [], iter([images.processor.shape(40, 40), images.processor.shape(33, 100)])
    for token, counts in zip(rendered, mask, strict=True):
        grown = next(shapes).ids.tolist() if token == image else [token]
        wanted += grown
        loss += [counts] * len(grown)
    assert document.ids.tolist() == wanted and document.loss.tolist() == loss
    assert "a fox" in tokenizer.decode(document.ids[document.loss == 1])
    for one, size in zip(document.images, [(40, 40), (33, 100)], strict=True):
        inside = document.ids[one.first : one.first + one.tokens]
        assert one.size == size and inside.tolist() == images.processor.shape(*size).ids.tolist()


def test_an_image_may_be_a_path_a_uri_a_struct_or_a_column(reader, tmp_path):
    """All give the same document; so do text parts alone and the same text as a string."""
    images, content = reader(), image_file(picture(40, 40))
    (tmp_path / "pictures" / "a.png").write_bytes(content)
    empty = {"type": "image", "index": 0}
    question = {"type": "text", "text": "what is it?", "index": None}
    of_column = {"messages": [{"role": "user", "content": [empty, question]}, ANSWER], "images": ["a.png"]}
    open_ai = {"type": "image_url", "image_url": {"url": data_uri(content)}}
    records = [
        asked("a.png"),
        asked(data_uri(content)),
        asked({"bytes": content, "path": "elsewhere.png"}),
        asked({"bytes": None, "path": "a.png"}),
        of_column,
        {"messages": [{"role": "user", "content": [open_ai, question]}, ANSWER]},
    ]
    tokenizer = images.processor.tokenizer
    found = [encode_record(parse_row(record), tokenizer, True, images) for record in records]
    assert all(np.array_equal(one.ids, found[0].ids) for one in found)
    assert len({one.images[0].sha256 for one in found}) == 1
    parts = {"messages": [{"role": "user", "content": [question]}, ANSWER]}
    text = {"messages": [{"role": "user", "content": "what is it?"}, ANSWER]}
    assert encode(parts, images).ids.tolist() == encode(text, images).ids.tolist()


def test_an_answer_may_hold_an_image_beside_a_teacher_with_other_tokens(reader, tmp_path):
    (tmp_path / "pictures" / "a.png").write_bytes(image_file(picture(40, 40)))
    shown = [
        {"type": "text", "text": "see"},
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": "a fox"},
    ]
    record = {"messages": [{"role": "user", "content": "which?"}, {"role": "assistant", "content": shown}]}
    student, teacher = reader("smolvlm"), reader("qwen2_5_vl")
    tokenizers = student.processor.tokenizer, teacher.processor.tokenizer
    pair = Pair(*tokenizers, "byte_offset", True, True, student, teacher)
    found = align_record(parse_row(record), pair)
    assert np.array_equal(found.student_ids, encode(record, student).ids)
    assert np.array_equal(found.teacher_ids, encode(record, teacher).ids)
    sides = zip(tokenizers, (found.student_ids, found.teacher_ids), (0, 2), strict=True)
    for tokenizer, ids, column in sides:
        texts = [
            tokenizer.decode(ids[a:b].tolist()) for a, b in found.chunks[:, [column, column + 1]].tolist()
        ]
        assert "".join(texts).startswith("seea fox")


def test_exif_turns_an_image_once(reader, tmp_path):
    images, exif = reader(), Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "pictures" / "a.jpg").write_bytes(image_file(picture(100, 33), "JPEG", exif=exif))
    document = encode(asked("a.jpg"), images)
    assert document.images[0].size == (100, 33)  # height, width
    assert document.images[0].grid == images.processor.shape(100, 33).grid


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_images_are_put_on_white(mode):
    """As transformers does before it preprocesses an image."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 9, 4), np.uint8)
    colours, buffer = Image.fromarray(pixels), io.BytesIO()
    image = colours.convert("RGB").quantize(16) if mode == "P" else colours.convert(mode)
    image.save(buffer, "PNG", **({"transparency": bytes(range(0, 256, 16))} if mode == "P" else {}))
    found = decode_image(buffer.getvalue(), 10**6)
    expected = convert_to_rgb(Image.open(io.BytesIO(buffer.getvalue())), return_numpy=True)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, np.asarray(image.convert("RGB")))


BAD = {
    "truncated": (
        "image-not-valid: the image is damaged",
        lambda folder: image_file(picture(90, 90))[:-4000],
    ),
    "nothing": ("image-not-valid: the image is empty", lambda folder: b""),
    "text": ("image-not-valid: the image is of an unknown format", lambda folder: b"not an image"),
    "gif": (
        "image-not-valid: the image is of an unknown format",
        lambda folder: image_file(picture(9, 9), "GIF"),
    ),
    "bomb": ("image-too-large: the image is too large", lambda folder: bomb()),
    "narrow": ("image-not-valid: the image is too narrow", lambda folder: image_file(picture(603, 3))),
    "deep": (
        "image-not-valid: the image has pixels of the mode",
        lambda folder: image_file(np.ones((9, 9), np.uint16)),
    ),
    "long": ("image-too-large: has more than", lambda folder: bytes((1 << 20) + 8 * MAX_PIXELS + 1)),
    "missing": ("image-unreadable", lambda folder: "missing.png"),
    "folder": ("image-unreadable", lambda folder: "."),
    "empty": ("image-unreadable", lambda folder: ""),
    "nul": ("record-text-damaged: has a NUL at character", lambda folder: "a\0b"),
    "absolute": (
        "image-outside-root: lies outside of --image-root",
        lambda folder: str(folder.parent / "outside.png"),
    ),
    "parent": ("image-outside-root: lies outside of --image-root", lambda folder: "../outside.png"),
    "link": (
        "image-outside-root: lies outside of --image-root",
        lambda folder: os.symlink("../outside.png", folder / "l") or "l",
    ),
    "loop": ("image-unreadable", lambda folder: os.symlink("o", folder / "o") or "o"),
    "url": ("image-unreadable: is the URL", lambda folder: "https://example.com/a.png"),
    "file-url": ("image-unreadable: is the URL", lambda folder: "file:///etc/passwd"),
    "uri": ("image-unreadable: data URI", lambda folder: "data:image/png;base64,@@"),
    "svg-uri": ("image-unreadable: data URI", lambda folder: "data:image/svg+xml,<svg/>"),
    "number": ("record-field-not-text: it must be a string", lambda folder: 3),
}


LONG_NAME = "of a shoe " * 12 + ".png"
SAID = {"truncated": "image file is truncated", "bomb": "x", "narrow": "603 x 3", "nothing": "is empty"}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_refused(reader, tmp_path, no_network, name):
    folder, (code, make) = tmp_path / "pictures", BAD[name]
    images = reader()
    (tmp_path / "outside.png").write_bytes(image_file(picture(9, 9)))
    made = make(folder)
    if isinstance(made, bytes):
        (folder / LONG_NAME).write_bytes(made)
        made = LONG_NAME
    with refused(code, DataError) as caught:
        encode(asked(made), images)
    if made == LONG_NAME:
        what = caught.value.what  # the reason in quarantine.jsonl
        assert what.count(LONG_NAME) == 1 and SAID.get(name, "") in what


def test_what_is_no_file_is_named(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    source, said = ImageSource(str(tmp_path), MAX_PIXELS), {"missing": "there is no such file"}
    said |= {name: "Not a directory" for name in ("file/", "file/.", "file/../file")}
    said |= {"folder": "it is a folder, not a file", "pipe": "it is a named pipe (FIFO), not a file"}
    for name, text in said.items():
        with refused("image-unreadable") as caught:
            source.read(name)
        assert text in caught.value.report()


def parts(*content):
    return {"messages": [{"role": "user", "content": list(content)}, ANSWER]}


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (asked(text="say <|image_pad|>"), "image-placeholders-differ: a control token of images"),
        (asked(text="say <|video_pad|>"), "image-placeholders-differ: a control token of images"),
        (parts({"type": "video"}), "record-images-not-valid: parts of a message are"),
        (asked(None), "record-images-not-valid: is an image without content"),
        (asked(text="?") | {"images": ["a.png"]}, "record-images-not-valid: images, and the messages have"),
        (asked(text="?") | {"images": "a.png"}, "record-images-not-valid: images is a"),
        (
            parts({"type": "image", "index": 1}) | {"images": ["a.png", "b.png"]},
            "record-images-not-valid: and the next of the record's",
        ),
    ],
)
def test_a_bad_record_is_refused(reader, record, code):
    with refused(code, DataError):
        encode(record, reader())


SPELLED = ("<global-img>", "<row_1_col_2>", "<fake_token_around_image>", "<image>", "<row_4_col_4>")


@pytest.mark.parametrize("has_tokens", [True, False])
def test_a_text_spells_no_token_that_the_processor_places(tmp_path, has_tokens):
    """Also if the tokenizer has no token for tiles, as Idefics3's: the text would have the same ids."""
    special = [one for one in SMOLVLM_TOKENS if has_tokens or not one.startswith(("<row", "<global"))]
    folder = make_smolvlm(tmp_path / "spelled", special=special)
    processor = load_image_processor(folder, load_hugging_face(str(folder)))
    images = ConversationImages(processor, ImageSource(None, MAX_PIXELS))
    for string in SPELLED[: None if has_tokens else -1]:  # the processor writes two tiles a side, not four
        with refused("image-placeholders-differ: a control token of images", DataError) as caught:
            encode(asked(text=f"say {string} now"), images)
        assert string in caught.value.report()
    parts = [{"type": "text", "text": "<row_1"}, {"type": "text", "text": "_col_1>"}]
    image = {"type": "image", "image": data_uri(image_file(picture(9, 9)))}
    with refused("image-placeholders-differ: a control token of images", DataError):
        encode({"messages": [{"role": "user", "content": [image, *parts]}, ANSWER]}, images)
    pair = {"prompt": [{"role": "user", "content": "<image>"}], "chosen": [ANSWER], "rejected": [ANSWER]}
    with refused("image-placeholders-differ: a control token of images", DataError):
        encode_documents(parse_row(json.dumps(pair).encode()), processor.tokenizer, True, images)
    allowed = asked(text="<row_1_col> <global-image>")
    allowed["messages"][0]["tags"] = ["a key that no template reads"]
    assert len(encode(allowed, images).ids)


TRIMMED = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("where", ["two parts", "two messages", "a named one", "a pair"])
@pytest.mark.parametrize("halves", [("<ima", "ge>"), ("<row_1_ ", " col_1>"), ("<global", "\n-img>")])
def test_a_template_joins_no_token_out_of_two_texts(reader, halves, where):
    images = reader("smolvlm")
    images.processor.tokenizer._hf.chat_template = TRIMMED
    first, second = halves
    image = {"type": "image", "image": data_uri(image_file(picture(9, 9)))}
    parts = [{"type": "text", "text": text} for text in halves]
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    record = {
        "two parts": {"messages": [{"role": "user", "content": [image, *parts]}, ANSWER]},
        "two messages": {"messages": messages},
        "a named one": {"messages": [messages[0] | {"name": "bob"}, messages[1]]},
        "a pair": {"prompt": messages[:1], "chosen": messages[1:], "rejected": [ANSWER]},
    }[where]
    with refused("image-placeholders-differ: a control token of images", DataError):
        encode_documents(parse_row(json.dumps(record).encode()), images.processor.tokenizer, True, images)


def test_a_template_that_drops_images_is_refused(reader, tmp_path):
    images = reader("smolvlm")
    (tmp_path / "pictures" / "a.png").write_bytes(image_file(picture(40, 40)))
    images.processor.tokenizer._hf.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with refused("image-placeholders-differ: the chat template writes", DataError):
        encode(asked("a.png"), images)


def test_without_a_processor_or_a_root_images_are_refused(reader):
    images = reader()
    record = parse_row(asked("a.png"))
    with refused("images-not-read: nothing here can read them", DataError):
        encode_record(record, images.processor.tokenizer, True)
    with refused("image-outside-root: is a path, and there is no folder", DataError):
        ImageSource(None, MAX_PIXELS).read("a.png")


@pytest.fixture
def corpus(reader, tmp_path, write_jsonl, no_network):
    """Return (image reader, raw file): good and bad records in turn, with images of every source."""
    images = reader()
    good, folder = image_file(picture(40, 40), "WEBP", lossless=True), tmp_path / "pictures"
    (folder / "a.webp").write_bytes(good)
    (folder / "bad.png").write_bytes(bomb())
    records = [asked("a.webp"), asked("bad.png"), {"text": "fox"}, asked(data_uri(good), "a.webp")]
    records += [asked("https://example.com/a.png"), asked(text="no image")]
    return images, write_jsonl("a.jsonl", *records)


def test_a_corpus_with_images_is_the_same_for_all_numbers_of_workers(corpus, tmp_path):
    images, path = corpus
    stores = []
    for workers in (0, 2):
        prefix = str(tmp_path / f"out{workers}" / "c")
        summary = build_store(
            [path], prefix, images.processor.tokenizer, True, workers, max_bad_records=2, images=images
        )
        assert (summary.documents, summary.bad_records, summary.images) == (4, 2, 3)
        stores.append(TokenStore(prefix))
    first, second = (StoreFiles(store.prefix) for store in stores)
    for name in ("bin", "idx", "loss_mask", "images", "image_sources", "quarantine"):
        assert getattr(first, name).read_bytes() == getattr(second, name).read_bytes(), name
    table = stores[0].images
    records = table.between(0, len(stores[0]))
    assert records["document"].tolist() == [0, 2, 2] and records["is_path"].tolist() == [1, 0, 1]
    for record in records:
        np.testing.assert_array_equal(table.decode(record, images.source), picture(40, 40))
        ids, _ = stores[0].read(int(record["document"]), int(record["first"]), int(record["tokens"]))
        assert (ids == images.processor.image_token_id).all()


def test_a_changed_image_is_noticed(corpus, tmp_path):
    """In training it ends the run: the tokens of the corpus belong to the earlier content."""
    images, path = corpus
    prefix = str(tmp_path / "out" / "c")
    build_store([path], prefix, images.processor.tokenizer, True, max_bad_records=2, images=images)
    (tmp_path / "pictures" / "a.webp").write_bytes(image_file(picture(40, 40, seed=1), "WEBP"))
    table = TokenStore(prefix).images
    with refused("image-changed", DataError):
        table.decode(table.between(0, 1)[0], images.source)
    StoreFiles(prefix).images.write_bytes(StoreFiles(prefix).images.read_bytes()[:-1])
    with refused("corpus-damaged: is damaged or incomplete", DataError):
        TokenStore(prefix)


def test_a_cache_knows_the_image_settings(reader, corpus):
    images, path = corpus
    tokenizer = images.processor.tokenizer
    keys = {cache_key([path], tokenizer, True, images=one) for one in (None, images)}
    smaller = type(images)(images.processor, ImageSource(images.source.root, 64))
    assert len({*keys, cache_key([path], tokenizer, True, images=smaller)}) == 3


def test_a_table_of_structs_is_read(reader, tmp_path):
    """Parquet with the Hugging Face form of images, and parts with null fields."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    images, content = reader(), image_file(picture(40, 40), "BMP")
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "what is it?"}]
    answer = [{"type": "text", "text": "a fox"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    table = pa.Table.from_pylist([{"messages": messages, "images": [{"bytes": content, "path": None}]}])
    pq.write_table(table, tmp_path / "a.parquet")
    prefix = str(tmp_path / "out" / "c")
    build_store([str(tmp_path / "a.parquet")], prefix, images.processor.tokenizer, True, images=images)
    wanted = encode(asked(data_uri(content)), images)
    assert TokenStore(prefix).document(0)[0].tolist() == wanted.ids.tolist()
