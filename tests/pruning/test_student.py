"""Check written students against transformers: the teacher with parts removed or masked."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mkd.data.measured_text import read_batches
from mkd.errors import EXIT_CHECKPOINT, EXIT_DATA, EXIT_USAGE, ErrorList, MkdError, UsageError
from mkd.plan.models.model_shape import ModelShape
from mkd.pruning.request import StudentRequest
from mkd.pruning.sizes import Sizes, num_parameters
from mkd.pruning.student import make_student, possible_sizes
from mkd.tokenizers.load import load_tokenizer
from tests.checkpoint.saved_tensors import all_tensors
from tests.pruning.masked_reference import masked_teacher
from tests.reported import Reported
from tests.tiny_models import add_tokenizer, make_model
from tests.tiny_vision_models import make_vision_model

SEQ_LENGTH, NUM_TOKENS = 24, 600
DEPTH = Sizes(num_layers=2)
WIDTH = Sizes(ffn_hidden_size=40, num_query_groups=1, hidden_size=32)
EVERYTHING = Sizes(num_layers=3, ffn_hidden_size=40, num_query_groups=1, hidden_size=32)
NARROW_LAYERS = Sizes(num_layers=3, ffn_hidden_size=40, num_query_groups=1)
CUTS = [
    ("llama", EVERYTHING),
    ("llama", WIDTH),
    ("llama3.2", EVERYTHING),  # tied
    ("llama-mlp-bias", EVERYTHING),  # every bias
    ("qwen2", EVERYTHING),
    ("qwen3", EVERYTHING),
    ("qwen3-windows", DEPTH),
    ("mistral", Sizes(num_layers=2, hidden_size=40)),
    ("gemma3", NARROW_LAYERS),
    ("phi3", EVERYTHING),  # fused tensors
    ("phi4-long", DEPTH),
    ("smollm3", DEPTH),
    ("ministral3", DEPTH),  # queries grow within these texts
    ("granite", EVERYTHING),
    ("exaone4", NARROW_LAYERS),
    ("olmo3", DEPTH),
    ("apertus", DEPTH),
    ("gemma4", DEPTH),
]


def make_teacher(folder, family, **sizes):
    """Save a random teacher with a tokenizer, whose channels differ in size, and a text beside it."""
    add_tokenizer(make_model(folder / "teacher", family, **sizes))
    rng = np.random.default_rng(0)
    words = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "a", "cat", "in", "no", "hat"]
    texts = [" ".join(rng.choice(words, size=rng.integers(5, 60))) for _ in range(40)]
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "teacher", path


def request(teacher, text, out, sizes, **options):
    texts = () if text is None else (str(text),)
    return StudentRequest(
        str(teacher), out, sizes, text=texts, num_tokens=NUM_TOKENS, seq_length=SEQ_LENGTH, **options
    )


def make_on_rank(asked):
    """Make the student on the one rank of a pool."""
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect

    lines = []
    report = make_student(asked, lines.append, ParallelContext.create(detect()))
    scores = [(one.layers, vars(one.score)) for one in report.options[0].candidates]
    options = [(one.cut, vars(one.score)) for one in report.options]
    return SimpleNamespace(
        cut=report.cut, scores=scores, options=options, score=vars(report.score), lines=lines
    )


def documents(teacher, text):
    """Return the measured tokens by the rule of the documentation: the beginnings of documents."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(teacher)
    found = []
    for line in text.read_text().splitlines():
        ids = [*tokenizer(json.loads(line)["text"]).input_ids, tokenizer.eos_token_id][: SEQ_LENGTH + 1]
        found.append(torch.tensor(ids))
        if sum(len(ids) - 1 for ids in found) >= NUM_TOKENS:
            return found
    raise AssertionError("the text is long enough")


@torch.no_grad()
def logits(model, text):
    return torch.cat([model(ids[None, :-1], use_cache=False).logits[0] for ids in text])


def mean_kl(teacher, student):
    log_p, log_q = teacher.double().log_softmax(-1), student.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean().item()


@pytest.mark.parametrize("family, sizes", CUTS)
def test_a_student_is_the_masked_teacher(family, sizes, ranks, tmp_path):
    teacher, text = make_teacher(tmp_path, family)
    (made,) = ranks.run(make_on_rank, 1, request(teacher, text, tmp_path / "student", sizes))
    student = AutoModelForCausalLM.from_pretrained(tmp_path / "student", dtype=torch.float32).eval()
    words = documents(teacher, text)
    found, expected = logits(student, words), logits(masked_teacher(teacher, made.cut), words)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    whole = logits(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval(), words)
    score = made.score
    assert score["kl_sum"] / score["num_tokens"] == pytest.approx(mean_kl(whole, found), rel=1e-4)
    assert score["num_tokens"] == len(found)
    shape = ModelShape.from_hf_dir(tmp_path / "student")
    assert num_parameters(shape) == sum(parameter.numel() for parameter in student.parameters())
    assert (shape.num_layers, shape.hidden_size) == (sizes.num_layers or 4, sizes.hidden_size or 48)
    assert student.config.tie_word_embeddings == ("lm_head.weight" not in all_tensors(tmp_path / "student"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_teacher(tmp_path_factory.mktemp("llama"), "llama")


def test_a_teacher_that_is_not_finite_is_named(ranks, tmp_path):
    """Finite weights of the head overflow; the text makes several batches."""
    teacher, text = make_teacher(tmp_path, "llama")
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    model.lm_head.weight.data[:, 7] = 3e38
    model.save_pretrained(teacher)
    with pytest.raises(AssertionError, match="model-not-finite"):
        ranks.run(code_on_rank, 1, request(teacher, text, tmp_path / "student", DEPTH))
    assert not (tmp_path / "student").exists()


def code_on_rank(asked):
    """Make the student, and raise the code of an error, which reaches the test as text."""
    try:
        make_on_rank(asked)
    except MkdError as error:
        raise RuntimeError(error.code) from error


@pytest.mark.parametrize("method", ["block", "one-by-one"])
def test_layers_whose_removal_hurts_least(method, ranks, llama, tmp_path):
    """Compare every candidate's KL with transformers, and the choice with the lowest of them."""
    (made,) = ranks.run(make_on_rank, 1, request(*llama, tmp_path / "student", DEPTH, method=method))
    words = documents(*llama)
    whole = AutoModelForCausalLM.from_pretrained(llama[0], dtype=torch.float32).eval()
    expected = logits(whole, words)

    def kl(layers):
        return mean_kl(expected, logits(masked_teacher(llama[0], SimpleNamespace(
            layers=layers, ffn=None, groups=None, hidden=None)), words))  # fmt: skip

    for layers, score in made.scores:
        if score["num_tokens"] == len(expected):
            assert score["kl_sum"] / score["num_tokens"] == pytest.approx(kl(layers), rel=1e-4)
    if method == "block":
        candidates = [(2, 3), (0, 3), (0, 1)]
        assert [layers for layers, _ in made.scores] == candidates
        assert made.cut.layers == min(candidates, key=kl)
    else:
        first = min(([i for i in range(4) if i != out] for out in range(4)), key=kl)
        second = min(([i for i in first if i != out] for out in first), key=kl)
        assert [list(layers) for layers, _ in made.scores] == [first, second]
        assert list(made.cut.layers) == second


def test_a_target_is_met_by_the_option_that_hurts_least(ranks, tmp_path):
    """Compare the score of every option, which is not written, with transformers."""
    teacher, text = make_teacher(tmp_path, "llama3.2", intermediate_size=512)
    target = Sizes(target_params=250_000)
    (made,) = ranks.run(make_on_rank, 1, request(teacher, text, tmp_path / "student", target))
    words = documents(teacher, text)
    expected = logits(AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval(), words)
    kl = [mean_kl(expected, logits(masked_teacher(teacher, cut), words)) for cut, _ in made.options]
    assert [score["kl_sum"] / score["num_tokens"] for _, score in made.options] == pytest.approx(kl, rel=1e-4)
    assert len(kl) == 3 and made.cut == made.options[kl.index(min(kl))][0]
    student = ModelShape.from_hf_dir(tmp_path / "student")
    assert student.num_layers == len(made.cut.layers) and num_parameters(student) <= 250_000


def test_channels_that_add_most(ranks, llama, tmp_path):
    """Compare the kept FFN channels with scores from hooks on transformers."""
    (made,) = ranks.run(make_on_rank, 1, request(*llama, tmp_path / "student", Sizes(ffn_hidden_size=40)))
    model = AutoModelForCausalLM.from_pretrained(llama[0], dtype=torch.float32).eval()
    for layer, kept in zip(model.model.layers, made.cut.ffn, strict=True):
        inputs, down = [], layer.mlp.down_proj
        hook = down.register_forward_pre_hook(lambda _, given, inputs=inputs: inputs.append(given[0][0]))
        logits(model, documents(*llama))
        hook.remove()
        added = torch.cat(inputs).square().mean(0) * down.weight.square().sum(0)
        assert set(kept) == set(added.topk(40).indices.tolist())


def test_hidden_channels_that_norms_let_through(ranks, llama, tmp_path):
    """Compare the kept hidden channels, and the factors of the norms, with hooks on transformers."""
    (made,) = ranks.run(make_on_rank, 1, request(*llama, tmp_path / "student", Sizes(hidden_size=30)))
    model = AutoModelForCausalLM.from_pretrained(llama[0], dtype=torch.float32).eval()
    inputs = {f"{name}.weight": [] for name, _ in model.named_modules() if name.endswith("norm")}
    for name, given in inputs.items():
        norm = model.get_submodule(name.removesuffix(".weight"))
        norm.register_forward_pre_hook(lambda _, args, given=given: given.append(args[0][0]))
    logits(model, documents(*llama))
    scores, shares = 0, {}
    for name, given in inputs.items():
        squares = torch.cat(given).square().double()
        shares[name] = (squares / squares.sum(dim=1, keepdim=True)).mean(dim=0)
        scores = scores + shares[name] * model.get_parameter(name).square()
    assert set(made.cut.hidden) == set(scores.topk(30).indices.tolist())
    kept = list(made.cut.hidden)
    factors = {name: (share[kept].sum() * 48 / 30).sqrt().item() for name, share in shares.items()}
    assert made.cut.norm_factors == pytest.approx(factors, rel=1e-5)


@pytest.mark.parametrize("family", ["llama3.2", "qwen2"])
def test_a_cut_to_the_teachers_own_shape_is_the_teacher(family, tmp_path):
    teacher, _ = make_teacher(tmp_path, family, dtype=torch.bfloat16)
    own = Sizes(num_layers=4, ffn_hidden_size=96, num_query_groups=2, hidden_size=48)
    make_student(request(teacher, None, tmp_path / "student", own), say=lambda line: None)
    found, expected = all_tensors(tmp_path / "student"), all_tensors(teacher)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert all(tensor.dtype == torch.bfloat16 for tensor in found.values())
    assert (tmp_path / "student" / "tokenizer.json").exists()


def test_derived_tensors_do_not_change_the_dtype(tmp_path):
    """Old checkpoints keep the frequencies of the position embedding, in fp32, beside 16-bit weights."""
    teacher, _ = make_teacher(tmp_path, "llama3.2", dtype=torch.bfloat16)
    tensors = all_tensors(teacher)
    for file in teacher.glob("model*"):
        file.unlink()
    extra = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(6) for layer in range(4)}
    save_file(tensors | extra, teacher / "model.safetensors", metadata={"format": "pt"})
    make_student(request(teacher, None, tmp_path / "student", DEPTH), say=lambda line: None)
    assert {tensor.dtype for tensor in all_tensors(tmp_path / "student").values()} == {torch.bfloat16}


def test_sequences_without_loss_are_skipped(tmp_path):
    """A batch of nothing but prompt has no KL per token."""
    add_tokenizer(tmp_path)
    records = 3 * [{"prompt": "the quick brown fox " * 20, "completion": "jumps over the lazy dog"}]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lengths = dict(num_tokens=16, seq_length=8, batch_tokens=8)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    batches = read_batches([str(tmp_path / "text.jsonl")], tokenizer, **lengths)
    assert batches and all(batch.num_loss_tokens for batch in batches)


def test_a_text_of_many_documents_takes_time_by_its_length(tmp_path):
    """20,000 documents of 5 tokens: to add up all lengths for each of them would take minutes."""
    add_tokenizer(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "the fox jumps"}\n' * 20_000)
    tokenizer = load_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    start, lengths = time.process_time(), dict(num_tokens=10**6, seq_length=8, batch_tokens=512)
    batches = read_batches([str(tmp_path / "text.jsonl")], tokenizer, **lengths)
    assert time.process_time() - start < 5
    sizes = [batch.tokens.numel() for batch in batches]
    assert len(set(sizes[:-1])) == 1 and sizes[0] >= 512 and sum(sizes) == 20_000 * 3


def test_without_text_a_block_in_the_middle_is_removed(llama, tmp_path):
    lines = []
    report = make_student(request(llama[0], None, tmp_path / "student", DEPTH), say=lines.append)
    assert report.cut.layers == (0, 3) and any("no text" in line for line in lines)
    even = request(llama[0], None, tmp_path / "even", Sizes(num_layers=3), method="even")
    assert make_student(even, say=lines.append).cut.layers == (0, 2, 3)


BAD = {
    "add-flag: no size of the student is given": dict(sizes=Sizes()),
    "out-of-range: is more than the teacher's": dict(sizes=Sizes(num_layers=5)),
    "out-of-range: cannot be met by fewer layers or": dict(sizes=Sizes(target_params=1000)),
    "cut-not-supported: transformers refuses the": dict(
        sizes=Sizes(hidden_size=32)
    ),  # 6 heads: Llama needs a multiple of 6
    "add-flag: needs text": dict(sizes=Sizes(ffn_hidden_size=40), text=()),
    "choose-another-folder: is the teacher's folder": dict(out="teacher"),
    "not-writable": dict(out="text.jsonl/student"),
    "too-little-data: tokens to predict, fewer than": dict(text="short.jsonl"),
    "data-path-not-found: nothing found": dict(text="missing.jsonl"),
    "model-type-not-supported: is not supported": dict(teacher="mamba"),
    "cut-not-supported: model with experts": dict(teacher="mixtral"),
    "cut-not-supported: cut its text model": dict(teacher="smolvlm"),
    "hf-weights-missing: holds neither": dict(teacher="no-weights"),
}
EXIT_CODES = {
    "too-little-data: tokens to predict, fewer than": EXIT_DATA,
    "data-path-not-found: nothing found": EXIT_DATA,
} | {"hf-weights-missing: holds neither": EXIT_CHECKPOINT}


@pytest.mark.parametrize("code", BAD)
def test_bad_requests_end_before_weights_are_read(code, llama, tmp_path, monkeypatch):
    teacher, text = llama
    (tmp_path / "short.jsonl").write_text('{"text": "the fox"}\n')
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba" / "config.json").write_text('{"model_type": "mamba"}')
    if BAD[code].get("teacher") == "mixtral":
        make_model(tmp_path / "mixtral", "mixtral")
    elif BAD[code].get("teacher") == "smolvlm":
        make_vision_model(tmp_path / "smolvlm", "smolvlm")
    (tmp_path / "no-weights").mkdir()
    (tmp_path / "no-weights" / "config.json").write_text((teacher / "config.json").read_text())
    bad = BAD[code]
    texts = bad.get("text", (str(text),))
    asked = StudentRequest(
        str(tmp_path / bad["teacher"] if "teacher" in bad else teacher),
        teacher.parent / bad["out"] if "out" in bad else tmp_path / "student",
        bad.get("sizes", DEPTH),
        text=(str(tmp_path / texts),) if isinstance(texts, str) else texts,
        seq_length=SEQ_LENGTH,
    )
    monkeypatch.setattr("mkd.pruning.student.ParallelContext", None)  # models are built behind it
    with pytest.raises(Exception) as caught:
        make_student(asked, say=lambda line: None)
    assert Reported.of(caught.value) == code and caught.value.exit_code == EXIT_CODES.get(code, EXIT_USAGE)
    assert not (tmp_path / "student").exists()


def test_a_target_that_only_channels_reach_needs_text(tmp_path):
    """One layer of this teacher is more than the target; the error names the flag that was given."""
    sizes = dict(num_hidden_layers=2, intermediate_size=4096)
    teacher, text = make_teacher(tmp_path, "llama3.2", **sizes)
    asked = Sizes(target_params=500_000)
    with pytest.raises(UsageError) as caught:
        make_student(request(teacher, None, tmp_path / "student", asked), say=lambda line: None)
    assert caught.value.code == "add-flag" and "--target-params" in caught.value.what
    shape = ModelShape.from_hf_dir(teacher)
    assert [one.num_layers for one in possible_sizes(request(teacher, text, None, asked), shape)] == [2]


def test_ways_to_a_target_that_cannot_be_written_are_left_out(tmp_path, monkeypatch):
    """Without rules for its width, a family is cut by layers alone."""
    teacher, text = make_teacher(tmp_path, "llama3.2", intermediate_size=512)
    shape, asked = ModelShape.from_hf_dir(teacher), Sizes(target_params=250_000)
    both = request(teacher, text, None, asked)
    assert len(possible_sizes(both, shape)) == 3
    assert len(possible_sizes(request(teacher, None, None, asked), shape)) == 1
    monkeypatch.setattr("mkd.pruning.student_files.IN_FFN", ())
    assert [one.ffn_hidden_size for one in possible_sizes(both, shape)] == [512]
    with pytest.raises(UsageError) as caught:
        possible_sizes(request(teacher, text, None, Sizes(ffn_hidden_size=40)), shape)
    assert Reported.of(caught.value) == "cut-not-supported: mkd cannot cut the width of a"


def test_gemma_keeps_its_hidden_size(tmp_path):
    teacher, text = make_teacher(tmp_path, "gemma3")
    with pytest.raises(Exception) as caught:
        make_student(request(teacher, text, tmp_path / "student", WIDTH))
    assert Reported.of(caught.value) == "cut-not-supported: --hidden-size cannot cut a" and not isinstance(
        caught.value, ErrorList
    )
