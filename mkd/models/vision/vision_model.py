"""`VisionLanguageModel`: one part of a model with images."""

from __future__ import annotations

from dataclasses import replace

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mkd.models.language_model import LanguageModel
from mkd.models.packed import PackedDocuments
from mkd.models.vision.features import mark_tower, row_features, with_zero_gradients
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
        if images is not None:
            fields = dict(positions=images.positions, image_rows=images.rows)
            packed_seq_params = replace(packed_seq_params, **fields)
        hidden, further = self._embedded(tokens, position_ids), None
        if hidden is not None:
            hidden, further = self._with_images(hidden, images)
        return self._decoded(hidden, tokens, packed_seq_params, further)

    def _with_images(self, hidden: Tensor, images: ImageRow | None) -> tuple[Tensor, Tensor | None]:
        """Return the embedding with features in their rows, and further features [n, deepstack, h].

        The latter are None without images or deepstack.
        """
        assert self.tower is not None, "the first part has the tower"
        if images is None or not images.slots:
            return with_zero_gradients(hidden, self.tower.trained), None
        features = row_features(self.tower, images, hidden.size(-1), hidden.dtype, self.context)
        hidden = hidden.index_put((images.rows,), features[:, :1])
        return hidden, features[:, 1:] if self.tower.shape.deepstack else None
