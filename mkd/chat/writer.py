"""A model that completes prompts outside a run, with the sampler of rollouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mkd.chat.generation import Generation
from mkd.chat.named_model import ModelsRequest
from mkd.checkpoint.folders import iteration_of
from mkd.data.prompt_readers import encode_prompt
from mkd.errors import DataError, ErrorList, MkdError
from mkd.kinds.sampled.sampler.decoding import SampledRow, stream_completions
from mkd.kinds.sampled.sampler.rollouts import Request, Sampling
from mkd.kinds.sampled.stop_ids import stop_ids
from mkd.models.language_model import LanguageModel
from mkd.parallel.context import ParallelContext
from mkd.platform import Platform
from mkd.resolve.model_source import ModelSource
from mkd.run.one_model import ModelPlan, plan_model
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.load import open_tokenizer
from mkd.tokenizers.tokenizer import Tokenizer

STUDENT, TEACHER = "student", "teacher"


@dataclass(frozen=True)
class Reader:
    """A model without its weights: its tokenizer, and what it can read."""

    role: str  # student or teacher
    plan: ModelPlan
    tokenizer: Tokenizer
    stops: frozenset[int]  # ids that end a completion

    @property
    def source(self) -> ModelSource:
        """Files of the model."""
        return self.plan.source

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt with its completion."""
        return self.source.shape.max_position_embeddings

    @cached_property
    def unused_ids(self) -> frozenset[int]:
        """Rows of the model without a token, which are never sampled."""
        return frozenset(range(self.source.shape.vocab_size)).difference(self.tokenizer.vocabulary.values())

    def describe(self) -> str:
        """Return where the weights are from, how many tokens fit, and what is left out, for people."""
        load, shape = self.source.load, self.source.shape
        place = str(self.source.assets) if load is None else f"{load}, iteration {iteration_of(load)}"
        images = "; it sees images, but reads only text here" if shape.vision is not None else ""
        return f"{place} (context of {self.context_length} tokens{images})"

    def sampling(self, generation: Generation) -> Sampling:
        """Return the settings of sampling from the model."""
        return Sampling(
            max_new_tokens=generation.max_new_tokens,
            stop_ids=self.stops,
            vocab_size=self.source.shape.vocab_size,
            unused_ids=self.unused_ids,
            temperature=generation.temperature,
            top_p=generation.top_p,
            seed=generation.seed,
            slots=generation.slots,
            context_length=self.context_length,
        )

    def encode(self, prompt: str | Conversation) -> np.ndarray:
        """Return the tokens int64 [p] of a prompt. Raises DataError if it is empty or fills the context."""
        ids = encode_prompt(prompt, self.tokenizer)
        if not len(ids):
            raise DataError(
                "the prompt is empty", "there is nothing to complete", "write some text", code="record-empty"
            )
        if len(ids) >= self.context_length:
            raise DataError(
                f"the prompt has {len(ids)} tokens, and the context of the {self.role} is "
                f"{self.context_length}",
                "prompt and completion must fit the context (max_position_embeddings of config.json)",
                "shorten or remove the prompt; in a chat start a new conversation with /new",
                code="longer-than-seq-length",
            )
        beyond = int(ids.max())
        if beyond >= self.source.shape.vocab_size:
            raise DataError(
                f"the prompt has id {beyond}, and the {self.role} has {self.source.shape.vocab_size}",
                "the model has no embedding for it",
                "use the tokenizer of the model",
                code="token-beyond-vocabulary",
            )
        return ids


@dataclass(frozen=True)
class Writer(Reader):
    """A model with its weights on this rank."""

    context: ParallelContext
    parts: Sequence[LanguageModel]

    def stream(self, requests: Sequence[Request], generation: Generation) -> Iterator[SampledRow]:
        """Complete the requests; yield the new tokens of each row as they arrive. Collective."""
        return stream_completions(self.parts, self.context, requests, self.sampling(generation), iteration=0)


def open_readers(request: ModelsRequest, is_cuda: bool, num_ranks: int) -> list[Reader]:
    """Return the student, and the teacher if there is one, without reading weights.

    Raises one ErrorList for problems of the models, and UsageError for a tokenizer that cannot be loaded.
    """
    config = request.config(num_ranks, is_cuda)
    problems: list[MkdError] = []
    plans = [plan_model(problems, config, num_ranks)]
    plans += [plan_model(problems, config, num_ranks, teacher=0)] if request.teacher else []
    if problems:
        raise ErrorList(problems)
    named = (request.tokenizer_model, None)
    return [
        reader_of(role, plan, open_tokenizer(name or plan.source.assets, request.chat))
        for role, plan, name in zip((STUDENT, TEACHER), plans, named, strict=False)
        if plan is not None
    ]


def reader_of(role: str, plan: ModelPlan, tokenizer: Tokenizer) -> Reader:
    """Return the planned model, which ends texts where its files or its chat template say."""
    stops = stop_ids(plan.source.assets, tokenizer)
    if tokenizer.has_chat_template:  # base models list only the end of a document
        stops |= {one for name, one in tokenizer.roles.items() if name == "end_of_turn"}
    return Reader(role, plan, tokenizer, stops)


def load_writers(readers: Sequence[Reader], platform: Platform) -> list[Writer]:
    """Join the process group and load the models. Collective."""
    context = readers[0].plan.join(platform)
    return [writer_of(one, context) for one in readers]


def writer_of(reader: Reader, context: ParallelContext) -> Writer:
    """Load the model's weights. Collective."""
    parts = reader.plan.build(context)
    for part in parts:
        part.requires_grad_(False)
    return Writer(reader.role, reader.plan, reader.tokenizer, reader.stops, context, parts)


def require_chat(readers: Sequence[Reader]) -> None:
    """Raise DataError if a model has no chat template."""
    for one in readers:
        if not one.tokenizer.has_chat_template:
            raise DataError(
                f"the {one.role} {one.source.assets} has no chat template",
                "it says how the messages of a conversation become tokens; base models have none",
                "let it complete text with `mkd sample --prompt TEXT`, or put a chat_template into its "
                "tokenizer_config.json",
                code="chat-template-missing",
            )


def as_conversation(text: str, system: str | None) -> Conversation:
    """Return the conversation of one message by a user."""
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation([*messages, {"role": "user", "content": text}])


def with_system(prompt: Conversation, system: str | None) -> Conversation:
    """Return a conversation that begins with the system message, unless it has one."""
    if not system or any(one["role"] == "system" for one in prompt.messages):
        return prompt
    loss = [None, *prompt.loss] if prompt.loss else ()
    return replace(prompt, messages=[{"role": "system", "content": system}, *prompt.messages], loss=loss)
