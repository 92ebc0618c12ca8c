"""mkd's model for lm-evaluation-harness: the harness's own adapter for transformers, with mkd's logits.

Tokens, batches, windows and scores are those of that adapter, so that figures can be compared.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mkd.checkpoint.adapters import require_whole_model
from mkd.checkpoint.distributed import TrainingState, load_checkpoint
from mkd.checkpoint.hf.hf_hub import resolve_hf
from mkd.checkpoint.rounded_runs import require_exact_model
from mkd.convert.conversion_checks import locate
from mkd.convert.models import DTYPES, build_model, load_from_hf
from mkd.convert.parity import packed_logits
from mkd.errors import UsageError
from mkd.models.language_model import LanguageModel
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.platform import detect


@dataclass
class ScoredModel:
    """A model of one process, as the harness's adapter uses it."""

    model: LanguageModel
    device: torch.device
    config: Any = None  # as transformers reads it: it has the length of the context

    @classmethod
    def load(cls, folder: Path, checkpoint: Path | None, step: int | None, dtype: str) -> ScoredModel:
        """Load a folder's weights, or those of a checkpoint of the same model.

        `dtype` is fp32, bf16, or auto: bf16 on a GPU, else fp32.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            what, why = (
                "the model mkd runs in one process, and torchrun has started several",
                "all do the same",
            )
            raise UsageError(what, why, "run it without torchrun", code="number-of-processes")
        context, shape = ParallelContext.create(detect()), ModelShape.from_hf_dir(folder)
        chosen = DTYPES.get(dtype, torch.bfloat16 if context.device.type == "cuda" else torch.float32)
        if checkpoint is None:
            return cls(load_from_hf(folder, shape, chosen, context), context.device)
        place, _ = locate(checkpoint, step, str(folder))
        require_whole_model(place)
        require_exact_model(place)
        model = build_model(shape, chosen, context)
        load_checkpoint(place, TrainingState([model]), context)
        return cls(model, context.device)

    def to(self, _: torch.device) -> ScoredModel:
        """Return the model, which is on its device."""
        return self

    def logits(self, ids: Tensor) -> Tensor:
        """Return logits [b, n, v] fp32 of sequences [b, n] int64, all of them documents of one pack."""
        return packed_logits(self.model, [*ids.cpu()], self.device).view(*ids.shape, -1)


def model_class() -> type:
    """Return the class for the harness, which must be installed."""
    from lm_eval.models.huggingface import HFLM

    class MkdModel(HFLM):
        """Score requests with mkd's model."""

        def __init__(
            self, pretrained: str, load: str | None = None, ckpt_step: int | None = None, **rest: Any
        ) -> None:
            """`pretrained`: folder or hub id, with the tokenizer. `load`: checkpoint with the weights."""
            self._checkpoint = Path(load) if load else None
            self._step = ckpt_step
            super().__init__(str(resolve_hf(pretrained)), **rest)

        def _create_model(self, pretrained: str, dtype: str = "auto", **_: Any) -> None:
            self._model = ScoredModel.load(Path(pretrained), self._checkpoint, self._step, dtype)
            self._model.config = self.config
            self._device = self._model.device

        def _model_call(
            self, inps: Tensor, attn_mask: Tensor | None = None, labels: Tensor | None = None
        ) -> Tensor:
            return self._model.logits(inps)

        def _model_generate(self, *_: Any, **__: Any) -> Tensor:
            raise UsageError(
                "a task asks the model mkd to generate text",
                "it scores given answers alone",
                "export the student, and use --model hf or --model vllm for this task",
                code="model-feature-not-supported",
            )

        def get_model_info(self) -> dict[str, Any]:
            """Return nothing more than the harness knows."""
            return {}

    return MkdModel
