"""Two models of transformers on one text, outside a run: KL, top-1 agreement, perplexities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.convert.reference_model import one_expert_at_a_time
from mkd.data.batch import PackedBatch
from mkd.data.measured_text import TimedBatches, read_batches
from mkd.errors import CheckpointError, UsageError, first_line
from mkd.losses import DistillationLoss, LMHead
from mkd.progress_bars import without_progress_bars
from mkd.tokenizers.load import open_tokenizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BATCH_TOKENS = {"cuda": 8192, "cpu": 2048}  # of a batch with its padding


@dataclass(frozen=True)
class ComparisonRequest:
    """Two Hugging Face folders or hub ids, and the text to compare them on."""

    a: str
    b: str
    text: tuple[str, ...]  # files of records
    num_tokens: int
    seq_length: int
    dtype: str | None = None  # bf16 or fp32; None: bf16 on a GPU, fp32 on a CPU


@dataclass(frozen=True)
class ModelComparison:
    """Means over the loss tokens, nats per token."""

    num_tokens: int
    ce_a: float
    ce_b: float
    kl_a_b: float  # KL(A || B), over the ids that both models have
    kl_b_a: float
    top1_agreement: float  # share of tokens whose most likely id is the same in both models

    def as_dict(self) -> dict[str, float]:
        """Return all figures by name, with both perplexities."""
        return asdict(self) | dict(perplexity_a=math.exp(self.ce_a), perplexity_b=math.exp(self.ce_b))

    def lines(self) -> list[str]:
        """Return the figures for people."""
        rows = [
            ("", "A", "B", "B - A"),
            ("cross entropy, nats per token", *_three(self.ce_a, self.ce_b)),
            ("perplexity", *_three(math.exp(self.ce_a), math.exp(self.ce_b))),
            ("KL(A || B), nats per token", f"{self.kl_a_b:.6g}", "", ""),
            ("KL(B || A), nats per token", f"{self.kl_b_a:.6g}", "", ""),
            ("top-1 agreement", f"{self.top1_agreement:.4f}", "", ""),
        ]
        first, *others = ([len(row[index]) for row in rows] for index in range(4))
        widths = [max(first), *map(max, others)]
        cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
        return ["  ".join(line).rstrip() for line in cells]


def _three(a: float, b: float) -> tuple[str, str, str]:
    return f"{a:.6g}", f"{b:.6g}", f"{b - a:+.4g}"


def compare_models(
    request: ComparisonRequest, device: torch.device, say: Callable[[str], None]
) -> ModelComparison:
    """Run both models over the text. `say` gets lines of progress.

    Raises CheckpointError for a model that transformers cannot load, UsageError if the models read different
    tokens, and DataError for a text that cannot be read.
    """
    folders = resolve_hf(request.a), resolve_hf(request.b)
    pieces = _same_pieces(request, folders)
    batches = [*grouped_by_length(pieces, BATCH_TOKENS["cuda" if device.type == "cuda" else "cpu"])]
    dtype = DTYPES[request.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    models = [ComparedModel.load(folder, dtype, device) for folder in folders]
    example = _sequences(batches[0])["input_ids"][:1, :8].to(device)
    with_heads = all([model.find_head(example) for model in models])
    if not with_heads:
        say("a model changes its logits in a way that mkd does not know: all logits are made")
    settings: dict[str, Any] = dict(kd_ratio=1.0, with_ce_metric=True, reduction="sum", fp32_logits=True)
    loss = DistillationLoss("forward_kl", **settings)
    sums = torch.zeros(5, dtype=torch.float64)
    count = 0
    with torch.no_grad():
        for batch in TimedBatches(batches, say):
            inputs = {name: value.to(device) for name, value in _sequences(batch).items()}
            targets = inputs.pop("targets")
            states = [model.states(inputs, with_heads) for model in models]
            heads = [model.head if with_heads else None for model in models]
            forward, backward = (  # B after A, A after B
                loss(
                    states[student],
                    states[teacher],
                    shift_labels=targets,
                    student_head=heads[student],
                    teacher_head=heads[teacher],
                )
                for student, teacher in ((1, 0), (0, 1))
            )
            values = backward.ce, forward.ce, forward.kd, backward.kd, forward.top1_agreement
            sums += torch.stack(values).double().cpu()
            count += int(forward.num_loss_tokens)
    return ModelComparison(count, *(sums / count).tolist())


@dataclass
class ComparedModel:
    """A frozen model of transformers."""

    model: nn.Module
    head: LMHead | None = None  # None: not known
    base: nn.Module | None = None  # the model without its head; None: not known

    @classmethod
    @without_progress_bars()
    def load(cls, folder: Path, dtype: torch.dtype, device: torch.device) -> ComparedModel:
        """Load a folder. Raises CheckpointError if transformers cannot."""
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            sees_images = getattr(config, "vision_config", None) is not None
            loader = AutoModelForImageTextToText if sees_images else AutoModelForCausalLM
            model = loader.from_pretrained(folder, dtype=dtype, trust_remote_code=False, use_safetensors=True)
        except Exception as error:  # some checks of transformers raise errors of their own classes
            raise CheckpointError(
                f"transformers cannot load {folder}",
                first_line(error),
                "name a folder with config.json and *.safetensors of a language model",
                code="model-config-not-valid",
            ) from error
        one_expert_at_a_time(model)
        return cls(model.eval().requires_grad_(False).to(device))

    def find_head(self, example: Tensor) -> bool:
        """Return True if the model's logits are those of its head, tried on `example` [1, t]."""
        try:
            head = LMHead.from_transformers(self.model)
            head.require_logits(self.model, input_ids=example)
        except UsageError:
            return False
        self.head = head
        base = getattr(self.model, "base_model", self.model)
        if base is not self.model:
            whole = self.model(input_ids=example, output_hidden_states=True).hidden_states[-1]
            own = getattr(base(input_ids=example), "last_hidden_state", None)
            most = 8 * torch.finfo(whole.dtype).eps * float(whole.abs().max())
            is_same = own is not None and float((own - whole).abs().max()) <= most
            self.base = base if is_same else None
        return True

    def states(self, inputs: dict[str, Tensor], with_head: bool) -> Tensor:
        """Return the last hidden states [k, t, h], or the logits [k, t, v] without a head."""
        if not with_head:
            return self.model(**inputs, use_cache=False).logits
        if self.base is not None:
            return self.base(**inputs, use_cache=False).last_hidden_state
        more = dict(logits_to_keep=1, output_hidden_states=True)  # those of all layers
        return self.model(**inputs, use_cache=False, **more).hidden_states[-1]


def _same_pieces(request: ComparisonRequest, folders: Sequence[Path]) -> list[PackedBatch]:
    """Return the text in the tokens of both models, a piece of a document each.

    Raises UsageError if they differ.
    """
    ours, theirs = (
        read_batches(
            request.text,
            open_tokenizer(str(folder)),
            num_tokens=request.num_tokens,
            seq_length=request.seq_length,
            batch_tokens=1,  # each piece is a batch
            least=1,
        )
        for folder in folders
    )
    pairs = zip(ours, theirs, strict=False)
    names = ("tokens", "labels", "loss_mask")
    is_same = len(ours) == len(theirs) and all(
        torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in names
    )
    if not is_same:
        raise UsageError(
            f"{request.a} and {request.b} read this text in different tokens",
            "KL and top-1 agreement compare predictions of the same next token",
            "compare models with one tokenizer and chat template, or use `mkd evaluate` for each: its "
            "bits per byte hold between tokenizers",
            code="tokenizers-differ",
        )
    return ours


def grouped_by_length(pieces: Sequence[PackedBatch], most_tokens: int) -> Iterator[list[PackedBatch]]:
    """Yield all pieces, the longest first, in groups of at most `most_tokens` with padding.

    A group has the tokens of its longest piece in every row. A longer piece is a group of its own.
    """
    group: list[PackedBatch] = []
    for piece in sorted(pieces, key=lambda piece: -piece.max_seqlen):
        if group and (len(group) + 1) * group[0].max_seqlen > most_tokens:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _sequences(pieces: Sequence[PackedBatch]) -> dict[str, Tensor]:
    """Return `input_ids`, `attention_mask` and `targets` (-100 without loss), [k, t]: a row a piece."""
    shape = len(pieces), max(piece.max_seqlen for piece in pieces)
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    targets = torch.full(shape, -100)
    for row, piece in enumerate(pieces):
        length = piece.max_seqlen
        ids[row, :length] = piece.tokens[0]
        targets[row, :length] = torch.where(piece.loss_mask[0] != 0, piece.labels[0], -100)
        mask[row, :length] = 1
    return dict(input_ids=ids, attention_mask=mask, targets=targets)
