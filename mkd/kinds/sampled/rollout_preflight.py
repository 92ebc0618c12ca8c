"""Find problems of rollouts before processes meet: prompts, chat template, stop tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from mkd.data.files.named_files import require_files
from mkd.data.first_records import LOOKED_AT
from mkd.data.prompts import first_prompts
from mkd.errors import MkdError, UsageError, collect_error
from mkd.kinds.context.contexts import Contexts
from mkd.kinds.sampled.sources.known_sources import KNOWN_SOURCES
from mkd.kinds.sampled.stop_ids import require_tokens, stop_ids, unlisted_eos
from mkd.plan.facts import RunFacts
from mkd.resolve.model_source import ModelSource
from mkd.resolve.preflight import Tokenizers
from mkd.resolve.run_plan import Plan


def rollout_problems(
    facts: RunFacts,
    tokenizers: Tokenizers | None,
    student: ModelSource | None,  # None: reported before
    teachers: Sequence[ModelSource | None],
) -> list[MkdError]:
    """Return the problems of the prompts' first records, and of the tokens that end a completion."""
    problems: list[MkdError] = []
    config = facts.config
    if not config.rollout.is_on or not KNOWN_SOURCES[config.rollout.rollout_source].reads_prompts:
        return problems
    looked_at = max(LOOKED_AT, config.data.max_bad_records + 1)
    for path in config.rollout.prompt_data_path:
        collect_error(problems, partial(require_files, path, "--prompt-data-path"))
        if not problems and tokenizers is not None:
            readers = (tokenizers.student, *(one for one in tokenizers.teachers if one is not None))
            problems += first_prompts(path, readers, looked_at, Contexts().records(config).context)
    if student is not None and tokenizers is not None:
        found = collect_error(problems, lambda: [*_stop_problems(facts.roles, tokenizers, student, teachers)])
        problems += found or []
    return problems


def rollout_notes(plan: Plan) -> Iterator[str]:
    """Yield a note if completions end at other tokens than stored texts."""
    config, tokenizers = plan.config, plan.tokenizers
    samples = config.rollout.is_on and KNOWN_SOURCES[config.rollout.rollout_source].reads_prompts
    if samples and tokenizers is not None and config.data.append_eod:
        note = unlisted_eos(stop_ids(plan.student.assets, tokenizers.student), tokenizers.student)
        if note is not None:
            yield note


def _stop_problems(
    roles: Sequence[str],  # of the teachers
    tokenizers: Tokenizers,
    student: ModelSource,
    teachers: Sequence[ModelSource | None],
) -> Iterator[UsageError]:
    """Yield problems of stop tokens: completions must end where a teacher ends its texts."""
    mine = stop_ids(student.assets, tokenizers.student)
    if not mine:
        what = f"nothing says which token ends a text of the student ({student.assets})"
        why = "completions end at this token"
        do = "write eos_token_id into its generation_config.json"
        yield UsageError(what, why, do, code="stop-ids-not-valid")
        return
    shared = zip(teachers, tokenizers.teachers, strict=False)
    rows = [one.shape.vocab_size for one, own in shared if one is not None and own is None]
    require_tokens(mine, tokenizers.student, min([student.shape.vocab_size, *rows]), "student")
    for role, source, own in zip(roles, teachers, tokenizers.teachers, strict=False):
        if own is not None:
            if not own.roles.keys() & {"eos", "end_of_turn"}:
                what = f"the tokenizer of the {role} has no token that ends a text"
                why = "the student would never learn to stop from it, and its texts would grow without end"
                yield UsageError(
                    what, why, "name its eos_token in tokenizer_config.json", code="stop-ids-not-valid"
                )
            continue
        theirs = stop_ids(source.assets) if source is not None else frozenset()
        if source is not None:
            require_tokens(
                [one for one in theirs if one >= source.shape.vocab_size],
                tokenizers.student,
                source.shape.vocab_size,
                role,
            )
        if theirs - mine:
            yield UsageError(
                f"the {role} ends texts with {tokenizers.student.named(theirs - mine)}, but completions of "
                f"the student end only at {tokenizers.student.named(mine)}",
                "the student learns these ends from its teacher, but sampling would continue past them",
                f"write {sorted(mine | theirs)} as eos_token_id of the student's generation_config.json",
                code="stop-ids-not-valid",
            )
