"""Tiny random models with images of every supported family, and packs of documents with images for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from mkd.families.vision_shape import VisionShape
from mkd.models.packed import packed_documents
from mkd.parallel.image_row import ImageRow, deal_images, held_rows, image_row, num_patches
from mkd.parallel.zigzag import RowShard

VOCABULARY, IMAGE, VIDEO, START, END = 320, 300, 301, 302, 303
TEXT = dict(
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
    max_position_embeddings=512,
)
TOWER = dict(hidden_size=32, intermediate_size=40)
IDS = dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)
QWEN = dict(TOWER, depth=3, num_heads=2, patch_size=4, temporal_patch_size=2, spatial_merge_size=2)
TILES = dict(TOWER, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=4)
DELTA_NETS = dict(  # gated attention in every second layer; half of a head rotates
    head_dim=16,
    full_attention_interval=2,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=1e4,
        partial_rotary_factor=0.5,
        mrope_section=[2, 1, 1],
        mrope_interleaved=True,
    ),
)
GATED_EXPERTS = dict(
    num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=20
)
WITHOUT_DEEPSTACK = dict(QWEN, num_position_embeddings=36)
WITH_DEEPSTACK = dict(WITHOUT_DEEPSTACK, deepstack_visual_indexes=[0, 1])
SECTIONS = dict(
    head_dim=16,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2], mrope_interleaved=True
    ),
)
FAMILIES = {
    "smolvlm": ("SmolVLM", dict(scale_factor=2, image_token_id=IMAGE, pad_token_id=2), {}, TILES),
    "idefics3": ("Idefics3", dict(scale_factor=2, image_token_id=IMAGE, pad_token_id=2), {}, TILES),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        dict(IDS),
        dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 3])),
        # like the released 3,420, 42 is not a multiple of 8
        dict(QWEN, intermediate_size=42, window_size=16, fullatt_block_indexes=[2]),
    ),
    "qwen3_vl": ("Qwen3VL", dict(IDS, tie_word_embeddings=True), SECTIONS, WITH_DEEPSTACK),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        IDS,
        SECTIONS | dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[1]),
        WITH_DEEPSTACK,
    ),
    "qwen3_5": ("Qwen3_5", dict(IDS, tie_word_embeddings=True), DELTA_NETS, WITHOUT_DEEPSTACK),
    "qwen3_5_moe": ("Qwen3_5Moe", IDS, DELTA_NETS | GATED_EXPERTS, WITHOUT_DEEPSTACK),
}


def vision_config(family: str, *, text: dict | None = None, vision: dict | None = None, **top):
    """Return the configuration of a tiny model; the arguments override its sizes."""
    name, common, own_text, own_vision = FAMILIES[family]
    text = {**TEXT, **own_text, **(text or {})}
    vision = {**own_vision, **(vision or {})}
    if family in ("smolvlm", "idefics3"):
        text |= dict(model_type="llama", head_dim=12, pad_token_id=2, rms_norm_eps=1e-5)
    else:
        vision["out_hidden_size"] = text["hidden_size"]
    given = {**common, **top}
    return getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision, **given)


def make_vision_model(folder: Path, family: str, seed: int = 0, dtype=torch.float32, **sizes) -> Path:
    """Save a random model in `folder`, sharded. Norms and biases are random too."""
    torch.manual_seed(seed)
    config = vision_config(family, **sizes)
    model = getattr(transformers, f"{FAMILIES[family][0]}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(2)
    model.to(dtype).save_pretrained(folder, max_shard_size="200KB")
    if family == "qwen3_vl_moe":
        turn_experts(folder)
    return folder


def turn_experts(folder: Path) -> None:
    """Turn the matrices of stacked experts, [out, in] as transformers 5 writes them, or as released."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        turned = {name: one.mT.contiguous() if ".experts." in name else one for name, one in tensors.items()}
        save_file(turned, file, metadata={"format": "pt"})


@dataclass(frozen=True)
class Document:
    """One document: ids with images expanded, and the images as the tower takes them."""

    ids: Tensor  # [n] int64
    pixels: list[Tensor]  # patches or tiles of each image
    grids: list[tuple[int, int, int]]


def make_document(
    shape: VisionShape, sizes: list[tuple[int, int]], seed: int, text: tuple[int, ...] = (5, 7, 9)
) -> Document:
    """Return a random document with an image of each of `sizes` (patch rows and columns; tiles for SmolVLM).

    Text runs of the lengths `text` stand around the images, in turn.
    """
    generator = torch.Generator().manual_seed(seed)

    def words(place: int) -> Tensor:
        return torch.randint(3, 290, (text[place % len(text)],), generator=generator)

    ids, pixels, grids = [words(0)], [], []
    for number, (height, width) in enumerate(sizes):
        if shape.image_size:
            side = shape.image_size // shape.patch_size
            grids.append((height * width, side, side))
            units = height * width
        else:
            grids.append((1, height, width))
            units = height * width
        pixels.append(torch.randn(units, *shape.pixel_unit, generator=generator))
        count = num_patches(grids[-1]) // shape.merge**2
        tail = [torch.tensor([END])] if number % 2 else []
        ids += [torch.tensor([START]), torch.full((count,), IMAGE), *tail, words(number + 1)]
    return Document(torch.cat(ids), pixels, grids)


def rotary_positions(document: Document, merge: int) -> Tensor:
    """Return time, height and width of every token, [3, n]; all tokens of an image have one time."""
    found, cursor, token = [], 0, 0
    grids, ids = iter(document.grids), document.ids.tolist()
    while token < len(ids):
        if ids[token] != IMAGE:
            found.append((cursor,) * 3)
            cursor, token = cursor + 1, token + 1
            continue
        _, height, width = next(grids)
        rows, columns = height // merge, width // merge
        found += [(cursor, cursor + y, cursor + x) for y in range(rows) for x in range(columns)]
        cursor, token = cursor + max(rows, columns), token + rows * columns
    return torch.tensor(found).T


@dataclass(frozen=True)
class Row:
    """Documents in one THD row, whole."""

    tokens: Tensor  # [t] int64
    position_ids: Tensor  # [t] int64
    lengths: Tensor  # [documents + 1] int32
    spans: Tensor  # [documents + 1] int32
    positions: Tensor | None  # [3, t]
    documents: list[Document]
    shape: VisionShape

    @property
    def starts(self) -> list[int]:
        return self.spans[:-1].tolist()

    def packed(self):
        return packed_documents(self.lengths, self.spans, int(self.spans.diff().max()))

    def images(self, **place) -> ImageRow:
        """Return the images for one rank of tp x cp."""
        return row_images([self], **place)


def row_images(
    rows: list[Row], *, cp_rank: int = 0, cp: int = 1, tp_rank: int = 0, tp: int = 1, sequence_parallel=False
) -> ImageRow:
    """Return the images of several packs in one row, for one rank of tp x cp."""
    total, shape = len(rows[0].tokens), rows[0].shape
    spans = torch.cat([row.spans[:-1] + number * total for number, row in enumerate(rows)])
    spans = torch.cat([spans, torch.tensor([len(rows) * total])])
    kept = RowShard(cp_rank, cp).rows(spans)
    kept = held_rows(kept, tp_rank, tp) if sequence_parallel else kept
    own_grids = [[grid for one in row.documents for grid in one.grids] for row in rows]
    owners = [owner for grids in own_grids for owner in deal_images(grids, tp * cp)]
    pixels = [image for row in rows for one in row.documents for image in one.pixels]
    rank, none = cp_rank * tp + tp_rank, torch.zeros(0, *shape.pixel_unit)
    own = [image for image, owner in zip(pixels, owners, strict=True) if owner == rank]
    places = (torch.cat([row.tokens for row in rows]) == IMAGE).nonzero().flatten().numpy()
    positions = None if rows[0].positions is None else torch.cat([row.positions for row in rows], dim=1)
    options = dict(rank=rank, ranks=tp * cp, kept=kept, positions=positions)
    grids = [grid for grids in own_grids for grid in grids]
    return image_row(torch.cat([none, *own]), grids, owners, places, shape.merge, **options)


def make_row(shape: VisionShape, documents: list[Document], multiple: int, total: int) -> Row:
    """Lay the documents one after the other; each is padded to `multiple`, the last one up to `total`."""
    lengths = [len(one.ids) for one in documents]
    spans = [-(-length // multiple) * multiple for length in lengths]
    spans[-1] += total - sum(spans)
    assert spans[-1] >= lengths[-1], f"{sum(lengths)} tokens are more than {total}"

    def laid(values: list[Tensor]) -> Tensor:
        pairs = zip(values, spans, strict=True)
        return torch.cat([F.pad(one, (0, span - one.size(-1))) for one, span in pairs], dim=-1)

    def borders(values: list[int]) -> Tensor:
        return torch.from_numpy(np.concatenate([[0], np.cumsum(values)]).astype(np.int32))

    counted = [] if shape.image_size else [rotary_positions(one, shape.merge) for one in documents]
    return Row(
        tokens=laid([one.ids for one in documents]),
        position_ids=laid([torch.arange(length) for length in lengths]),
        lengths=borders(lengths),
        spans=borders(spans),
        positions=laid(counted) if counted else None,
        documents=documents,
        shape=shape,
    )


def reference_model(folder: Path, dtype=torch.float32):
    """Return the model as transformers runs it."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def reference_logits(model, document: Document) -> Tensor:
    """Return the logits of one document alone, [n, vocabulary]."""
    inputs = {}
    if document.grids and document.pixels[0].dim() == 4:
        inputs = dict(pixel_values=torch.cat(document.pixels)[None])
    elif document.grids:
        inputs = dict(
            pixel_values=torch.cat(document.pixels),
            image_grid_thw=torch.tensor(document.grids),
            mm_token_type_ids=(document.ids == IMAGE).int()[None],
        )
    inputs = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in inputs.items()}
    return model(input_ids=document.ids[None], **inputs).logits[0]
