"""Prompts of teachers that need what a step makes: siblings of a completion, and feedback about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mkd.config.prompt_template import FEEDBACK, SIBLING
from mkd.data.prompt_readers import PromptReader
from mkd.data.prompts import PromptSet
from mkd.kinds.sampled.sampler.rollouts import Rollout
from mkd.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class MadeContexts:
    """Gives completions with a reward the prompts of their teachers. Equal on all ranks."""

    prompts: PromptSet
    tokenizer: Tokenizer  # of the student
    readers: Mapping[str, PromptReader]  # of teachers whose prompts have such fields
    success: Mapping[str, float]  # teacher -> smallest reward of a sibling

    def __call__(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        """Return the completions with the teachers' prompts, as far as these have all values.

        A prompt without the missing value may be known already, from the fields of the record alone.
        """
        groups: dict[int, list[Rollout]] = {}
        for one in rollouts:
            groups.setdefault(one.request.prompt, []).append(one)
        known: dict[tuple[object, ...], np.ndarray | None] = {}  # many completions share a sibling
        found = []
        for one in rollouts:
            theirs = {}
            for name, reader in self.readers.items():
                sibling = best_sibling(one, groups[one.request.prompt], self.success[name])
                key = name, one.request.prompt, sibling and sibling.request.sample, one.feedback
                if key not in known:
                    known[key] = self._read(reader, one, sibling)
                ids = known[key]
                if ids is not None:
                    theirs[name] = ids
            found.append(replace(one, of_teachers=theirs) if theirs else one)
        return found

    def _read(self, reader: PromptReader, rollout: Rollout, sibling: Rollout | None) -> np.ndarray | None:
        prompt = self.prompts.prompts[rollout.request.prompt]
        made = {FEEDBACK: rollout.feedback or None}
        made[SIBLING] = None if sibling is None else self.tokenizer.decode(sibling.text_ids.tolist())
        assert prompt.asked is not None, "a reader that needs made values keeps what was asked"
        return reader.read_made(prompt.asked, prompt.fields, made)


def best_sibling(rollout: Rollout, group: Sequence[Rollout], success: float) -> Rollout | None:
    """Return the completion of `group` with the largest reward, the first of several, but not `rollout`.

    None if no other one has a reward of at least `success`.
    """
    others = [one for one in group if one is not rollout and one.reward is not None]
    best = max(others, key=lambda one: (one.reward, -one.request.sample), default=None)
    return best if best is not None and best.reward is not None and best.reward >= success else None
