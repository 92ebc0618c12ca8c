"""Check stop, resume and export of a model whose layers are unlike, also after saves at other layouts."""

from __future__ import annotations

import pytest
import torch

from tests.checkpoint.hf.test_hf_carried import CARRIED, with_more
from tests.checkpoint.saved_tensors import all_tensors
from tests.families.test_further_families import UNTRAINED
from tests.tiny_models import add_tokenizer, make_model
from tests.train.test_moe_resume import HALF, save_again, saved_tensors
from tests.train.test_resume import STEPS, argv, train_and_hash

TP2 = "--tensor-model-parallel-size", 2, "--sequence-parallel", "--use-distributed-optimizer"
PP2 = (
    "--pipeline-model-parallel-size",
    2,
    "--num-virtual-stages-per-pipeline-rank",
    2,
    "--use-distributed-optimizer",
)
CP2 = "--context-parallel-size", 2, "--use-distributed-optimizer"


PAIRS = (
    ("qwen3_5", "qwen3_next"),
    pytest.param(("nemotron_h-experts", "qwen3"), marks=pytest.mark.slow),
    pytest.param(("gemma4-experts", "gemma4-values"), marks=pytest.mark.slow),
    pytest.param(("apertus", "qwen3"), marks=pytest.mark.slow),
)
OWN = "A_log", "expert_scale", "alpha_p"  # ends of the names of parameters that these students alone have
# A tied head has a bucket of gradients of its own at PP2, and the bucket before it ends with padding.
TIED = {"qwen3_5": {"tie_word_embeddings": True}}


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def files(request, tmp_path_factory):
    """Make a student of the first family with further tensors, a teacher of the second, and a text."""
    student, teacher = request.param
    folder = tmp_path_factory.mktemp("unlike")
    add_tokenizer(with_more(folder / "student", student, **TIED.get(student, {})))
    add_tokenizer(make_model(folder / "teacher", teacher, seed=2))
    lines = (f'{{"text": "document {i}: {"the quick brown fox " * (i % 7 + 1)}"}}\n' for i in range(60))
    (folder / "text.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def stored(tensor: torch.Tensor) -> bytes:
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


def same_but_padding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the tensors are equal, but for rows of padding, whose number depends on the layout."""
    common = tuple(slice(min(sizes)) for sizes in zip(one.shape, other.shape, strict=True))
    return torch.equal(one[common], other[common]) and one.count_nonzero() == other.count_nonzero()


def test_resume_is_bitwise_after_saves_at_other_layouts(files, ranks):
    """TP2 -> PP2 VPP2 -> CP2 -> TP2: weights, moments and the export are those of a run without stops."""
    straight = ranks.run(train_and_hash, 2, argv(files, "whole", *TP2), files / "whole hf")
    half = argv(files, "half", *TP2, "--exit-interval", STEPS // 2)
    ranks.run(train_and_hash, 2, half)
    came_from, state = "half", ranks.run(saved_tensors, 1, files / "half" / HALF)[0]
    assert all(any(part in name for name in state) for part in ("exp_avg_sq", "linear_qkv"))
    assert any(name.endswith(OWN) for name in state)
    for run, layout in (("at PP2", PP2), ("at CP2", CP2)):
        ranks.run(save_again, 2, argv(files, run, *layout, "--load", files / came_from))
        (found,) = ranks.run(saved_tensors, 1, files / run / HALF)
        assert found.keys() == state.keys()
        assert [name for name in state if not same_but_padding(found[name], state[name])] == []
        came_from = run
    resumed = argv(files, "rest", *TP2, "--load", files / came_from)
    assert ranks.run(train_and_hash, 2, resumed, files / "rest hf") == straight
    before, whole, rest = (all_tensors(files / name) for name in ("student", "whole hf", "rest hf"))
    assert before.keys() == whole.keys() == rest.keys()
    for name, tensor in whole.items():
        assert stored(rest[name]) == stored(tensor), name
        if name.endswith(UNTRAINED):  # they may have another dtype
            assert torch.equal(tensor, before[name].to(tensor.dtype))
            continue
        assert (stored(before[name]) == stored(tensor)) == (name in CARRIED), name


def save_shifted(arguments):
    """Train as an mkd that left the padding of buckets out of checkpoints."""
    from mkd.train import optimizer

    pad, optimizer._store_padding = optimizer._store_padding, lambda wrapped: None
    try:
        train_and_hash(arguments)
    finally:
        optimizer._store_padding = pad


def test_main_weights_of_other_places_are_refused(files, ranks):
    """The weights of the model are right, and the run can start from them."""
    if "qwen3_5" not in (files / "student" / "config.json").read_text(encoding="utf-8"):
        pytest.skip("its buckets end without padding")
    ranks.run(save_shifted, 2, argv(files, "shifted", *PP2, "--exit-interval", STEPS // 2))
    resumed = argv(files, "after", *TP2, "--load", files / "shifted")
    with pytest.raises(AssertionError, match="are not the model's weights"):
        ranks.run(train_and_hash, 2, resumed)
