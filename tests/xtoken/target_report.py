"""Targets of chunk losses: the text's nats under a student that meets the teacher's targets exactly.

    python -m tests.xtoken.target_report --teacher SMOLLM2 --texts heldout.jsonl

At the start of a chunk both sides have read the same bytes. There partition_kl asks that a common token be as
likely as its twin. prefix_kl asks that it be as likely as all of the teacher's tokens that begin with it. The
table has -ln of that probability for the first token of each chunk of real text, by the kind of chunk. For a
token without a twin it is that of the probability of all such tokens. The table shows where a student with
the Mistral tokenizer is drawn. SmolLM2-135M-Instruct is the teacher.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from mkd.quickstart.fetch_smollm2 import fetch_smollm2
from mkd.tokenizers.load import open_tokenizer
from mkd.xtoken.align.align_text import align
from mkd.xtoken.vocabulary.relation import VocabularyRelation, build_relation
from tests.xtoken.real_tokenizers import downloads_folder, fetch_tokenizers

KINDS = ("1-1", "1-N", "M-1", "M-N")
COLUMNS = ("partition_kl", "prefix_kl", "teacher", "no twin")


def targets(
    log_p: torch.Tensor, relation: VocabularyRelation
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return probabilities from the teacher's [m, v_t].

    They are those of each common token's twin, of all that begins with it [v_s, m], of tokens without a twin
    [m].
    """
    p = log_p.exp().t()[: relation.teacher_size].contiguous()
    twins, begins = (torch.zeros(relation.student_size, p.shape[1]) for _ in range(2))
    students, teachers = (torch.from_numpy(ids) for ids in relation.pairs())
    twins[students] = p[teachers]
    known = torch.from_numpy(np.flatnonzero(relation.teacher_beginnings >= 0))
    begins.index_add_(0, torch.from_numpy(relation.teacher_beginnings)[known], p[known])
    return twins, begins, (1 - twins.sum(dim=0)).clamp(min=0)


def rows_of(
    text: str, model, student, teacher, relation: VocabularyRelation
) -> list[tuple[int, list[float]]]:
    """Return (kind, the columns of the table) of each chunk of a text but its first."""
    aligned = align(student, teacher, text)
    with torch.no_grad():
        log_p = model(torch.from_numpy(aligned.teacher_ids)[None]).logits[0].log_softmax(dim=1)
    twins, begins, others = targets(log_p, relation)
    has_twin, found = relation.twins() >= 0, []
    for s, s_end, t, t_end in aligned.chunks[aligned.chunks[:, 2] > 0].tolist():
        token = aligned.student_ids[s]
        start = relation.student_beginnings[token]
        by_twin = twins[token, t - 1] if has_twin[token] else others[t - 1]
        by_start = begins[start, t - 1] if start >= 0 else others[t - 1]
        own = -log_p[t - 1, aligned.teacher_ids[t]]
        values = [-float(p.clamp(min=1e-12).log()) for p in (by_twin, by_start)] + [
            float(own),
            float(others[t - 1]),
        ]
        found.append((2 * (s_end - s > 1) + (t_end - t > 1), values))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--teacher",
        type=Path,
        required=True,
        help="folder of SmolLM2-135M-Instruct; made where it is missing",
    )
    parser.add_argument(
        "--texts", type=Path, required=True, help=".jsonl with text, or prompt and completion"
    )
    parser.add_argument("--num-texts", type=int, default=60)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = fetch_tokenizers(downloads_folder(Path(scratch)), ("mistral",))["mistral"]
        student, teacher = open_tokenizer(tokenizer), open_tokenizer(fetch_smollm2(args.teacher))
    relation = build_relation(student, teacher)
    model = AutoModelForCausalLM.from_pretrained(args.teacher, dtype=torch.float32).eval()
    lines = args.texts.read_text(encoding="utf-8").splitlines()[: args.num_texts]
    texts = [
        "".join(record.get(key, "") for key in ("text", "prompt", "completion"))
        for record in map(json.loads, lines)
    ]
    rows = [row for text in texts for row in rows_of(text, model, student, teacher, relation)]
    kinds, values = np.array([kind for kind, _ in rows]), np.array([row for _, row in rows])
    print(f"{'chunks':10}{'number':>8}" + "".join(f"{name:>14}" for name in COLUMNS))
    for name, own in [*((name, kinds == i) for i, name in enumerate(KINDS)), ("all", kinds >= 0)]:
        print(f"{name:10}{own.sum():8}" + "".join(f"{mean:14.3f}" for mean in values[own].mean(axis=0)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
