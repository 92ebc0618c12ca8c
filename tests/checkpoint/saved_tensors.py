"""Read a Hugging Face folder plainly, independent of mkd."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a saved model, by name."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
