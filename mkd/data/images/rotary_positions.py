"""Positions (time, height, width) of tokens and images, as Qwen's models rotate them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from mkd.parallel.image_row import Grid


def rotary_positions(
    num_tokens: int,  # of the document, padding included
    images: Iterable[tuple[int, Grid]],  # (first token, grid of patches) of each image, in order
    merge: int,  # patches side by side that make one token
) -> np.ndarray:
    """Return the positions of one document, int64 [3, num_tokens].

    A text token has one position three times. An image of h x w tokens that starts at p has (p, p + row,
    p + column); the text after it continues at p + max(h, w). Source: Qwen2-VL, Wang et al. 2024 (arXiv
    2409.12191), section 2.1.
    """
    found = np.empty((3, num_tokens), dtype=np.int64)
    done = position = 0
    for first, (_, rows, columns) in images:
        height, width = rows // merge, columns // merge
        found[:, done:first] = position + np.arange(first - done)
        position += first - done
        done = first + height * width
        found[0, first:done] = position
        found[1, first:done] = position + np.repeat(np.arange(height), width)
        found[2, first:done] = position + np.tile(np.arange(width), height)
        position += max(height, width)
    found[:, done:] = position + np.arange(num_tokens - done)
    return found
