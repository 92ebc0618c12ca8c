"""The completions that become records, and the counts of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkd.generate.completions import Completion
from mkd.generate.generate_settings import Filter
from mkd.generate.journal import Lines, read_journals
from mkd.generate.teacher_prompts import TeacherPrompt
from mkd.generate.teacher_records import record_of
from mkd.human import counted

KEPT, EMPTY, CONTROL, BYTES, TRUNCATED = "kept", "empty", "control", "bytes", "truncated"
FAILED, LOW, NOT_BEST = "failed", "low", "not_best"
WHY = {  # in the order in which they are looked for
    EMPTY: "have no text",
    CONTROL: "have control tokens inside, which a text cannot hold",
    BYTES: "have bytes that are not UTF-8, which a text cannot hold",
    TRUNCATED: "were cut off",
    FAILED: "have no reward",
    LOW: "have a reward below {min_reward:g}",
    NOT_BEST: "are not among the best {keep_best} of their prompt",
}


@dataclass(frozen=True)
class _Known:
    """Where a completion stands on disk, and what decides about it."""

    file: Path
    place: int
    has_text: bool
    has_control: bool
    is_utf8: bool
    is_truncated: bool
    tokens: int
    reward: float | None


@dataclass
class Index:
    """All finished completions of a job, without their texts."""

    known: dict[tuple[int, int], _Known] = field(default_factory=dict)  # by prompt and sample

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Read the journals. Of a completion that was judged again, the reward counts."""
        found = cls()
        for one, file, place in read_journals(folder):
            if one.place not in found.known or one.reward is not None:
                found.known[one.place] = _Known(
                    file,
                    place,
                    bool(one.text.strip()),
                    one.control > 0,
                    one.is_utf8,
                    one.is_truncated,
                    one.tokens,
                    one.reward,
                )
        return found

    def missing(self, prompt: int, samples: int) -> list[int]:
        """Return the numbers of the samples of a prompt that do not exist yet."""
        return [sample for sample in range(samples) if (prompt, sample) not in self.known]

    def without_reward(self) -> list[_Known]:
        """Return the completions without a reward, in order."""
        return [one for _, one in sorted(self.known.items()) if one.reward is None]


@dataclass
class Selection:
    """Chooses the completions of each prompt, and counts."""

    chosen_by: Filter
    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    truncated: int = 0  # also those that are kept
    prompts: int = 0  # that have a record
    rewards: list[float] = field(default_factory=list)  # sum and number, of all that have one

    def records(
        self, index: Index, prompts: Iterable[TeacherPrompt], samples: int, begun: Mapping[int, str]
    ) -> Iterator[dict[str, Any]]:
        """Yield the records in the order of prompts and samples."""
        with Lines() as lines:
            for prompt in prompts:
                group = [(sample, index.known[prompt.number, sample]) for sample in range(samples)]
                chosen = self._choose(group)
                self.prompts += bool(chosen)
                for _, one in chosen:
                    completion: Completion = lines.read(one.file, one.place)
                    yield record_of(prompt, completion, begun.get(prompt.number, ""))

    def _choose(self, group: Sequence[tuple[int, _Known]]) -> list[tuple[int, _Known]]:
        """Return the completions of one prompt that are kept, in order."""
        kept = []
        for sample, one in group:
            self.tokens += one.tokens
            self.truncated += one.is_truncated
            if one.reward is not None:
                self.rewards.append(one.reward)
            fate = self._fate(one)
            self.counts[fate] += 1
            if fate == KEPT:
                kept.append((sample, one))
        best = self.chosen_by.keep_best
        if best is not None and len(kept) > best:
            self.counts[NOT_BEST] += len(kept) - best
            self.counts[KEPT] -= len(kept) - best
            ranked = sorted(kept, key=lambda pair: (-(pair[1].reward or 0.0), pair[0]))
            kept = sorted(ranked[:best], key=lambda pair: pair[0])
        return kept

    def _fate(self, one: _Known) -> str:
        rule = self.chosen_by
        if not one.has_text:
            return EMPTY
        if one.has_control:
            return CONTROL
        if not one.is_utf8:
            return BYTES
        if one.is_truncated and rule.truncated == "drop":
            return TRUNCATED
        if rule.reward is not None and one.reward is None:
            return FAILED
        if rule.min_reward is not None and one.reward is not None and one.reward < rule.min_reward:
            return LOW
        return KEPT

    def summary(self) -> dict[str, Any]:
        """Return the counts."""
        found: dict[str, Any] = {"completions": self.counts.total(), "tokens": self.tokens}
        found |= {"prompts_kept": self.prompts, KEPT: self.counts[KEPT], "cut_off": self.truncated}
        found["dropped"] = {fate: self.counts[fate] for fate in WHY if self.counts[fate]}
        if self.rewards:
            found["mean_reward"] = sum(self.rewards) / len(self.rewards)
        return found


def summary_lines(summary: Mapping[str, Any], rule: Filter, max_new_tokens: int) -> list[str]:
    """Return a summary for people."""
    total, kept = summary["completions"], summary[KEPT]
    lines = [
        f"kept {counted(kept, 'completion')} of {total:,}, of {counted(summary['prompts_kept'], 'prompt')}"
    ]
    values = {"min_reward": rule.min_reward or 0.0, "keep_best": rule.keep_best}
    for fate, count in summary["dropped"].items():
        hint = f" (--max-new-tokens {max_new_tokens}, or the context is full)" if fate == TRUNCATED else ""
        lines.append(f"dropped {count:,}: they {WHY[fate].format(**values)}{hint}")
    if rule.truncated == "keep" and summary["cut_off"]:
        lines.append(f"{summary['cut_off']:,} were cut off (--max-new-tokens {max_new_tokens})")
    if "mean_reward" in summary:
        lines.append(f"mean reward {summary['mean_reward']:.4f}")
    return lines
