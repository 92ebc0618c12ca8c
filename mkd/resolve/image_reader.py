"""The reader of images of a run, which all its models share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from mkd.config.schema import Config
from mkd.data.images.conversation import ConversationImages, image_reader
from mkd.data.images.processors import ImageProcessor, has_vision_part, load_image_processor
from mkd.errors import UsageError
from mkd.tokenizers.tokenizer import Tokenizer


def open_images(
    config: Config, student: Path, teachers: Sequence[Path | None], tokenizer: Tokenizer
) -> ConversationImages | None:
    """Return the reader of the student's images; None if it reads none.

    Return None also if a teacher reads the student's tokens but no images: such a run takes only records
    without images. Raises UsageError for a teacher whose image processor differs.
    """
    data = config.data
    found = image_reader(student, tokenizer, data.image_root, data.max_image_pixels, data.max_image_side)
    if found is None:
        return None
    _require_image_token(student, found.processor)
    beside_text = False
    for teacher, settings in zip(teachers, config.teachers, strict=False):
        if teacher is None or settings.xtoken is not None:
            continue  # a teacher with tokens of its own has images of its own too
        other = load_image_processor(teacher, tokenizer, data.max_image_side)
        if other is None and data.image_root is None and not has_vision_part(teacher):
            beside_text = True
            continue
        if other is None or other.fingerprint != found.processor.fingerprint:
            raise UsageError(
                f"teacher {teacher} has {'another' if other else 'no'} image processor",
                "both models read the same tokens, so an image must have as many for each",
                "use a teacher folder with the same preprocessor_config.json, give it tokens of its own "
                "(xtoken), or, for a teacher of text, leave out --image-root and the records with images",
                code="image-processors-differ",
            )
        _require_image_token(teacher, found.processor)
    return None if beside_text else found


def _require_image_token(folder: Path, processor: ImageProcessor) -> None:
    """Raise UsageError if config.json and the tokenizer disagree about the image token."""
    said = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("image_token_id")
    token_id = processor.image_token_id
    if said not in (None, token_id):
        raise UsageError(
            f"{folder}: image_token_id is {said}, but the tokenizer's image token has id {token_id}",
            "transformers would put the features of images in other places, or nowhere",
            "correct image_token_id in config.json, or take the model's own tokenizer",
            code="tokenizer-of-another-model",
        )
