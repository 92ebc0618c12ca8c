"""The settings of a teacher that reads another prompt than the student."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import option

USER = "{prompt}\n\n{privileged_context}"


@dataclass(frozen=True)
class ContextConfig:
    """A prompt of the teacher's own. Both models then predict the same completion, token by token."""

    user: str = option(
        USER,
        "text of the last user message, or of the prompt of a record without messages, as the teacher reads "
        "it. {prompt} is the text that the student reads there, {KEY} the value of that key of the record. "
        "For completions of the student {feedback} is what --reward says about one, and {sibling} the best "
        "other completion of its prompt. Write {{ and }} for braces",
        flag=False,
    )
    fallbacks: tuple[str, ...] = option(
        (),
        "texts that take the place of `user` where a value for one of its fields is missing. The first one "
        "with all values counts",
        flag=False,
    )
    system: str | None = option(
        None,
        "system message that the teacher reads in place of the record's. It may have the same fields "
        "(default: the record's)",
        flag=False,
    )
    chat_template_kwargs: str | None = option(
        None,
        "variables of the chat template for the teacher's prompt, as a JSON object. They win over those of "
        "the record (default: those of the student)",
        flag=False,
    )
    missing: str = option(
        "error",
        "records without a context for the teacher. error: they are bad records. skip: this teacher does not "
        "teach them",
        choices=("error", "skip"),
        flag=False,
    )
    skip_first: int = option(
        0,
        "tokens at the beginning of every completion that this teacher does not teach, such as those that it "
        "would copy from the context",
        flag=False,
    )
    success: float = option(
        1.0,
        "smallest reward of a completion that other completions of its prompt have as {sibling}",
        flag=False,
    )
    seq_length: int | None = option(
        None,
        "tokens of the teacher's packs. A completion that does not fit is cut there "
        "(default: as many as the longest pack of the data needs)",
        flag=False,
    )

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts with fields."""
        return (self.user, *self.fallbacks, self.system or "")
