"""Distillation steps that a user would write or install instead of mkd: transformers, Liger, TRL.

Every arm has its own optimizer over one shared student, random weights equal to those of the engine, and
learning rate 0, as the engine has it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tools.benchmarks import peers
from tools.benchmarks.machine import Machine
from tools.benchmarks.random_engine import RandomCheckpoint
from tools.benchmarks.shapes import config_of, shape_of

ADAM = dict(lr=0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)


@dataclass(frozen=True)
class Pair:
    """A student and a frozen teacher of transformers, on the device, in the benchmark's dtype."""

    student: nn.Module
    teacher: nn.Module


@dataclass(frozen=True)
class Rows:
    """A batch as transformers takes it."""

    input_ids: Tensor  # [b, s] int64
    labels: Tensor  # [b, s] int64, the token's own id (transformers shifts), IGNORED where it has no loss
    attention_mask: Tensor | None  # [b, s] int64; None for packs
    position_ids: Tensor | None  # [b, s] int64, from 0 in every document; None for padded rows

    def inputs(self) -> dict[str, Tensor]:
        """Return what the model's forward takes."""
        named = dict(
            input_ids=self.input_ids, attention_mask=self.attention_mask, position_ids=self.position_ids
        )
        return {name: value for name, value in named.items() if value is not None}


def hf_model(name: str, machine: Machine) -> nn.Module:
    """Build the transformers model of a benchmark shape, with the engine's random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = config_of(name)
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=machine.dtype, attn_implementation="sdpa")
    model.to_empty(device=machine.device)
    model.tie_weights()  # undone by to_empty
    weights = RandomCheckpoint(shape_of(name), machine.device)
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            parameter.copy_(weights.read(tensor, (slice(None),) * parameter.dim()))
    rotary = model.model.rotary_emb  # its buffers are not weights, and came off the meta device empty
    model.model.rotary_emb = type(rotary)(config=config).to(machine.device)
    model.config.use_cache = False
    return model


def build_pair(student: str, teacher: str, machine: Machine) -> Pair:
    """Build both models; the teacher takes no gradients."""
    pair = Pair(hf_model(student, machine).train(), hf_model(teacher, machine).eval())
    pair.teacher.requires_grad_(False)
    return pair


def padded_rows(documents: Sequence[np.ndarray], batch_size: int, device: torch.device) -> list[Rows]:
    """Make batches of `batch_size` documents in their order, padded to the longest."""
    batches = []
    for first in range(0, len(documents), batch_size):
        members = documents[first : first + batch_size]
        shape = len(members), max(map(len, members))
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for row, document in enumerate(members):
            ids[row, : len(document)], mask[row, : len(document)] = document, 1
        labels = np.where(mask == 1, ids, peers.IGNORED)
        batches.append(Rows(*(torch.from_numpy(part).to(device) for part in (ids, labels, mask)), None))
    return batches


def packed_rows(packs: Iterable[Sequence[np.ndarray]], device: torch.device) -> list[Rows]:
    """Lay the documents of every pack out in one row; a document's first token is nobody's label."""
    batches = []
    for pack in packs:
        labels = [np.concatenate([[peers.IGNORED], document[1:]]) for document in pack]
        positions = [np.arange(len(document)) for document in pack]
        ids, labels, positions = (
            torch.from_numpy(np.concatenate(part)[None]).to(device) for part in (pack, labels, positions)
        )
        batches.append(Rows(ids, labels, None, positions))
    return batches


Loss = Callable[[Pair, Rows], Tensor]
"""Sum of the forward KL over the loss tokens of one batch, with its graph."""


def eager_kl(pair: Pair, rows: Rows) -> Tensor:
    """Compute the KL as most scripts do: fp32 log-softmax of both models' logits, over the loss tokens."""
    with torch.no_grad():
        teacher = pair.teacher(**rows.inputs()).logits
    student = pair.student(**rows.inputs()).logits
    mask = rows.labels[:, 1:] != peers.IGNORED
    student, teacher = (logits[:, :-1][mask].float().log_softmax(-1) for logits in (student, teacher))
    return nn.functional.kl_div(student, teacher, reduction="sum", log_target=True)


def liger_kl(chunk_size: int, compiled: bool) -> Loss:
    """Compute hidden states by the models' bodies and the KL by Liger's chunked head."""
    head = peers.liger_chunked_jsd(0.0, chunk_size, compiled)

    def loss(pair: Pair, rows: Rows) -> Tensor:
        with torch.no_grad():
            teacher = pair.teacher.model(**rows.inputs()).last_hidden_state
        student = pair.student.model(**rows.inputs()).last_hidden_state
        labels = nn.functional.pad(rows.labels[:, 1:], (0, 1), value=peers.IGNORED).flatten()
        keep = labels != peers.IGNORED
        flat = [hidden.flatten(0, 1)[keep] for hidden in (student, teacher)]
        mean = head(flat[0], pair.student.lm_head.weight, flat[1], pair.teacher.lm_head.weight, labels[keep])
        return mean * keep.sum()

    return loss


Step = Callable[[], tuple[float, float]]
"""Train on all documents and return the mean loss and the gradients' norm."""


def loop_step(pair: Pair, batches: Sequence[Rows], loss: Loss, num_loss_tokens: int) -> Step:
    """Return the step of a plain training loop."""
    optimizer = torch.optim.AdamW(pair.student.parameters(), fused=pair.student.device.type == "cuda", **ADAM)

    def step() -> tuple[float, float]:
        total = torch.zeros((), device=pair.student.device)
        for rows in batches:
            part = loss(pair, rows) / num_loss_tokens
            part.backward()
            total += part.detach()
        norm = nn.utils.clip_grad_norm_(pair.student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total), float(norm)

    return step


def trl_step(pair: Pair, batches: Sequence[Rows], num_loss_tokens: int, bf16: bool) -> Step:
    """Return a step of TRL's GKDTrainer on stored data: its own training_step per batch, then its optimizer.

    Raises PeerMissing if TRL or what it needs is not installed.
    """
    try:
        from datasets import Dataset
        from trl.experimental.gkd import GKDConfig, GKDTrainer
    except ImportError as error:
        raise peers.PeerMissing(f"TRL's GKDTrainer: {error}, skipped") from error
    settings = dict(lmbda=0.0, beta=0.0, bf16=bf16, learning_rate=0.0, report_to=[], max_grad_norm=1.0)
    settings |= dict(gradient_accumulation_steps=len(batches), use_cpu=pair.student.device.type == "cpu")
    settings |= dict(gradient_checkpointing=False, optim="adamw_torch_fused", save_strategy="no")
    arguments = GKDConfig(output_dir=tempfile.mkdtemp(), **settings)
    rows = Dataset.from_list([{"input_ids": [0, 1]}])
    trainer = GKDTrainer(
        pair.student, pair.teacher, args=arguments, train_dataset=rows, processing_class=_tokenizer(),
        data_collator=lambda rows: rows,
    )  # fmt: skip
    trainer.create_optimizer()
    model, optimizer = trainer.accelerator.prepare(pair.student, trainer.optimizer)
    trainer.current_gradient_accumulation_steps = len(batches)
    models = pair.student, pair.teacher
    # accelerate has put a forward with autocast and fp32 logits into both: it is for this arm alone.
    forwards = [vars(one).pop("forward", None) for one in models]
    count = torch.tensor(num_loss_tokens, device=pair.student.device)

    def step() -> tuple[float, float]:
        total = 0.0
        with _with_forwards(models, forwards):
            for one in batches:
                inputs = dict(input_ids=one.input_ids, labels=one.labels, attention_mask=one.attention_mask)
                total += trainer.training_step(model, inputs, num_items_in_batch=count)
        norm = trainer.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(total), float(norm)

    return step


@contextmanager
def _with_forwards(models: Sequence[nn.Module], forwards: Sequence[Callable | None]) -> Iterator[None]:
    """Give each model its `forward`, where it is not None, for the duration of the block."""
    for one, forward in zip(models, forwards, strict=True):
        if forward is not None:
            one.forward = forward
    try:
        yield
    finally:
        for one in models:
            vars(one).pop("forward", None)


def _tokenizer():
    """Return a tokenizer of three words: the trainer asks for one, and reads only its special tokens."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
