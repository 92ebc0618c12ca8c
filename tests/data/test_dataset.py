"""Packed corpora: masks at borders, labels across cuts, blends of several."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from mkd.data.dataset import BlendedDataset, PackedDataset
from tests.reported import refused

OPTIONS = dict(seq_length=8, vocab_size=1000, pad_id=99)


def labelled(dataset):
    """Return the multiset of (token, label) pairs with loss over all packs, sorted."""
    pairs = []
    for index in range(len(dataset)):
        pack = dataset[index]
        chosen = pack.loss_mask == 1
        pairs += zip(pack.tokens[chosen].tolist(), pack.labels[chosen].tolist(), strict=True)
    return sorted(pairs)


def pairs_of(documents, masks=None):
    masks = masks or [[1] * len(ids) for ids in documents]
    documents = zip(documents, masks, strict=True)
    return sorted((ids[i - 1], ids[i]) for ids, mask in documents for i in range(1, len(ids)) if mask[i])


def unique_documents(lengths):
    starts = np.cumsum([0, *lengths])
    return [list(range(start, start + n)) for start, n in zip(starts, lengths, strict=False)]


def test_documents_of_a_pack_end_without_label(make_store):
    pack = PackedDataset(make_store([[1, 2, 3], [4, 5]]), **OPTIONS)[0]
    assert pack.tokens.tolist() == [1, 2, 3, 4, 5, 99, 99, 99]
    assert pack.labels.tolist() == [2, 3, 0, 5, 0, 0, 0, 0]
    assert pack.loss_mask.tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert pack.lengths.tolist() == [3, 2] and pack.spans.tolist() == [3, 5]


def test_a_split_document_keeps_its_labels_across_the_cut(make_store):
    dataset = PackedDataset(make_store([list(range(1, 13))]), **OPTIONS)
    assert [dataset[i].labels.tolist() for i in range(2)] == [
        [2, 3, 4, 5, 6, 7, 8, 9],
        [10, 11, 12, 0, 0, 0, 0, 0],
    ]
    assert dataset.num_loss_tokens == 11


def test_truncate_ends_without_label_and_drop_leaves_out(make_store):
    store = make_store([list(range(1, 13)), [20, 21]])
    truncated = PackedDataset(store, overlong="truncate", pack="none", **OPTIONS)
    assert truncated[0].loss_mask.tolist() == [1] * 7 + [0] and truncated.num_loss_tokens == 8
    assert labelled(PackedDataset(store, overlong="drop", **OPTIONS)) == [(20, 21)]


def test_the_mask_belongs_to_the_predicted_token(make_store):
    pack = PackedDataset(make_store([[1, 2, 3, 4]], [[1, 0, 0, 1]]), **OPTIONS)[0]
    assert pack.loss_mask.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
    assert pack.labels.tolist()[:4] == [2, 3, 4, 0]


@pytest.mark.parametrize("pack", ["bfd", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_all_loss_tokens_once_for_any_documents_and_masks(make_store, seed, pack):
    random = np.random.default_rng(seed)
    documents = unique_documents(random.integers(0, 30, 60))
    masks = [random.integers(0, 2, len(ids)).tolist() for ids in documents]
    dataset = PackedDataset(
        make_store(documents, masks), seq_length=8, vocab_size=2000, pad_id=1999, pack=pack
    )
    assert labelled(dataset) == pairs_of(documents, masks)
    assert dataset.num_loss_tokens == len(labelled(dataset))
    for index in range(len(dataset)):
        pack_ = dataset[index]
        assert pack_.spans.sum() == 8 and (pack_.lengths <= pack_.spans).all() and pack_.loss_mask.sum() > 0


def test_documents_can_be_padded_to_a_multiple(make_store):
    documents = unique_documents([3, 5, 2, 13])
    dataset = PackedDataset(make_store(documents), document_multiple=4, **OPTIONS)
    assert labelled(dataset) == pairs_of(documents)
    for index in range(len(dataset)):
        pack = dataset[index]
        assert (pack.spans % 4 == 0).all() and pack.spans.sum() == 8


def test_a_range_of_documents(make_store):
    documents = unique_documents([3, 5, 2, 4])
    store = make_store(documents)
    assert labelled(PackedDataset(store, documents=(1, 3), **OPTIONS)) == pairs_of(documents[1:3])


def test_a_token_that_the_model_does_not_know(make_store):
    dataset = PackedDataset(make_store([[1, 2], [5, 1000, 3]]), pack="none", **OPTIONS)
    assert dataset[0].tokens[0] == 1
    with refused("token-beyond-vocabulary: the model knows 0 to"):
        dataset[1]


@pytest.mark.parametrize(("documents", "masks"), [([[1, 2], [3]], [[1, 0], [1]]), ([[1], [2], []], None)])
def test_no_loss_tokens(make_store, documents, masks):
    with refused("corpus-without-loss-tokens"):
        PackedDataset(make_store(documents, masks), **OPTIONS)


def test_all_documents_dropped(make_store):
    with refused("corpus-without-loss-tokens"):
        PackedDataset(make_store([range(20)]), overlong="drop", **OPTIONS)


def test_pickled_datasets_read_the_same(make_store):
    dataset = BlendedDataset([PackedDataset(make_store(unique_documents([5, 9, 3])), **OPTIONS)])
    copy = pickle.loads(pickle.dumps(dataset))
    assert labelled(copy) == labelled(dataset)


def test_blended_packs_are_numbered_through(make_store):
    members = [
        PackedDataset(make_store([[10 * m + i, 1] for i in range(n)], name=f"m{m}"), pack="none", **OPTIONS)
        for m, n in enumerate((2, 3, 1))
    ]
    blend = BlendedDataset(members, [1, 2, 3])
    assert [blend[i].tokens[0] for i in range(len(blend))] == [0, 1, 10, 11, 12, 20]
    assert [blend[i].sample_id for i in range(len(blend))] == list(range(6))
    assert [line.split(":")[0][-2:] for line in blend.describe()] == ["m0", "m1", "m2"]
    assert "2 packs of 8 tokens, 4 tokens, 2 loss tokens, fill 0.250" in blend.describe()[0]


def test_the_documents_of_a_pack_have_their_number_in_their_corpus(make_store):
    """The second member does not have its corpus's first two documents.

    A document that was cut is in several packs.
    """
    stores = [
        make_store([[1, 2, 3], [4, 5], [6] * 12], name="m0"),
        make_store([[1, 2]] * 2 + [[3, 4]], name="m1"),
    ]
    blend = BlendedDataset(
        [PackedDataset(stores[0], **OPTIONS), PackedDataset(stores[1], documents=(2, 3), **OPTIONS)], [1, 1]
    )
    found = [blend.documents_of(i) for i in range(len(blend))]
    assert [set(of_pack) for of_pack in found] == [{str(stores[0].prefix)}] * (len(found) - 1) + [
        {str(stores[1].prefix)}
    ]
    numbers = [documents for of_pack in found for documents in of_pack.values()]
    assert sorted(sum(numbers[:-1], [])) == [0, 1, 2, 2] and numbers[-1] == [2]
