"""Run a step of a loss of pairs on the ranks of a layout, and compute the same loss with transformers."""

from __future__ import annotations

from pathlib import Path

import torch

from mkd.kinds.judged.pair_losses.pair_loss import Answers
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import write_records
from tests.train.rollout_run import EOS, documents_of

SEQ_LENGTH, BETA, SIMPO_BETA, GAMMA = 88, 0.3, 2.0, 0.05
DPO, SIMPO = ("--dpo-beta", BETA), ("--simpo-beta", SIMPO_BETA, "--simpo-gamma", GAMMA)
WORDS = ("quick brown", "fox jumps over", "lazy", "the dog is not")
NUM_PAIRS, NUM_PACKS = 12, 4  # of an epoch


def make_files(folder: Path, family: str = "qwen3") -> Path:
    """Make a student, a reference of another family, and pairs whose answers differ in length."""
    sizes = dict(num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    sizes = sizes | dict(tie_word_embeddings=True) if family == "qwen3" else {}
    add_tokenizer(make_model(folder / "student", family, seed=1, **sizes | EOS))
    other = dict(hidden_size=72, num_hidden_layers=4, intermediate_size=128, vocab_size=330)
    add_tokenizer(make_model(folder / "reference", "llama", seed=2, **other | EOS))
    write_records(folder / "pairs.jsonl", *(pair_of(i) for i in range(NUM_PAIRS)))
    return folder


def pair_of(i: int) -> dict[str, str]:
    chosen, rejected = WORDS[(i + 1) % 4] * (i % 2 + 1), WORDS[(i + 2) % 4] * (i % 3)
    return {"prompt": f"{i}: {WORDS[i % 4]}", "chosen": f" {chosen}.", "rejected": f" {rejected}!"}


def argv(
    files: Path, run: str, *more: object, reference: str | None = "reference", loss: tuple = DPO
) -> list[str]:
    """Return the command line of a run whose steps have all pairs."""
    words: list[object] = ["--student-hf", files / "student", "--data-path", files / "pairs.jsonl"]
    words += [] if reference is None else ["--teacher-hf", files / reference]
    words += [*loss, "--kd-ratio", 0, "--seq-length", SEQ_LENGTH, "--no-shuffle"]
    words += ["--global-batch-size", NUM_PACKS, "--train-iters", 4, "--lr", 1e-3]
    words += ["--log-dir", files / run, "--data-cache-path", files / "cache"]
    return [str(word) for word in (*words, *more)]


def one_step(arguments: list[str], out_dir: Path) -> dict:
    """Run one step's forward and backward, export its gradients; return its sums and documents."""
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run
    from tests.train.invariance import export_gradients

    run = build_run(plan_run(load_config(arguments).config, torch.distributed.get_world_size()), detect())
    batches = run.data.train.next_step()
    student = Path(arguments[arguments.index("--student-hf") + 1])
    sums = export_gradients(run.engine, run.state, batches, student, out_dir)
    run.reporter.close()
    is_whole = run.engine.context.cp_size == 1
    documents = [document for batch in batches for document in documents_of(batch)] if is_whole else []
    return {"sums": sums, "documents": documents}


def dpo(chosen: Answers, rejected: Answers) -> tuple[torch.Tensor, torch.Tensor]:
    log_ratios = [one.logp - one.reference_logp for one in (chosen, rejected)]
    margin = BETA * (log_ratios[0] - log_ratios[1])
    return margin, -torch.nn.functional.logsigmoid(margin)


def simpo(chosen: Answers, rejected: Answers) -> tuple[torch.Tensor, torch.Tensor]:
    margin = SIMPO_BETA * (chosen.logp / chosen.length - rejected.logp / rejected.length)
    return margin, -torch.nn.functional.logsigmoid(margin - GAMMA)


FORMULAS = {DPO: dpo, SIMPO: simpo}
"""Flags of a loss -> its definition: (margin, loss) of one pair, fp64 []."""


def reference_loss(folder: Path, documents: list, out_dir: Path, loss: tuple = DPO) -> dict[str, float]:
    """Write float64 gradients as a folder; return the mean loss, margin and accuracy.

    Every document runs alone. The loss is autograd's, of its definition.
    """
    from tests.train.hf_gradients import load

    student, frozen = load(folder / "student"), load(folder / "reference").requires_grad_(False)
    pairs = list(zip(documents[::2], documents[1::2], strict=True))
    found = dict(loss=0.0, margin=0.0, accuracy=0.0)
    for pair in pairs:
        scores = ((sum_logp(student, *one), sum_logp(frozen, *one), one[2].sum()) for one in pair)
        margin, of_pair = FORMULAS[loss](*(Answers(*score) for score in scores))
        (of_pair / len(pairs)).backward()
        for name, value in (("loss", of_pair), ("margin", margin), ("accuracy", margin > 0)):
            found[name] += torch.as_tensor(value).item() / len(pairs)
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return found


def sum_logp(model, tokens, labels, mask) -> torch.Tensor:
    """Return the sum of ln p over the labels that count."""
    logp = model(tokens[None]).logits[0].log_softmax(1).gather(1, labels[:, None])[:, 0]
    return (logp * mask).sum()
