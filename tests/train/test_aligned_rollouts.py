"""Check cross-tokenizer on-policy steps: against stored data with the same ids, and at every layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.tiny_models import make_model
from tests.train.command import write_records
from tests.train.invariance import worst_relative_error
from tests.train.rollout_run import EOS, VOCAB_SIZES, Case, make_files, one_step, require_equal_steps
from tests.xtoken.small_tokenizers import train_byte_level

SLOW = pytest.mark.slow
TP2, PP2 = ("--tensor-model-parallel-size", 2), ("--pipeline-model-parallel-size", 2)
CASES = (
    Case("TP2 + sequence parallel", 2, (*TP2, "--sequence-parallel")),
    Case("PP2", 2, (*PP2, "--micro-batch-size", 2)),
    Case("DP2 + distributed optimizer", 2, ("--use-distributed-optimizer",)),
)
SLOW_CASES = (
    Case("TP2", 2, TP2),
    Case("PP2 VPP2", 2, (*PP2, "--num-virtual-stages-per-pipeline-rank", 2)),
    Case("TP2 PP2 DP2", 8, (*TP2, *PP2)),
)
CP2 = ("--context-parallel-size", 2)
CP_CASES = (
    pytest.param(Case("CP2", 2, CP2), id="CP2"),
    pytest.param(Case("TP2 CP2", 4, (*TP2, *CP2, "--sequence-parallel")), id="TP2 CP2", marks=SLOW),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Make a student, two teachers with other tokenizers and one with the student's."""
    folder = make_files(tmp_path_factory.mktemp("aligned_rollouts"))
    sizes = dict(hidden_size=56, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    for name, reverse, seed in (("cross", False, 7), ("other", True, 8)):
        make_model(folder / name, "qwen2", seed=seed, vocab_size=620, **sizes | EOS)
        train_byte_level(600, reverse=reverse).save_pretrained(folder / name)
    cross: dict = {"name": "cross", "hf": str(folder / "cross"), "xtoken": {}}
    others = [
        {"name": "same", "hf": str(folder / "teacher"), "weight": 1},
        {"name": "other", "hf": str(folder / "other"), "xtoken": {"loss": "p_kl"}, "weight": 1},
    ]
    for name, teachers in (("alone", [cross]), ("mixed", [cross | {"weight": 2}, *others])):
        settings = {"student": {"hf": str(folder / "student")}, "teachers": teachers}
        (folder / f"{name}.yaml").write_text(json.dumps(settings))
    return folder


def argv(files: Path, config: str, run: str, *more: object) -> list[str]:
    words: list[object] = ["--student-hf", files / "student", "--config", files / f"{config}.yaml"]
    words += ["--kd-ratio", 1, "--kd-divergence", "reverse_kl"]
    words += ["--seq-length", 48, "--train-iters", 4, "--lr", 1e-3]
    words += ["--log-dir", files / run, "--data-cache-path", files / "cache"]
    return [str(word) for word in (*words, *more)]


def on_policy(files: Path, config: str, run: str, *more: object, fraction: float = 1.0) -> list[str]:
    words: list[object] = ["--on-policy-fraction", fraction, "--prompt-data-path", files / "prompts.jsonl"]
    words += ["--rollout-prompts", 5, "--samples-per-prompt", 2, "--max-new-tokens", 20]
    words += ["--global-batch-size", 4]
    words += ["--data-path", files / "text.jsonl"] if fraction < 1 else []
    return argv(files, config, run, *words, *more)


def write_corpus(prefix: Path, documents: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Write (prompt ids, completion ids) as a tokenised corpus with loss on the completions."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    masks = []
    for prompt, ids in documents:
        document = torch.from_numpy(np.concatenate([prompt, ids]))
        builder.add_document(document, [len(document)])
        masks.append(np.arange(len(document)) >= len(prompt))
    builder.data_file.close()
    builder.finalize(f"{prefix}.idx")
    Path(f"{prefix}.loss_mask.bin").write_bytes(np.concatenate(masks).astype(np.uint8).tobytes())


def stored_step(arguments: list[str], out_dir: Path) -> dict:
    """Run one step's forward and backward on all packs of the stored data; return its sums."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run
    from mkd.train.step import training_objective
    from tests.train.invariance import export_student, gradients_as_parameters

    run = build_run(plan_run(load_config(arguments).config, 1), detect())
    stream, engine = run.data.train, run.engine
    batches = stream.next_step()
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches)
    sums = engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    student = Path(arguments[arguments.index("--student-hf") + 1])
    with gradients_as_parameters(engine, engine.context):
        export_student(engine, run.state, student, out_dir)
    run.reporter.close()
    return {
        "sums": objective.sums(sums).token_sums(),
        "packs": sorted(sum((b.sample_ids for b in batches), ())),
    }


def test_a_step_equals_stored_data_with_the_same_ids(files, ranks):
    """Completions that stop, written as a corpus and aligned by the loader of stored data."""
    drop = ("--rollout-truncated", "drop", "--rollout-prompts", 13, "--samples-per-prompt", 8)
    drop += ("--max-new-tokens", 32, "--rollout-temperature", 2)  # some completions stop
    (own,) = ranks.run(one_step, 1, on_policy(files, "mixed", "own", *drop), files / "own")
    documents = [(prompt, ids) for prompt, ids, _ in own["rollouts"].values()]
    assert len(documents) >= 3 and all(ids[-1] == 0 for _, ids in documents)
    write_corpus(files / "sampled", documents)
    packs = ["--data-path", str(files / "sampled"), "--global-batch-size", str(own["num_packs"])]
    (stored,) = ranks.run(stored_step, 1, argv(files, "mixed", "stored", *packs), files / "stored")
    assert stored["packs"] == list(range(own["num_packs"]))
    for name, value in stored["sums"].items():
        assert own["sums"][name] == pytest.approx(value, rel=1e-5), name
    error, where = worst_relative_error(files / "own", files / "stored")
    assert error <= 1e-5, where


@pytest.fixture(scope="module")
def single(files, ranks):
    """Return one process's step, half of it on stored packs, with all three teachers."""
    arguments = on_policy(files, "mixed", "single", fraction=0.5)
    (found,) = ranks.run(one_step, 1, arguments, files / "gradients")
    return found


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(one, id=one.name) for one in CASES),
        *(pytest.param(one, id=one.name, marks=SLOW) for one in SLOW_CASES),
    ],
)
def test_every_layout_equals_one_process(case, single, files, ranks):
    arguments = on_policy(files, "mixed", "layout", *case.flags, fraction=0.5)
    results = ranks.run(one_step, case.ranks, arguments, files / "layout gradients")
    require_equal_steps(results, single, files)


@pytest.mark.parametrize("case", CP_CASES)
def test_chunks_on_several_processes_equal_one(case, files, ranks):
    """Tokens of a chunk lie on both sides of the border between two parts of a completion."""
    (whole,) = ranks.run(one_step, 1, on_policy(files, "mixed", "whole"), files / "whole gradients")
    arguments = on_policy(files, "mixed", "parts", *case.flags)
    results = ranks.run(one_step, case.ranks, arguments, files / "layout gradients")
    require_equal_steps(results, whole, files, gradients="whole gradients")


def test_figures_are_those_of_the_chunks(single, files):
    """The teachers' ln q from transformers in float64, over the text of the chunks of an own alignment."""
    from mkd.data.aligned.aligned_ids import Pair, align_sampled
    from mkd.tokenizers.load import open_tokenizer
    from tests.train.hf_gradients import load

    ours = open_tokenizer(str(files / "student"))
    names, shares = ("cross", "same", "other"), (0.5, 0.25, 0.25)
    models = {name: load(files / (name if name != "same" else "teacher")) for name in names}
    nll, counts, total = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0), 0
    for prompt, ids, _ in single["rollouts"].values():
        total += len(ids)
        text = ours.decode(prompt.tolist())
        for name in names:
            if name == "same":
                row, rows = np.concatenate([prompt, ids]), range(len(prompt), len(prompt) + len(ids))
                counts[name] += len(ids)
            else:
                theirs = open_tokenizer(str(files / name))
                pair = Pair(ours, theirs, "byte_offset", True, True)
                found = align_sampled(ids, pair, is_stopped=bool(ids[-1] == 0), is_chat=False)
                before = theirs.encode(text)
                row = np.concatenate([before, found.teacher_ids]).astype(np.int64)
                ranges = found.chunks[:, 2:] + len(before)
                rows = [place for first, last in ranges.tolist() for place in range(first, last)]
                counts[name] += int(np.diff(found.chunks[:, :2]).sum())
            known = VOCAB_SIZES[0] if name == "same" else None
            log_q = models[name](torch.from_numpy(row)[None]).logits[0, :, :known].log_softmax(1)
            nll[name] -= sum(log_q[place - 1, int(row[place])].item() for place in rows)
    expected = sum(share * nll[name] / counts[name] for name, share in zip(names, shares, strict=True))
    assert single["figures"]["rollout/teacher_nll"] == pytest.approx(expected, abs=1e-5)
    coverage = min(counts["cross"], counts["other"]) / total
    assert single["figures"]["rollout/coverage"] == pytest.approx(coverage) and 0.3 < coverage < 1


def test_a_context_takes_the_place_of_the_prompt(files, ranks):
    """The student's own prompt as the context changes nothing; another one does, under every layout."""
    found = {}
    for name, user in (("alone", None), ("same", "{prompt}"), ("other", "{answer}: {prompt}")):
        teacher = {"name": "cross", "hf": str(files / "cross"), "xtoken": {}}
        if user is not None:
            settings = {"student": {"hf": str(files / "student")}}
            settings["teachers"] = [teacher | {"context": {"user": user}}]
            (files / f"{name}.yaml").write_text(json.dumps(settings))
        (found[name],) = ranks.run(
            one_step, 1, on_policy(files, name, f"context {name}"), files / "gradients 2"
        )
    sums = {name: one["sums"] for name, one in found.items()}
    for key, value in sums["alone"].items():
        assert sums["same"][key] == pytest.approx(value, rel=1e-5), key
    assert sums["other"]["kd"] != pytest.approx(sums["alone"]["kd"], rel=1e-6)
    arguments = on_policy(files, "other", "context layout", *CASES[0].flags)
    results = ranks.run(one_step, 2, arguments, files / "layout gradients")
    require_equal_steps(results, found["other"], files, gradients="gradients 2")


def test_the_command_trains_and_resumes(files, ranks):
    """A conversation for each model in its own template; four steps in two runs equal four in one."""
    from tests.tokenizers.trained import CHATML
    from tests.train.command import read_metrics, run_main

    own = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
    own += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (files / "student" / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>", "<|endoftext|>"))
    (files / "cross" / "chat_template.jinja").write_text(own)
    questions = [{"messages": [{"role": "user", "content": f"fox {i}?"}]} for i in range(7)]
    write_records(files / "chat.jsonl", *questions)

    def run(folder, *more):
        flags = ("--prompt-data-path", files / "chat.jsonl", "--seq-length", 96, "--log-interval", 1)
        arguments = on_policy(files, "alone", folder, *flags, "--save", files / folder, *more)
        (result,) = run_main(ranks, arguments)
        assert result.exit_code == 0, result.stderr
        return [
            [line[name] for name in ("loss", "rollout/coverage", "rollout/teacher_nll")]
            for line in read_metrics(files / folder)
        ]

    straight = run("straight")
    run("halves", "--exit-interval", 2)
    assert run("halves", "--load", files / "halves") == straight
    assert len(straight) == 4 and all(0.3 < coverage <= 1 for _, coverage, _ in straight)


def test_a_teacher_without_a_template_is_named(files, tmp_path):
    from mkd.config.load import load_config
    from mkd.errors import ErrorList
    from mkd.run.plan_run import plan_run

    write_records(tmp_path / "chat.jsonl", {"messages": [{"role": "user", "content": "a"}]})
    arguments = on_policy(files, "alone", "refused", "--prompt-data-path", tmp_path / "chat.jsonl")
    (files / "student" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (files / "cross" / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ErrorList) as caught:
        plan_run(load_config(arguments).config, 1)
    assert [one.code for one in caught.value.errors] == ["chat-template-missing"]
