"""The file of a model card. Its last line has a hash of the text, so that an edited card is not replaced."""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import dataclass, replace
from pathlib import Path

from mkd.checkpoint.hf.hf_assets import HFAssets
from mkd.errors import first_line
from mkd.release.model_card import ModelCard
from mkd.release.model_licence import CARD

LOG = logging.getLogger("mkd")
_MARK = re.compile(r"\A(.*)\n<!-- written by mkd: ([0-9a-f]{16}) -->\n\Z", re.DOTALL)


def marked(text: str) -> str:
    """Return a card with the line that tells it from a card of somebody else."""
    return f"{text.rstrip()}\n\n<!-- written by mkd: {_digest(text.rstrip())} -->\n"


def is_own_text(content: str) -> bool:
    """Return True if mkd has written this card and nobody has changed it."""
    match = _MARK.match(content)
    return match is not None and _digest(match.group(1).rstrip()) == match.group(2)


def may_write(folder: Path) -> bool:
    """Return True if a folder has no model card, or one that mkd has written and nobody has changed."""
    path = folder / CARD
    try:
        return not path.exists() and not path.is_symlink() or is_own_text(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class CardFile:
    """A card among the files of an export, as `HFAssets.changes` writes them into the folder of the draft."""

    card: ModelCard
    folder: Path  # where the export will be

    def save(self, folder: Path) -> None:
        """Write the card, unless the export's folder has one that must stay."""
        if not may_write(self.folder):
            LOG.warning("%s stays as it is: mkd did not write it, or it was edited since", self.folder / CARD)
            return
        try:
            text = marked(self.card.text())
        except Exception as error:  # no trained weights are lost for want of a card
            LOG.warning("the export has no model card: %s", first_line(error))
            return
        (folder / CARD).write_text(text, encoding="utf-8")


def with_card(assets: HFAssets, card: ModelCard, folder: Path) -> HFAssets:
    """Return the small files of an export to `folder`, with its card."""
    return replace(assets, changes=(*assets.changes, CardFile(card, folder)))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
