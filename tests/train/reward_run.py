"""Run a step of GRPO on the ranks of a layout, and compute the same loss with plain transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.train.rollout_run import argv as rollout_argv

CLIP, UPDATES = 0.2, 3
REWARD = "tests.kinds.sampled.reward_functions"


def argv(files: Path, run: str, *more: object, ratio: float = 0.25, reward: str = "of_length") -> list[str]:
    """Return the command line of a run whose steps have 4 prompts, 3 samples each."""
    words = ("--reward", f"{REWARD}:{reward}", "--kd-ratio", ratio, "--clip-range", CLIP)
    groups = ("--rollout-prompts", 4, "--samples-per-prompt", 3)
    arguments = rollout_argv(files, run, *words, *groups, *more)
    if ratio == 0:  # no reference: remove it and its divergence
        for flag in ("--teacher-hf", "--kd-divergence"):
            place = arguments.index(flag)
            del arguments[place : place + 2]
    return arguments


def with_other_policy(batch):
    """Return the batch as if another policy had sampled it: ln p moves by up to 0.5, token by token."""
    if not batch.row_values:
        return batch
    place = batch.labels * 1.7 + batch.position_ids
    moved = batch.row_values["sampled_logp"] + 0.5 * torch.sin(place.double()).float() * batch.loss_mask
    return replace(batch, row_values={**batch.row_values, "sampled_logp": moved})


def one_step(arguments: list[str], out_dir: Path, moved: bool = False) -> dict:
    """Sample and judge, run one step's forward and backward, export its gradients; return what it had.

    If `moved`, the ratio of the policies is not 1.
    """
    from mkd.config.load import load_config
    from mkd.platform import detect
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run
    from tests.train.invariance import export_gradients

    run = build_run(plan_run(load_config(arguments).config, torch.distributed.get_world_size()), detect())
    stream = run.data.train
    batches = [with_other_policy(batch) if moved else batch for batch in stream.next_step()]
    student = Path(arguments[arguments.index("--student-hf") + 1])
    sums = export_gradients(run.engine, run.state, batches, student, out_dir)
    run.reporter.close()
    stream.rewards.calls.close()
    return {
        "sums": sums,
        "figures": {name: value for name, value in stream.figures.items() if name.startswith("reward/")},
        "documents": [document for batch in batches for document in judged_documents(batch)],
        "rollouts": [one for pack in stream._packs.packs for one in pack],
    }


def judged_documents(batch) -> list[tuple[torch.Tensor, ...]]:
    """Return (tokens, labels, mask, advantage, sampled ln p) of the documents of a micro-batch."""
    columns = [batch.tokens, batch.labels, batch.loss_mask]
    columns += [batch.row_values[name] for name in ("advantage", "sampled_logp")] if batch.row_values else []
    starts, lengths = batch.cu_seqlens_padded.tolist(), batch.cu_seqlens.diff().tolist()
    spans = [slice(*pair) for pair in zip(starts, map(sum, zip(starts, lengths, strict=False)), strict=False)]
    return [tuple(one[0, span] for one in columns) for span in spans if span.stop > span.start]


def dense_loss(files: Path, documents: list, out_dir: Path, ratio: float, has_ratio: bool) -> dict:
    """Write float64 gradients as a folder; return loss and clipped fractions.

    The loss is autograd's, of its definition: (1 - ratio) x clipped objective + ratio x KL(student ||
    teacher) over the ids that both have.
    """
    from tests.train.hf_gradients import load

    student = load(files / "student")
    teacher = load(files / "teacher").requires_grad_(False) if ratio else None
    count = sum(int(mask.sum()) for _, _, mask, *_ in documents)
    found = dict(loss=0.0, above=0, below=0)
    for tokens, labels, mask, advantage, sampled in documents:
        logp = student(tokens[None]).logits[0].log_softmax(1)
        of_label, here = logp.gather(1, labels[:, None])[:, 0], mask.bool()
        old = sampled.double() if has_ratio else of_label.detach()
        rho, a = (of_label - old).exp(), advantage.double()
        gain = torch.minimum(rho * a, rho.clamp(1 - CLIP, 1 + CLIP) * a)
        loss = -(1 - ratio) * gain[here].sum()
        if teacher is not None:
            theirs = teacher(tokens[None]).logits[0, :, : logp.shape[1]].log_softmax(1)
            loss = loss + ratio * (logp.exp() * (logp - theirs)).sum(1)[here].sum()
        (loss / count).backward()
        found["loss"] += loss.item() / count
        found["above"] += int(((a > 0) & (rho > 1 + CLIP) & here).sum())
        found["below"] += int(((a < 0) & (rho < 1 - CLIP) & here).sum())
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return found | {"clipped": (found["above"] + found["below"]) / count, "count": count}
