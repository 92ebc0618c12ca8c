"""Qwen's towers without waiting for the host: indices from the host ahead, and attention in one call on GPUs.

transformers calls attention once for each image and window, and asks the device for their lengths in every
block. To an attention function with "flash" in its name it hands over the borders of all of them at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from mkd.families.vision_shape import VisionShape
from mkd.parallel.image_row import Grid

if TYPE_CHECKING:  # see tower.py
    from transformers import PreTrainedModel

NAME = "mkd_flash_varlen"
Varlen = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]
"""Attention of queries, keys and values [t, heads, d] between borders [n + 1]; then longest lengths."""


def attend_varlen(visual: PreTrainedModel, varlen: Varlen, name: str = NAME) -> None:
    """Let the tower's blocks attend by `varlen`, in one call for all images or windows of a pass.

    Change nothing with a version of transformers that would not hand over the borders under this name.
    """
    from transformers import AttentionInterface

    def attention(
        module: nn.Module,
        query: Tensor,  # [1, heads, t, d], as key and value
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        *,
        scaling: float,
        cu_seq_lens_q: Tensor,  # [n + 1] int32
        max_length_q: int,
        **_: Any,  # of keys the same; no dropout, no causal mask
    ) -> tuple[Tensor, None]:
        assert attention_mask is None and abs(scaling - query.shape[-1] ** -0.5) < 1e-6
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        return varlen(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)[None], None

    # Older versions compare the name with "flash_attention_2".
    is_flash = getattr(sys.modules[type(visual).__module__], "is_flash_attention_requested", None)
    if is_flash is not None and is_flash(requested_attention_implementation=name):
        AttentionInterface.register(name, attention)
        visual.config._attn_implementation = name


def find_varlen(shape: VisionShape, dtype: torch.dtype, device: torch.device) -> Varlen | None:
    """Return torch's varlen attention if it takes this tower; None on CPUs, in fp32, or with old versions."""
    head_dim = shape.hidden_size // shape.num_heads
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if head_dim % 8 or head_dim > 256 or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn


def pass_inputs(
    visual: PreTrainedModel, shape: VisionShape, grids: Sequence[Grid], device: torch.device
) -> dict[str, Any]:
    """Return the arguments of a pass over images of these grids, sent to the device without waiting for it.

    transformers would compute them from grids on the device, which the host would have to read back. Versions
    that cannot take them get the grids alone.
    """
    model = sys.modules[type(visual).__module__]
    if not hasattr(model, "get_vision_attention_seqlens"):  # before transformers 5.10 or so
        return {"grid_thw": torch.tensor(grids, device=device)}
    from transformers import vision_utils

    host = torch.tensor(grids)
    borders = vision_utils.get_vision_cu_seqlens(host)
    found: dict[str, Any] = {
        "cu_seqlens": borders,
        "position_ids": vision_utils.get_vision_position_ids(host, shape.merge),
    }
    longest = {"max_seqlen": int(borders.diff().max())}
    if shape.window_size:
        window = shape.window_size, shape.patch_size
        index, windows = vision_utils.get_vision_window_index(host, shape.merge, *window)
        found |= {"window_index": index, "cu_window_seqlens": windows}
        longest["max_window_seqlen"] = int(windows.diff().max())
    if shape.num_positions:
        indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
            host,
            num_grid_per_side=visual.num_grid_per_side,
            mode=visual.interpolation_mode,
            align_corners=visual.interpolation_align_corners,
            spatial_merge_size=shape.merge,
        )
        found |= {"interp_indices": indices, "interp_weights": weights}
    return {"grid_thw": host, **longest, **{name: _sent(one, device) for name, one in found.items()}}


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on the device. Only from pinned memory a copy does not wait for earlier work."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
