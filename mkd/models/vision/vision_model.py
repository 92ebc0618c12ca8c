"""`VisionLanguageModel`: one part of a model with images."""

from __future__ import annotations

from dataclasses import replace

import torch
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mkd.models.language_model import LanguageModel
from mkd.models.packed import PackedDocuments
from mkd.models.vision.features import mark_tower, row_features
from mkd.models.vision.tower import VisionTower
from mkd.parallel.image_row import ImageRow


class VisionLanguageModel(LanguageModel):
    """A model part whose first stage puts the features of images in the place of image tokens.

    `tower` is a `VisionTower` on the first part, None on the others.
    """

    tower: VisionTower | None

    def _build_modules(self, spec: TransformerBlockSubmodules, vocab_size: int) -> None:
        """Build the tower first: its gradients come last, and DDP reduces parameters from the last on."""
        vision = self.shape.vision
        assert vision is not None, "the model reads images"
        self.tower = None
        if self.pre_process:
            assert len(spec.layer_specs) >= vision.deepstack, "the plan checks the first part's layers"
            self.tower = VisionTower(self.shape, self.config.params_dtype, self.context.device)
            mark_tower(self.tower, self.config.sequence_parallel)
        super()._build_modules(spec, vocab_size)

    def forward(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        packed_seq_params: PackedDocuments,
        images: ImageRow | None = None,  # None: a row of text alone
    ) -> Tensor:
        """Run this part on one pack, as `LanguageModel.forward` does."""
        positions = position_ids.expand(3, -1)  # of text: all three count the tokens of a document
        if images is not None and images.positions is not None:
            positions = self._own_rows(images.positions, packed_seq_params)
        rows = None if images is None else images.rows
        packed_seq_params = replace(packed_seq_params, positions=positions, image_rows=rows)
        if self.tower is None:
            return self._decoded(None, tokens, packed_seq_params)
        size = self.config.hidden_size, self.config.params_dtype
        # Before the embedding, as the parameters: DDP gathers and reduces them in this order.
        features = row_features(self.tower, images, *size, self.context)
        hidden = self._embedded(tokens, position_ids)
        if features.requires_grad or len(features):
            rows = torch.zeros(0, dtype=torch.int64, device=tokens.device) if images is None else images.rows
            assert hidden is not None, "this part has the embedding"
            hidden = hidden.index_put((rows,), features[:, :1])
        has_further = self.tower.shape.deepstack and images is not None and images.slots
        return self._decoded(hidden, tokens, packed_seq_params, features[:, 1:] if has_further else None)

    def _own_rows(self, positions: Tensor, packed: PackedDocuments) -> Tensor:
        """Return the columns of `positions` [3, t] of the rows on this context-parallel rank."""
        shard = self.context.row_shard
        return positions if shard.is_whole else positions[:, shard.rows(packed.cu_seqlens_q_padded)]
