"""Turn prompts and continuations into token ids, and the ids into packs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mkd.data.batch import Pack, PackedBatch, collate, empty_pack
from mkd.data.images.conversation import ConversationImages, ReadImage
from mkd.data.images.image_files import ImageBytes
from mkd.data.images.image_table import EncodedImage, ImagesInMemory, PackImages
from mkd.data.packing.best_fit import pack_pieces
from mkd.data.packing.cutting import padded_lengths
from mkd.errors import DataError
from mkd.evaluation.records import Images
from mkd.evaluation.tasks import Pair
from mkd.parallel.zigzag import RowShard
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.tokenizer import Tokenizer, without_eos


@dataclass(frozen=True)
class Request:
    """The ids of one pair: `labels[i]` is predicted at position len(inputs) - len(labels) + i."""

    inputs: np.ndarray  # [n] int32, all ids but the last
    labels: np.ndarray  # [m] int32, the continuation; m <= n
    is_truncated: bool  # the prompt lost its beginning
    images: tuple[EncodedImage, ...] = ()  # in the order of their tokens in `inputs`


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: Tokenizer,
    seq_length: int,
    vocab_size: int,
    images: ConversationImages | None = None,  # reads the images of pairs; None: there may be none
) -> list[Request]:
    """Return the ids of each prompt + continuation, tokenised as one text.

    A continuation starts where these ids differ from the prompt's ids. A token that spans the border counts
    as part of the continuation, including its few bytes of the prompt. A prompt without tokens becomes the
    end-of-text token, which separates documents in training. A prompt that does not fit loses its beginning,
    but keeps the token that the tokenizer puts before every text. Raises DataError for a continuation that
    does not fit, or for ids that the model does not know.

    A pair with images becomes a conversation: the images and the prompt from the user, then the answer. It is
    scored up to the token that ends the turn, and never cut.
    """
    requests: dict[int, Request] = {}
    before_all = without_eos(tokenizer.encode(""), tokenizer.eos_id)
    prompt, prompt_ids = "", before_all
    conversations = None if images is None else _Conversations(images, seq_length, vocab_size)
    for number in _by_images(pairs):
        pair = pairs[number]
        if pair.images:
            if conversations is None:
                raise _no_image_reader(pair)
            requests[number] = conversations.encode(pair)
            continue
        if pair.prompt != prompt:
            prompt, prompt_ids = pair.prompt, without_eos(tokenizer.encode(pair.prompt), tokenizer.eos_id)
        whole = without_eos(tokenizer.encode(pair.prompt + pair.continuation), tokenizer.eos_id)
        start, lead = _common_prefix(prompt_ids, whole), _common_prefix(before_all, whole)
        if start == 0 and tokenizer.eos_id is not None:
            whole, start = np.concatenate([[tokenizer.eos_id], whole]), 1
        requests[number] = _cut(pair, whole, start, lead, seq_length, vocab_size)
    return [requests[number] for number in range(len(pairs))]


def _by_images(pairs: Sequence[Pair]) -> list[int]:
    """Return the numbers of all pairs so that those of one question's images follow each other."""
    firsts: dict[int, int] = {}
    for number, pair in enumerate(pairs):
        firsts.setdefault(id(pair.images), number)  # all pairs of a question have the same tuple
    return sorted(range(len(pairs)), key=lambda number: firsts[id(pairs[number].images)])


def _cut(pair: Pair, ids: np.ndarray, start: int, lead: int, seq_length: int, vocab_size: int) -> Request:
    """Return the request whose continuation begins at `start`. To fit, keep `lead` ids and the last ones."""
    length, room = len(ids) - start, seq_length + 1 - max(lead, 1)
    if start == 0 or length == 0:
        why = "it adds no token to its prompt" if start else "its first token has nothing before it"
        what = f"{pair.place}: the continuation cannot be scored"
        raise DataError(what, why, "repair or remove the record", code="continuation-not-scorable")
    if length > room:
        why = "continuations are never split"
        what = f"{pair.place}: the continuation has {length} tokens, but only {room} fit"
        raise DataError(what, why, "raise --seq-length, or remove the record", code="longer-than-seq-length")
    if ids.max() >= vocab_size:
        why = f"the model has {vocab_size} vocabulary rows"
        what = f"{pair.place}: token id {ids.max()}"
        raise DataError(what, why, "use the model's own tokenizer", code="token-beyond-vocabulary")
    is_truncated = len(ids) > seq_length + 1
    if is_truncated:
        ids = np.concatenate([ids[:lead], ids[len(ids) - (seq_length + 1 - lead) :]])
    ids = ids.astype(np.int32)
    return Request(ids[:-1], ids[-length:], is_truncated)


class _Conversations:
    """Encodes pairs with images. It holds the files of one question: pairs of the next one read theirs."""

    def __init__(self, reader: ConversationImages, seq_length: int, vocab_size: int):
        self._reader, self._seq_length, self._vocab_size = reader, seq_length, vocab_size
        tokenizer = reader.processor.tokenizer
        self._control = np.array([tokenizer.vocabulary[one] for one in tokenizer.special_tokens])
        self._images: Images = ()
        self._read: list[ReadImage] = []

    def encode(self, pair: Pair) -> Request:
        """Return the request of a pair, without the content of files that have a path.

        Raises DataError for images that cannot be read or do not fit, and for an answer with a control token.
        """
        self._check_answer(pair)
        content = [*({"type": "image"} for _ in pair.images), {"type": "text", "text": pair.prompt}]
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": pair.continuation.strip()},
        ]
        try:
            if pair.images != self._images:
                self._images, self._read = pair.images, self._reader.read(pair.images)
            ids, loss, images = self._reader.encode(Conversation(messages), pair.images, self._read)
        except DataError as error:
            raise error.located(pair.place) from error
        start = int(np.argmax(loss)) if loss.any() else 0
        ends = np.flatnonzero(np.isin(ids[start:], self._control))
        ids = ids[: start + int(ends[0])] if len(ends) else ids
        if len(ids) > self._seq_length + 1:
            what = f"{pair.place}: the question with its images and the answer has {len(ids)} tokens"
            why, do = "a question with images is not cut", "raise --seq-length, or lower --max-image-side"
            raise DataError(what, why, do, code="longer-than-seq-length")
        request = _cut(pair, ids, start, 1, self._seq_length, self._vocab_size)
        return replace(request, images=tuple(map(_without_file, images)))

    def _check_answer(self, pair: Pair) -> None:
        spelled = sorted(s for s in self._reader.processor.tokenizer.special_tokens if s in pair.continuation)
        if spelled:
            raise DataError(
                f"{pair.place}: the answer has the special token {spelled[0]}",
                "beside images an answer is scored up to its first special token, which ends the turn",
                "remove the token, or the record",
                code="continuation-not-scorable",
            )


def _without_file(image: EncodedImage) -> EncodedImage:
    """Return the image without the content of a file that can be read again by its path."""
    path = image.source.path
    return image if path is None else replace(image, source=ImageBytes(b"", path))


def _no_image_reader(pair: Pair) -> DataError:
    return DataError(
        f"{pair.place}: the record has images, and the model reads none",
        "its answer would be a guess",
        "evaluate a vision-language model, or remove the record",
        code="images-not-read",
    )


def _common_prefix(first: np.ndarray, second: np.ndarray) -> int:
    """Return the number of ids in the common prefix of both."""
    shorter = min(len(first), len(second))
    differing = np.flatnonzero(first[:shorter] != second[:shorter])
    return int(differing[0]) if len(differing) else shorter


@dataclass(frozen=True)
class RequestPack:
    """A pack of documents and its scores. Label `labels[i]` at `rows[i]` is of `requests[i]`."""

    pack: Pack
    rows: np.ndarray  # [n] int64, ascending
    labels: np.ndarray  # [n] int64
    requests: np.ndarray  # [n] int64


@dataclass(frozen=True, kw_only=True)
class RequestBatch(PackedBatch):
    """A micro-batch of `RequestPack`s, without a loss. A row may have several labels."""

    score_rows: Tensor  # [n] int64, positions among t
    score_labels: Tensor  # [n] int64
    score_requests: Tensor  # [n] int64

    def shard(self, shard: RowShard) -> RequestBatch:
        """Return the part in `shard`, as for every batch. `score_rows` index that part."""
        if shard.is_whole:
            return self
        held = shard.rows(self.cu_seqlens_padded)
        places = torch.searchsorted(held, self.score_rows).clamp(max=len(held) - 1)
        mine = held[places] == self.score_rows
        return replace(
            super().shard(shard),
            score_rows=places[mine],
            score_labels=self.score_labels[mine],
            score_requests=self.score_requests[mine],
        )


class RequestPacks:
    """The documents of all requests in packs of `seq_length` tokens, made one at a time.

    Packing is best fit, decreasing. Requests with the same inputs share a document, so the letters of a
    question cost one forward pass.
    """

    def __init__(self, requests: Sequence[Request], seq_length: int, document_multiple: int, pad_id: int):
        assert seq_length % document_multiple == 0
        same_inputs: dict[bytes, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            seen = b"".join(image.sha256 for image in request.images)
            same_inputs[request.inputs.tobytes() + seen].append(number)
        self._requests, self._documents = requests, list(same_inputs.values())
        lengths = np.array([len(requests[numbers[0]].inputs) for numbers in self._documents], dtype=np.int64)
        self._spans = padded_lengths(lengths, document_multiple)
        self._packs = pack_pieces(self._spans, seq_length, "bfd")
        self._seq_length, self._pad_id = seq_length, pad_id
        of_documents = [requests[numbers[0]].images for numbers in self._documents]
        self._images = ImagesInMemory(of_documents) if any(of_documents) else None

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, index: int) -> RequestPack:
        """Return pack `index`, or a pack of padding beyond the last one."""
        pack = empty_pack(self._seq_length, self._pad_id)
        if index >= len(self):
            nothing = np.zeros(0, dtype=np.int64)
            return RequestPack(pack, nothing, nothing, nothing)
        documents = self._packs.pieces_of(index)
        spans = self._spans[documents].copy()
        spans[-1] += self._seq_length - spans.sum()  # the tail of the pack pads its last document
        scored, lengths, parts = [], [], []
        for start, document in zip(np.cumsum(spans) - spans, documents, strict=True):
            inputs = self._requests[self._documents[document][0]].inputs
            stop = start + len(inputs)
            pack.tokens[start:stop] = inputs
            lengths.append(len(inputs))
            parts.append((int(document), 0, len(inputs), int(start)))
            for number in self._documents[document]:
                labels = self._requests[number].labels
                scored.append([np.arange(stop - len(labels), stop), labels, np.full(len(labels), number)])
        columns = zip(*scored, strict=True)
        rows, labels, requests = (np.concatenate(column).astype(np.int64) for column in columns)
        images = None if self._images is None else PackImages.of_parts(self._images, parts)
        pack = replace(pack, lengths=np.array(lengths), spans=spans, sample_id=index, images=images)
        return RequestPack(pack, rows, labels, requests)


def collate_requests(packs: Sequence[RequestPack]) -> RequestBatch:
    """Concatenate the packs into one micro-batch."""
    batch = collate([pack.pack for pack in packs])
    offsets = np.cumsum([0, *(len(pack.pack.tokens) for pack in packs[:-1])])
    placed = [pack.rows + offset for pack, offset in zip(packs, offsets, strict=True)]
    columns = placed, [pack.labels for pack in packs], [pack.requests for pack in packs]
    rows, labels, requests = (torch.from_numpy(np.concatenate(column)) for column in columns)
    return RequestBatch(**vars(batch), score_rows=rows, score_labels=labels, score_requests=requests)
