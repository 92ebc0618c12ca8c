"""Builds the data sets of a run."""

from __future__ import annotations

from collections.abc import Sequence

from mkd.data.build import open_datasets
from mkd.errors import DataError, UsageError
from mkd.parallel.context import ParallelContext
from mkd.plan.batch import document_multiple
from mkd.tokenizers.hugging_face import has_tokenizer
from mkd.tokenizers.load import load_tokenizer
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.train.own_tokens import OwnTokens, cache_folder
from mkd.train.plan import ModelSource, Plan


def build_data(
    plan: Plan,
    context: ParallelContext,
    tokenizer: Tokenizer | None = None,  # of the student; None: as configured
    own_tokens: Sequence[OwnTokens | None] = (),  # of each teacher
):
    """(training set, held-out set or None); teachers without tokens of their own must read the same ids as the student."""
    data = plan.config.data
    tokenizer = tokenizer or load_tokenizer(data.tokenizer_type, data.tokenizer_model or str(plan.student.assets))
    for teacher in plan.same_vocabulary[1:]:
        require_same_tokenizer(tokenizer, teacher)
    train_set, valid_set = open_datasets(
        data_path=data.data_path,
        valid_data_path=data.valid_data_path,
        split=data.split,
        tokenizer=tokenizer,
        seq_length=plan.config.training.seq_length,
        document_multiple=document_multiple(context.cp_size),
        vocab_size=min(source.shape.vocab_size for source in plan.same_vocabulary),
        pack=data.pack,
        overlong=data.overlong,
        append_eod=data.append_eod,
        cache_dir=str(cache_folder(plan.config)),
        characters_per_sample=data.characters_per_sample,
        teachers=[own and own.text for own in own_tokens],
        is_builder=context.rank == 0,
        share=context.broadcast_object,
    )
    has_tasks = data.eval_multiple_choice or data.eval_completions
    if valid_set is None and plan.config.training.eval_interval and not has_tasks:
        raise DataError(
            f"there is no held-out document: --split {data.split} of {' '.join(data.data_path)} leaves none",
            "--eval-interval asks for evaluations",
            "give --valid-data-path, a larger second part of --split, or drop --eval-interval",
        )
    if plan.stored_teacher is not None:
        held_out = valid_set if plan.config.training.eval_interval else None
        train_set, valid_set = plan.stored_teacher.attach(train_set, held_out, tokenizer, context)
    return train_set, valid_set


def require_same_tokenizer(tokenizer: Tokenizer, teacher: ModelSource) -> None:
    """Refuse a teacher whose ids mean other strings: its logits would be compared with the wrong words."""
    if not has_tokenizer(teacher.assets):
        return  # nothing to compare: a teacher of bare weights is taken at its user's word
    difference = tokenizer.vocabulary_difference(load_tokenizer("HuggingFaceTokenizer", str(teacher.assets)))
    if difference is not None:
        raise UsageError(
            f"teacher {teacher.assets} has another tokenizer than the student: {difference}",
            "distillation compares the two models id by id",
            "use a teacher of the same tokenizer, or compare them on aligned text: --xtoken-loss partition_kl (`xtoken: {}`)",
        )
