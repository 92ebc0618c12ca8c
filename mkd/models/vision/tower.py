"""transformers' own vision modules, under their own names, as one child of a model's first part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mkd.families.vision import VISION_FAMILIES
from mkd.families.vision_shape import VisionShape
from mkd.models.vision.tower_attention import attend_varlen, find_varlen, pass_inputs
from mkd.parallel.image_row import Grid
from mkd.plan.models.model_shape import ModelShape

if TYPE_CHECKING:  # it loads the compiler, which models of text do not need
    from transformers import PreTrainedConfig, PreTrainedModel

MULTIPLE = 8  # of the channels of `AlignedMLP`
QWEN_TOWERS = MappingProxyType(  # family -> class of transformers
    {
        "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
        "qwen3_vl": "Qwen3VLVisionModel",
        "qwen3_vl_moe": "Qwen3VLMoeVisionModel",
        "qwen3_5": "Qwen3_5VisionModel",
        "qwen3_5_moe": "Qwen3_5MoeVisionModel",
    }
)


class VisionTower(nn.Module):
    """Tower and projector of one model: pixels in, features as wide as the text out.

    It is frozen until `train_parts`. Parameters have `dtype`; buffers stay fp32, as the angles of positions
    need it.
    """

    def __init__(self, shape: ModelShape, dtype: torch.dtype, device: torch.device):
        from transformers import CONFIG_MAPPING  # it loads the compiler, which models of text do not need

        super().__init__()
        assert shape.vision is not None, "a model without images has no tower"
        self.shape = shape.vision
        config = CONFIG_MAPPING[self.shape.family].from_dict(dict(shape.hf_config))
        with device:  # transformers draws random weights, which takes a CPU seconds
            modules = _modules(self.shape.family, config)
        for name, module in modules.items():
            self.add_module(name, module)
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        self.to(device)
        self.requires_grad_(False).eval()
        self._positions = tile_positions(self.shape).to(device)
        varlen = None if self.shape.image_size else find_varlen(self.shape, dtype, device)
        if varlen is not None:
            attend_varlen(self.visual, varlen)
        if not self.shape.image_size:
            align_mlps(self.visual)

    def train_parts(self, parts: Collection[str]) -> None:
        """Train the named parts, `tower` and `projector`; all others stay frozen.

        The blocks of a trained tower are recomputed in the backward pass.
        """
        from transformers import PreTrainedModel

        projector = VISION_FAMILIES[self.shape.family].projector
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(("projector" if name.startswith(projector) else "tower") in parts)
        for module in self.children():
            if "tower" in parts and isinstance(module, PreTrainedModel):
                _recompute_blocks(module)

    @property
    def trained(self) -> list[nn.Parameter]:
        """Parameters that take a gradient."""
        return [one for one in self.parameters() if one.requires_grad]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def train(self, mode: bool = True) -> VisionTower:
        """Set the mode; a frozen tower stays in evaluation."""
        return super().train(mode and bool(self.trained))

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return the features of some images, [n, 1 + deepstack, h]; see `ImageRow` for the arguments."""
        if self.shape.image_size:
            return self.connector(self._tiles(pixels)).flatten(0, 1)[:, None]
        output = self.visual(pixels, **pass_inputs(self.visual, self.shape, grids, pixels.device))
        further = output.deepstack_features if self.shape.deepstack else []
        return torch.stack([output.pooler_output, *further], dim=1)

    def _tiles(self, pixels: Tensor) -> Tensor:
        """Return the features of the patches of whole tiles [n, patches, width].

        transformers' module would read back from the device that tiles are whole, in every pass, and some
        versions of it round positions to bf16.
        """
        model = self.vision_model
        patches = model.embeddings.patch_embedding(pixels).flatten(2).transpose(1, 2)
        hidden = patches + model.embeddings.position_embedding(self._positions)
        hidden = model.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        return model.post_layernorm(hidden)


def tile_positions(shape: VisionShape) -> Tensor:
    """Return the number of the learned position of each patch of a tile, int64 [patches]; empty for Qwen's.

    They are those of transformers in fp32, whose rounding repeats some where the side is not a power of two.
    """
    side = shape.image_size // shape.patch_size
    if not side:
        return torch.zeros(0, dtype=torch.int64)
    at = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    bucket = torch.bucketize(at, torch.arange(1 / side, 1.0, 1 / side), right=True)
    return (bucket[:, None] * side + bucket).flatten()


def _recompute_blocks(module: PreTrainedModel) -> None:
    """Let transformers recompute the module's blocks; newer versions call the method otherwise."""
    newer = getattr(module, "activation_checkpointing_enable", None)
    (newer or module.gradient_checkpointing_enable)({"use_reentrant": False})


def _modules(family: str, config: PreTrainedConfig) -> dict[str, nn.Module]:
    """Return name -> module of a family, with random weights."""
    if family in QWEN_TOWERS:
        module = import_module(f"transformers.models.{family}.modeling_{family}")
        return {"visual": getattr(module, QWEN_TOWERS[family])._from_config(config.vision_config)}
    if family == "idefics3":
        from transformers.models.idefics3.modeling_idefics3 import (
            Idefics3Connector,
            Idefics3VisionTransformer,
        )

        tower, connector = Idefics3VisionTransformer, Idefics3Connector
    else:
        from transformers.models.smolvlm.modeling_smolvlm import SmolVLMConnector, SmolVLMVisionTransformer

        tower, connector = SmolVLMVisionTransformer, SmolVLMConnector
    return {"vision_model": tower._from_config(config.vision_config), "connector": connector(config)}


class AlignedMLP(nn.Module):
    """transformers' gated MLP, `down(act(gate(x)) * up(x))`, with channels of zeros up to a multiple of 8.

    Rows of 8 half-precision channels are what tensor cores read at once; a product of another width takes a
    slower kernel. Qwen2.5-VL's towers have 3,420 channels. The modules and their names stay as they are:
    zeros are appended in each pass, which copies the weights once for a whole micro-batch.
    """

    def __init__(self, mlp: Any):
        super().__init__()
        self.gate_proj: nn.Linear = mlp.gate_proj
        self.up_proj: nn.Linear = mlp.up_proj
        self.down_proj: nn.Linear = mlp.down_proj
        self.act_fn: nn.Module = mlp.act_fn
        self.added = -self.down_proj.in_features % MULTIPLE

    def forward(self, hidden_state: Tensor) -> Tensor:
        """Map patches [n, h] to [n, h], in the weights' dtype.

        Zeros in both factors give zeros, which the last product ignores.
        """
        gate, up = (self._wider(module, hidden_state) for module in (self.gate_proj, self.up_proj))
        weight = F.pad(self.down_proj.weight, (0, self.added))
        return F.linear(self.act_fn(gate) * up, weight, self.down_proj.bias)

    def _wider(self, linear: nn.Linear, hidden_state: Tensor) -> Tensor:
        bias = None if linear.bias is None else F.pad(linear.bias, (0, self.added))
        return F.linear(hidden_state, F.pad(linear.weight, (0, 0, 0, self.added)), bias)


def align_mlps(visual: Any) -> None:
    """Give the blocks of transformers' tower aligned MLPs, where theirs are gated and of another width."""
    for block in visual.blocks:
        down = getattr(block.mlp, "down_proj", None)
        if down is not None and down.in_features % MULTIPLE:
            block.mlp = AlignedMLP(block.mlp)
