"""Lines about the prompts of a teacher's own at the start of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mkd.data.aligned.teacher_batch import TeacherPack
from mkd.data.aligned.teacher_side import TeacherSide, TeacherText
from mkd.data.aligned.teacher_store import COVERED, OF_OTHER_TAGS, SILENT
from mkd.data.batch import Pack
from mkd.data.prompt_readers import PromptReader
from mkd.data.prompts import Prompt
from mkd.human import counted
from mkd.tokenizers.tokenizer import Tokenizer

TAIL = 8  # tokens of a prompt that are shown


def summarise_context(
    side: TeacherSide,
    packs: Sequence[Pack],  # a sample of the `num_packs` packs of a data set
    parts: Sequence[TeacherPack],  # the same as the teacher reads them
    needed: int,  # teacher tokens of their pieces, before any was cut
    num_packs: int,
) -> str:
    """Return lines of sizes and proportions, of what is not taught, and of the ends of both prompts."""
    tokens = sum(int(part.lengths.sum()) for part in parts)
    taught = sum(len(part.chunks) for part in parts)
    loss_tokens = sum(np.count_nonzero(pack.loss_mask) for pack in packs)
    name = side.text.name
    lines = [
        f"  {name} reads prompts of its own: packs of {side.seq_length} tokens; "
        f"in {len(packs)} of {num_packs} packs {tokens} tokens,"
        f" fill {tokens / (len(packs) * side.seq_length):.3f},"
        f" share of loss tokens that it teaches {taught / max(loss_tokens, 1):.3f},"
        f" share of its tokens without room {1 - tokens / max(needed, 1):.3f}",
        *_untaught(side),
        *_tails(side, packs, parts),
    ]
    return "\n".join(lines)


def summarise_context_prompts(
    text: TeacherText, student: Tokenizer, prompts: Sequence[Prompt], seq_length: int
) -> list[str]:
    """Return lines about the prompts of a teacher's own, for completions in its packs of `seq_length`."""
    template, reader = text.context, PromptReader(text.tokenizer, text.context)
    assert template is not None, "the teacher has contexts"
    found = [(one.ids, one.of_teachers[text.name]) for one in prompts if text.name in one.of_teachers]
    others = [one for one in prompts if text.name not in one.of_teachers]
    own = [one for one in others if template.teaches(one.tag)]
    made = sum(reader.is_made_of(one.asked, one.fields) for one in own)
    counts = {
        "whose context each step makes": made,
        "without a context": len(own) - made,
        "of other tags": len(others) - len(own),
    }
    parts = [f"  {text.name} reads prompts of its own: packs of {seq_length} tokens"]
    if found:
        lengths = [len(theirs) for _, theirs in found]
        parts.append(f"{min(lengths)} to {max(lengths)} tokens")
    parts += [f"{counted(count, 'prompt')} {which}" for which, count in counts.items() if count]
    ends = [_ends(text, student, *(one[-TAIL:] for one in found[0]))] if found else []
    return ["; ".join(parts), *ends]


def _untaught(side: TeacherSide) -> list[str]:
    """Return a line on the loss tokens of the corpus that the teacher does not teach, and why."""
    store, template = side.store, side.text.context
    assert template is not None, "the teacher has contexts"
    lost = store.student.meta.get("loss_tokens", 0) - store.tokens.meta.get(COVERED, 0)
    silent, others = (store.tokens.meta.get(name, 0) for name in (SILENT, OF_OTHER_TAGS))
    if lost <= 0:
        return []
    why = ["earlier turns, which have no prompt of its own"]
    why += [f"{counted(silent, 'record')} without a context"] * bool(silent)
    why += [f"{counted(others, 'record')} of other tags"] * bool(others)
    why += [f"the first {counted(template.skip_first, 'token')} of completions"] * bool(template.skip_first)
    return [
        f"  {side.text.name} does not teach {counted(lost, 'loss token')} of the corpus: {'; '.join(why)}"
    ]


def _tails(side: TeacherSide, packs: Sequence[Pack], parts: Sequence[TeacherPack]) -> list[str]:
    """Return a line with the ends of both models' prompts: a completion should start in the same way."""
    for pack, part in zip(packs, parts, strict=True):
        if not len(part.chunks):
            continue
        rows = int(part.chunks.student_rows[0]), int(part.chunks.teacher_rows[0])
        template = side.text.context
        skipped = template.skip_first if template else 0
        tails = [
            one[max(row + 1 - skipped - TAIL, 0) : row + 1 - skipped]
            for one, row in zip((pack.tokens, part.tokens), rows, strict=True)
        ]
        return [_ends(side.text, side.text.tokenizer, *tails)]
    return []


def _ends(text: TeacherText, student: Tokenizer, ours: np.ndarray, theirs: np.ndarray) -> str:
    """Return a line with the ends of a prompt as the student and as the teacher read it."""
    own, other = student.decode(ours.tolist()), text.tokenizer.decode(theirs.tolist())
    return f"  prompts end with {own!r} (student) and {other!r} ({text.name})"
