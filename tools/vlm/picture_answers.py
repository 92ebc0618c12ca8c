"""Answers about pictures, scored by plain transformers: likelihoods, KL to a teacher, and swapped pictures.

With swapped pictures the model sees a picture of another group than the one it is asked about. A model that
does not look scores as well as before.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.vlm.emoji_pictures import QUESTIONS, Named, Question
from tools.vlm.small_vlm import END, load_vlm, num_image_tokens, prompt_ids

NUM_CHOICES, BATCH, IGNORED = 4, 64, -1


@dataclass(frozen=True)
class PictureExam:
    """Pictures, the questions about them, and what a model may choose from."""

    pixels: Tensor  # [n, 3, 64, 64]
    named: Sequence[Named]  # n
    choices: Mapping[str, Sequence[Sequence[str]]]  # key of a question -> n lists, the right answer first
    swapped: Tensor  # [n] int64: the picture of another group that is shown instead

    @classmethod
    def of(cls, pixels: Tensor, named: Sequence[Named], seed: int = 0) -> PictureExam:
        """Draw wrong names of the same group as the right one, and all other groups."""
        drawn, groups = random.Random(seed), sorted({one.group for one in named})
        names = {group: [one.name for one in named if one.group == group] for group in groups}
        choices: dict[str, list[list[str]]] = {"name": [], "group": []}
        swapped = []
        for one in named:
            others = [name for name in names[one.group] if name != one.name]
            choices["name"].append([one.name, *drawn.sample(others, min(NUM_CHOICES - 1, len(others)))])
            choices["group"].append([one.group, *(group for group in groups if group != one.group)])
            swapped.append(drawn.choice([i for i, other in enumerate(named) if other.group != one.group]))
        return cls(pixels, named, choices, torch.tensor(swapped))

    def part(self, count: int, seed: int = 0) -> PictureExam:
        """Return an exam with `count` of the pictures; all of them can be choices and be shown swapped."""
        chosen = sorted(random.Random(seed).sample(range(len(self.named)), min(count, len(self.named))))
        order = [*chosen, *(i for i in range(len(self.named)) if i not in set(chosen))]
        place = {old: new for new, old in enumerate(order)}
        named = [self.named[i] for i in chosen]
        choices = {key: [lists[i] for i in chosen] for key, lists in self.choices.items()}
        swapped = torch.tensor([place[int(self.swapped[i])] for i in chosen])
        return PictureExam(self.pixels[order], named, choices, swapped)

    def shown(self, is_swapped: bool) -> Tensor:
        """Return the pictures that the model sees, [n, 3, 64, 64]."""
        return self.pixels[self.swapped if is_swapped else slice(0, len(self.named))]


@dataclass
class ExamResult:
    """Results of a model. Each is a mean over answers, or over the tokens of the right answers."""

    exact_name: float  # proportion of names that the model would write, greedily
    name_of_4: float  # proportion of right names that are more likely than three others of their group
    group: float  # proportion of groups that are more likely than all others
    ce: float  # nats per token
    kl: float  # to the teacher that sees the right picture, nats per token
    top1: float  # proportion of tokens where the model's first choice is that teacher's


class Examiner:
    """Asks one model. The results of a teacher are kept for its students."""

    def __init__(self, folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32):
        self.folder, self.device = folder, device
        self.model: nn.Module = load_vlm(folder, dtype=dtype, device=device)

    def examine(
        self, exam: PictureExam, *, is_swapped: bool = False, teacher: Sequence[Tensor] = ()
    ) -> tuple[ExamResult, list[Tensor]]:
        """Return the results, and the log-probabilities at the right answers for each question.

        `teacher` has the log-probabilities of the teacher; without them the model is its own teacher.
        """
        found, kept, counts = {"exact": {}, "best": {}}, [], {"ce": 0.0, "kl": 0.0, "top1": 0.0, "tokens": 0}
        for number, question in enumerate(QUESTIONS):
            logps, ids, likely = self._ask(exam, question, is_swapped)
            ids = ids.to(logps.device)
            right = ids != IGNORED
            other = teacher[number] if teacher else logps
            own, theirs, labels = logps[right], other[right], ids[right]
            counts["ce"] -= float(own.gather(1, labels[:, None]).sum())
            counts["kl"] += float((theirs.exp() * (theirs - own)).sum())
            counts["top1"] += float((own.argmax(1) == theirs.argmax(1)).sum())
            counts["tokens"] += len(labels)
            found["exact"][question.key] = float(((logps.argmax(2) == ids) | ~right).all(1).float().mean())
            found["best"][question.key] = float((likely.argmax(1) == 0).float().mean())
            kept.append(logps)
        means = {key: counts[key] / counts["tokens"] for key in ("ce", "kl", "top1")}
        names = dict(exact_name=found["exact"]["name"], name_of_4=found["best"]["name"])
        return ExamResult(**names, group=found["best"]["group"], **means), kept

    @torch.no_grad()
    def _ask(self, exam: PictureExam, question: Question, is_swapped: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities [n, m, v] at the right answers, their ids [n, m], and likelihoods [n, c].

        Ids are IGNORED beyond an answer, whose last token ends the turn.
        """
        lists, pixels = exam.choices[question.key], exam.shown(is_swapped)
        prompt, tokenizer = prompt_ids(self.folder, question.text, num_image_tokens(self.model.config))
        texts = sorted({text for one in lists for text in one})
        encoded = {text: tokenizer(f" {text}{END}", add_special_tokens=False)["input_ids"] for text in texts}
        longest, width = max(map(len, encoded.values())), max(map(len, lists))
        ids = torch.full((len(lists), width, longest), IGNORED)
        for row, one in enumerate(lists):
            for column, text in enumerate(one):
                ids[row, column, : len(encoded[text])] = torch.tensor(encoded[text])
        parts, likely = [], []
        for start in range(0, len(lists), BATCH):
            here = ids[start : start + BATCH]
            logps = self._continued(prompt, pixels[start : start + BATCH], here)
            labels = here.to(logps.device)
            each = logps.gather(3, labels.clamp(min=0)[..., None])[..., 0] * (labels != IGNORED)
            none = (labels == IGNORED).all(2)
            likely.append(each.sum(2).masked_fill(none, -torch.inf))
            parts.append(logps[:, 0].clone())
        return torch.cat(parts), ids[:, 0], torch.cat(likely)

    def _continued(self, prompt: list[int], pixels: Tensor, ids: Tensor) -> Tensor:
        """Return the log-probabilities of continuations `ids` [n, c, m] of one prompt: [n, c, m, v] fp32."""
        (count, width, length), device = ids.shape, self.device
        tokens = torch.tensor([prompt], device=device).expand(count, -1)
        shown = pixels[:, None].to(device, self.model.dtype)
        first = self.model(input_ids=tokens, pixel_values=shown, use_cache=True, logits_to_keep=1)
        cache = first.past_key_values
        cache.batch_repeat_interleave(width)
        rows = ids.reshape(count * width, length)[:, :-1].clamp(min=0).to(device)
        rest = self.model(input_ids=rows, past_key_values=cache).logits
        begin = first.logits.repeat_interleave(width, dim=0)
        logits = torch.cat([begin, rest], dim=1).float()
        return F.log_softmax(logits, dim=-1).view(count, width, length, -1)

    @torch.no_grad()
    def answers(self, pixels: Tensor, question: Question) -> list[str]:
        """Return greedy answers about pictures, [n, 3, 64, 64]."""
        prompt, tokenizer = prompt_ids(self.folder, question.text, num_image_tokens(self.model.config))
        inputs = dict(input_ids=torch.tensor([prompt], device=self.device).repeat(len(pixels), 1))
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        shown = pixels[:, None].to(self.device, self.model.dtype)
        end = tokenizer.convert_tokens_to_ids(END)
        settings = dict(max_new_tokens=12, do_sample=False, eos_token_id=end, pad_token_id=end)
        written = self.model.generate(**inputs, pixel_values=shown, **settings)[:, len(prompt) :]
        return [text.strip() for text in tokenizer.batch_decode(written, skip_special_tokens=True)]
