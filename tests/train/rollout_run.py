"""Run steps with rollouts on the ranks of a layout, and compute the same loss with plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import write_records
from tests.train.invariance import worst_relative_error

SEQ_LENGTH, NEW_TOKENS = 48, 20
VOCAB_SIZES = 307, 330  # student and teacher
EOS = dict(eos_token_id=0)


@dataclass(frozen=True)
class Case:
    """A layout and the flags of a run."""

    name: str
    ranks: int = 1
    flags: tuple[object, ...] = ()


def make_files(folder: Path) -> Path:
    """Make a student that stops now and then, a teacher, prompts of two kinds of records, and a text."""
    sizes = dict(num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    add_tokenizer(make_model(folder / "student", "qwen3", seed=1, tie_word_embeddings=True, **sizes | EOS))
    teacher = dict(hidden_size=48, num_hidden_layers=4, intermediate_size=128, vocab_size=VOCAB_SIZES[1])
    add_tokenizer(make_model(folder / "teacher", "llama", seed=2, **teacher | EOS))
    second = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4)
    add_tokenizer(make_model(folder / "second", "qwen2", seed=5, **second | EOS))
    words = ("quick brown", "fox jumps over", "lazy", "the dog is not")
    prompts = [{"prompt": f"{i}: {words[i % 4]}", "answer": i} for i in range(13)]
    write_records(folder / "prompts.jsonl", *prompts)
    texts = [f"{i}: " + "the quick brown fox " * (i % 4 + 1) for i in range(40)]
    write_records(folder / "text.jsonl", *({"text": text} for text in texts))
    return folder


def argv(files: Path, run: str, *more: object, fraction: float = 1.0, teacher: str = "teacher") -> list[str]:
    """Return the command line of a run whose steps have 5 prompts, 2 samples each."""
    words: list[object] = ["--student-hf", files / "student", "--teacher-hf", files / teacher]
    words += ["--on-policy-fraction", fraction, "--prompt-data-path", files / "prompts.jsonl"]
    words += ["--rollout-prompts", 5, "--samples-per-prompt", 2, "--max-new-tokens", NEW_TOKENS]
    words += ["--rollout-slots", 3, "--kd-ratio", 1, "--kd-divergence", "reverse_kl"]
    words += ["--seq-length", SEQ_LENGTH, "--global-batch-size", 4, "--train-iters", 4, "--lr", 1e-3]
    words += ["--log-dir", files / run, "--data-cache-path", files / "cache"]
    words += ["--data-path", files / "text.jsonl"] if fraction < 1 else []
    return [str(word) for word in (*words, *more)]


def on_device(engine, batches: Sequence) -> list:
    """Return the batches on the device of an engine, as a run moves them."""
    return [batch.to(engine.context.device) for batch in batches]


def one_step(arguments: list[str], out_dir: Path) -> dict:
    """Sample, run one step's forward and backward, export its gradients; return what it was made of."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run
    from mkd.train.step import training_objective
    from tests.train.invariance import export_student, gradients_as_parameters

    world_size = torch.distributed.get_world_size()
    run = build_run(plan_run(load_config(arguments).config, world_size), detect())
    stream, engine = run.data.train, run.engine
    batches = on_device(engine, stream.next_step())
    run.meter.start()
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches, run.meter)
    sums = engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    places = [place for place, word in enumerate(arguments) if word == "--student-hf"]
    student = Path(arguments[places[-1] + 1])
    with gradients_as_parameters(engine, engine.context):
        export_student(engine, run.state, student, out_dir)
    run.reporter.close()
    if stream.rewards is not None:
        stream.rewards.calls.close()
    rollouts = [one for pack in stream._packs.packs for one in pack]
    return {
        "sums": objective.sums(sums).token_sums(),
        "figures": run.meter.finish(),
        "rollouts": {(r.request.prompt, r.request.sample): (r.request.ids, r.ids, r.logp) for r in rollouts},
        "documents": [document for batch in batches for document in documents_of(batch)],
        "num_microbatches": len(batches),
        "num_packs": len(stream._packs),
        "sources": [
            [stream.documents_of(one) for one in stream.last_samples() if (one >= stream._first) == is_own]
            for is_own in (False, True)
        ],
    }


def one_step_alone(arguments: list[str]) -> dict:
    """Sample, run one step's forward and backward, and return its sums."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run
    from mkd.train.step import training_objective

    world_size = torch.distributed.get_world_size()
    run = build_run(plan_run(load_config(arguments).config, world_size), detect())
    batches, engine = run.data.train.next_step(), run.engine
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches)
    sums = engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    run.reporter.close()
    return objective.sums(sums).token_sums()


def require_equal_steps(results: list[dict], single: dict, files: Path, gradients: str = "gradients") -> None:
    """Assert that the ranks of a layout sampled the same ids as one process, with its sums and gradients.

    The gradients are in the folders "layout gradients" and `gradients`.
    """
    for found in results:
        assert found["sums"] == results[0]["sums"]
        for key, (_, ids, _) in single["rollouts"].items():
            assert found["rollouts"][key][1].tolist() == ids.tolist()
        for name, value in single["figures"].items():
            if name != "rollout/time_ms":
                assert found["figures"][name] == pytest.approx(value, abs=1e-5), name
    for name, value in single["sums"].items():
        assert results[0]["sums"][name] == pytest.approx(value, rel=1e-5), name
    error, where = worst_relative_error(files / "layout gradients", files / gradients)
    assert error <= 1e-5, where


def documents_of(batch) -> list[tuple[torch.Tensor, ...]]:
    """Return (tokens, labels, mask) of the documents of a micro-batch."""
    found = []
    for start, length in zip(
        batch.cu_seqlens_padded.tolist(), batch.cu_seqlens.diff().tolist(), strict=False
    ):
        rows = slice(start, start + length)
        found.append(tuple(one[0, rows] for one in (batch.tokens, batch.labels, batch.loss_mask)))
    return [document for document in found if len(document[0])]


def reference(
    student_dir: Path, teacher_dirs: list[Path], documents: list, out_dir: Path, **settings
) -> float:
    """Write float64 gradients of transformers as a folder; return the mean loss, equal weight to teachers.

    Every document runs alone. `settings` are those of `objective_of`.
    """
    from mkd.losses.dense_reference import dense_kd
    from tests.losses.objectives import objective_of
    from tests.train.hf_gradients import load

    student, teachers = load(student_dir), [load(one).requires_grad_(False) for one in teacher_dirs]
    num_tokens = sum(int(mask.sum()) for *_, mask in documents)
    total = 0.0
    for tokens, labels, mask in documents:
        logits = student(tokens[None]).logits[0]
        loss = torch.zeros((), dtype=torch.float64)
        for one in teachers:
            theirs = one(tokens[None]).logits[0]
            sizes = dict(student_vocab_size=logits.shape[1], teacher_vocab_size=theirs.shape[1], kd_ratio=1.0)
            objective = objective_of(**sizes, **settings)
            loss = loss + dense_kd(logits, theirs, labels, mask.double(), objective).loss / len(teachers)
        (loss / num_tokens).backward()
        total += loss.item() / num_tokens
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return total


@torch.no_grad()
def expected_figures(student_dir: Path, teacher_dir: Path, rollouts: dict) -> dict[str, float]:
    """Return metrics of the sampled tokens from transformers in float64."""
    from tests.train.hf_gradients import load

    models = load(student_dir), load(teacher_dir)
    kl, nll, gap = [[], [], [], []], [], []
    for prompt, ids, sampler in rollouts.values():
        row = torch.from_numpy(np.concatenate([prompt, ids]))[None]
        places = torch.arange(len(prompt) - 1, row.shape[1] - 1)
        scores = [
            model(row)
            .logits[0, places, : VOCAB_SIZES[0]]
            .log_softmax(1)
            .gather(1, row[0, places + 1][:, None])
            for model in models
        ]
        p, q = (one[:, 0].numpy() for one in scores)
        for place in range(len(ids)):
            kl[4 * place // len(ids)].append(p[place] - q[place])
        nll.extend(-q)
        gap.extend(abs(p - sampler))
    quarters = {f"rollout/kl_quarter_{i + 1}": np.mean(one) for i, one in enumerate(kl)}
    return quarters | {"rollout/teacher_nll": np.mean(nll), "rollout/logp_gap": np.mean(gap)}


def samples_of_steps(arguments: list[str], steps: int) -> list[tuple[int, int, int]]:
    """Return (step, prompt, sample) of the completions of so many steps, without training."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    run = build_run(plan_run(load_config(arguments).config, 1), detect())
    drawn = []
    for step in range(steps):
        run.data.train.next_step()
        rollouts = [one for pack in run.data.train._packs.packs for one in pack]
        drawn += [(step, one.request.prompt, one.request.sample) for one in rollouts]
    run.reporter.close()
    return drawn
