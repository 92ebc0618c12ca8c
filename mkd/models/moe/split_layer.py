"""A decoder layer with experts that can run in three parts: before, in and after its experts."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from mkd.models.packed import PackedDocuments


class SplitLayer(TransformerLayer):
    """Megatron's layer. The three parts together compute what `forward` does.

    Hooks of the layer do not run in parts, and nothing is recomputed.
    """

    def before_experts(
        self,
        hidden: Tensor,  # [t(/tp), 1, h]
        angles: Tensor | None,
        packed: PackedDocuments,
    ) -> dict[str, Tensor]:
        """Run attention and the router.

        Return the residual stream "hidden" and its norm "normed", both [t(/tp), 1, h]; of each token's
        experts the "weights" fp32 [t(/tp), E] and the choice "selected", bool [t(/tp), E]; and, if there are
        shared experts, their output "shared", [t(/tp), 1, h].
        """
        assert not self.recompute_pre_mlp_layernorm, "the norm would be computed again after the experts"
        hidden, _ = self._forward_attention(
            hidden_states=hidden, attention_mask=None, rotary_pos_emb=angles, packed_seq_params=packed
        )
        normed = self._forward_pre_mlp_layernorm(hidden)
        shared = self.mlp.shared_output(normed)
        documents = packed.documents_of_tokens if self.training else None
        weights, selected = self.mlp.router(normed, documents)
        found = {"hidden": hidden, "normed": normed, "weights": weights, "selected": selected}
        return found if shared is None else found | {"shared": shared}

    def after_experts(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the layer's output [t(/tp), 1, h] from "hidden", "routed" and, if there is one, "shared"."""
        output = tensors["routed"]
        if "shared" in tensors:
            output = output + tensors["shared"]
        return self._forward_post_mlp((output, None), tensors["hidden"])
