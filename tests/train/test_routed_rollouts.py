"""Check completions whose prompts have tags: loss and gradients against transformers, and resumed runs."""

from __future__ import annotations

import json

import pytest
import torch

from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import read_metrics, read_weights, run_main, write_records
from tests.train.invariance import worst_relative_error
from tests.train.rollout_run import EOS, VOCAB_SIZES, Case, argv, make_files, one_step, require_equal_steps
from tests.train.sides_text import DISTRIBUTED, PP2, Compared, Sides

TEACHERS = {"math": "teacher", "code": "third"}
CASES = (
    Case("TP2 + sequence parallel", 2, ("--tensor-model-parallel-size", 2, "--sequence-parallel")),
    Case("PP2", 2, ("--pipeline-model-parallel-size", 2)),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
    Case("micro-batch 2", 1, ("--micro-batch-size", 2)),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make prompts of two kinds, those of one file by the file's tag, and tagged text."""
    folder = make_files(tmp_path_factory.mktemp("routed-rollouts"))
    sizes = dict(hidden_size=72, num_hidden_layers=4, vocab_size=VOCAB_SIZES[1])
    add_tokenizer(make_model(folder / "third", "llama", seed=7, **sizes | EOS))
    words = ("quick brown", "fox jumps over", "lazy", "the dog is not")
    write_records(
        folder / "math.jsonl", *({"prompt": f"{i}: {words[i % 4]}", "domain": "math"} for i in range(6))
    )
    write_records(folder / "code.jsonl", *({"prompt": f"the code {i} {words[i % 4]}"} for i in range(5)))
    texts = ({"text": f"{i}: the quick fox", "domain": ("math", "code")[i % 2]} for i in range(40))
    write_records(folder / "text.jsonl", *texts)
    return folder


def command(files, run, *more, fraction=1.0, tag="code", **kd):
    """Return the command line of a run with a teacher for each tag."""
    words = argv(files, run, *more, fraction=fraction)
    for flag, count in (("--teacher-hf", 2), ("--prompt-data-path", 2)):
        place = words.index(flag)
        del words[place : place + count]
    prompts = [str(files / name) for name in ("math.jsonl", "code.jsonl")]
    settings = {
        "teachers": [{"hf": str(files / name), "tags": [tag]} for tag, name in TEACHERS.items()],
        "kd": {"teacher_combination": "route", "tag_key": "domain", **kd},
        "data": {"data_tags": dict.fromkeys(prompts[1:] if tag else (), tag)},
        "rollout": {"prompt_data_path": prompts},
    }
    path = files / f"{run.replace(' ', '-')}.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return [*words, "--config", str(path)]


@pytest.fixture(scope="module")
def single(files, ranks):
    """Return one process's step, half of it on stored packs."""
    (found,) = ranks.run(one_step, 1, command(files, "single", fraction=0.5), files / "gradients")
    return found


def reference(files, found, out_dir) -> float:
    """Write float64 gradients of transformers as a folder; return the mean loss.

    Every document runs alone, with the teacher of its tag. Documents of code have even numbers or the word.
    """
    from mkd.losses.dense_reference import dense_kd
    from mkd.tokenizers.load import open_tokenizer
    from tests.losses.objectives import objective_of
    from tests.train.hf_gradients import load

    tokenizer, student = open_tokenizer(str(files / "student")), load(files / "student")
    teachers = {tag: load(files / name).requires_grad_(False) for tag, name in TEACHERS.items()}
    num_tokens, total = sum(int(mask.sum()) for *_, mask in found["documents"]), 0.0
    tags = set()
    for tokens, labels, mask in found["documents"]:
        text = tokenizer.decode(tokens.tolist())
        number, _, rest = text.partition(":")
        is_stored = rest.startswith(" the quick fox") and int(mask.sum()) == len(mask) - 1
        is_code = int(number) % 2 == 1 if is_stored else text.startswith("the code")
        tags.add((is_stored, is_code))
        logits = student(tokens[None]).logits[0]
        theirs = teachers["code" if is_code else "math"](tokens[None]).logits[0]
        sizes = dict(student_vocab_size=logits.shape[1], teacher_vocab_size=theirs.shape[1], kd_ratio=1.0)
        objective = objective_of(**sizes, temperature=1.0, divergence="reverse_kl")
        loss = dense_kd(logits, theirs, labels, mask.double(), objective).loss
        (loss / num_tokens).backward()
        total += loss.item() / num_tokens
    assert len(tags) == 4, "stored text and completions of both tags"
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return total


def test_loss_and_gradients_are_those_of_the_teachers_of_the_tags(single, files):
    loss = reference(files, single, files / "reference")
    assert single["sums"]["loss"] / single["sums"]["num_loss_tokens"] == pytest.approx(loss, rel=1e-5)
    error, where = worst_relative_error(files / "gradients", files / "reference")
    assert error <= 1e-5, where
    for name in ("rollout/length", "rollout/truncated", "rollout/teacher_nll"):
        of_tags = [single["figures"][f"{name}/{tag}"] for tag in TEACHERS]
        assert min(of_tags) <= single["figures"][name] <= max(of_tags)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layouts_have_the_step_of_one_process(case, single, files, ranks):
    arguments = command(files, "layout", *map(str, case.flags), fraction=0.5)
    results = ranks.run(one_step, case.ranks, arguments, files / "layout gradients")
    require_equal_steps(results, single, files)


def test_a_resumed_run_has_the_same_bits(files, ranks):
    weights = {}
    for run, parts in (("whole", ((),)), ("parts", (("--exit-interval", 2), ("--load", files / "parts")))):
        for more in parts:
            own = ("--save", files / run, "--export-hf", files / f"{run}-hf")
            (result,) = run_main(ranks, command(files, run, *map(str, (*own, *more))))
            assert result.exit_code == 0, result.stderr
        weights[run] = read_weights(files / f"{run}-hf")
    assert all(torch.equal(one, weights["parts"][name]) for name, one in weights["whole"].items())
    records = read_metrics(files / "whole")
    assert {"rollout/length/code", "rollout/teacher_nll/math", "tokens/code", "kd_loss/math"} <= {
        key for record in records for key in record
    }


def test_a_prompt_without_a_tag_or_teacher_is_refused(files, ranks):
    for tag, code in ("", "record-value-not-valid"), ("law", "add-flag"):
        (result,) = run_main(ranks, command(files, "refused", tag=tag))
        assert result.exit_code in (64, 65) and code in reported_codes(result.stderr), result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("layout", [PP2, DISTRIBUTED], ids=["PP2", "DP2"])
def test_teachers_by_tag_on_processes_of_their_own(layout, files, ranks, tmp_path):
    """Each is asked for the completions of its tag alone."""
    whole = command(files, "apart", "--micro-batch-size", 1)
    settings = json.loads((files / "apart.yaml").read_text())
    for teacher in settings["teachers"]:
        teacher["processes"] = 1
    (tmp_path / "sides.yaml").write_text(json.dumps(settings))

    def run(name, *flags):
        return [*whole, "--log-dir", str(files / f"apart {name}"), *flags]

    sides = Sides(2, layout, ("--config", str(tmp_path / "sides.yaml")), several=2)
    *_, math, code = Compared(ranks, tmp_path / "compared", run).check(tmp_path, sides)
    assert math["forwards"] != code["forwards"]
