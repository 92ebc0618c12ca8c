"""Named pictures in two drawing styles, and conversations about them.

The npm packages emoji-datasource-twitter and emoji-datasource-google (MIT) have every emoji as a picture of
64 x 64 pixels, drawn by Twitter (CC-BY 4.0) and by Google (Apache-2.0), with its name and group.
"""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

STYLES = ("twitter", "google")
VERSION = "16.0.0"
SIDE = 64  # pixels
LEFT_OUT = "component"  # the group of the five skin colours
LIST = "pictures.json"
WHITE = (255, 255, 255, 255)


@dataclass(frozen=True)
class Named:
    """Name and group of a picture."""

    name: str  # "hot pepper"
    group: str  # "food & drink"
    file: str  # its name in the folder of a style


@dataclass(frozen=True)
class Question:
    """A question that every picture answers."""

    text: str
    key: str  # field of `Named` that has the answer


QUESTIONS = (Question("What is it?", "name"), Question("Which group?", "group"))


def fetch_pictures(folder: Path, groups: Sequence[str] = ()) -> list[Named]:
    """Write `folder`/STYLE/*.png and the list of names; return the names of `groups` (default: all).

    Needs npm for the packages, which are downloaded but not installed. Does nothing if the list exists.
    """
    if not (folder / LIST).exists():
        kept: list[Named] = []
        for style in STYLES:
            kept = _unpack(style, folder / style)
        written = json.dumps([vars(one) for one in kept], indent=0)
        (folder / LIST).write_text(written, encoding="utf-8")
    listed = [Named(**one) for one in json.loads((folder / LIST).read_text(encoding="utf-8"))]
    return [one for one in listed if not groups or one.group in groups]


def _unpack(style: str, folder: Path) -> list[Named]:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        package = f"emoji-datasource-{style}@{VERSION}"
        command = ["npm", "pack", "--silent", "--pack-destination", scratch, package]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except FileNotFoundError as error:
            raise SystemExit("npm is missing: install Node.js, which fetches the pictures") from error
        with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
            files = {member.name: member for member in archive.getmembers()}

            def content(name: str) -> bytes:
                file = archive.extractfile(files[f"package/{name}"])
                assert file is not None, name
                return file.read()

            named = list(read_list(json.loads(content("emoji.json"))))
            for one in named:
                picture = on_white(content(f"img/{style}/{SIDE}/{one.file}"))
                (folder / one.file).write_bytes(picture)
    return named


def read_list(records: Sequence[dict]) -> Iterator[Named]:
    """Yield the pictures that both styles have, each name once, in the order of the file."""
    seen = {LEFT_OUT}
    for record in records:
        name, group = record["name"].lower(), record["category"].lower()
        if record["has_img_twitter"] and record["has_img_google"] and not {name, group} & seen:
            seen.add(name)
            yield Named(name, group, record["image"])


def on_white(content: bytes) -> bytes:
    """Return the picture as an opaque PNG on a white ground."""
    from PIL import Image

    drawn = Image.open(io.BytesIO(content)).convert("RGBA")
    ground = Image.new("RGBA", drawn.size, WHITE)
    ground.alpha_composite(drawn)
    out = io.BytesIO()
    ground.convert("RGB").save(out, "PNG")
    return out.getvalue()


def read_pixels(folder: Path, style: str, named: Sequence[Named]) -> Tensor:
    """Return the pictures of a style, fp32 [n, 3, 64, 64] from -1 to 1."""
    from PIL import Image

    files = [np.asarray(Image.open(folder / style / one.file).convert("RGB")) for one in named]
    return torch.from_numpy(np.stack(files)).permute(0, 3, 1, 2).float() / 127.5 - 1


def varied(pixels: Tensor, generator: torch.Generator, strength: float = 1.0) -> Tensor:
    """Return the pictures turned, shifted, resized and in other colours, at random: a style of its own.

    `pixels` is [n, 3, h, w] from -1 to 1, and so is the result. `strength` 0 changes nothing.
    """
    count, device = len(pixels), pixels.device

    def drawn(*shape: int) -> Tensor:
        return strength * (2 * torch.rand(count, *shape, generator=generator) - 1).to(device)

    turn, size, shift = 0.25 * drawn(), 1 + 0.25 * drawn(), 0.15 * drawn(2)
    rows = torch.stack([size * turn.cos(), -size * turn.sin(), size * turn.sin(), size * turn.cos()], dim=1)
    moves = torch.cat([rows.view(count, 2, 2), shift[:, :, None]], dim=2)
    grid = F.affine_grid(moves, list(pixels.shape), align_corners=False)
    moved = 1 - F.grid_sample(1 - pixels, grid, align_corners=False)  # white around it
    mixing = torch.eye(3, device=device) + 0.25 * drawn(3, 3)
    mixed = torch.einsum("nij,njhw->nihw", mixing, moved)
    return (mixed * (1 + 0.3 * drawn(1, 1, 1)) + 0.25 * drawn(3, 1, 1)).clamp(-1, 1)


def write_varied(
    folder: Path, style: str, named: Sequence[Named], copies: int, seed: int, strength: float = 1.0
) -> list[list[str]]:
    """Write `copies` varied pictures of each name below `folder`; return the paths of each copy."""
    from PIL import Image

    def save(file: Path, picture: np.ndarray) -> None:
        Image.fromarray(picture).save(file, "PNG", compress_level=1)

    pixels, generator = read_pixels(folder, style, named), torch.Generator().manual_seed(seed)
    found = []
    for copy in range(copies):
        out = folder / f"varied-{style}-{copy}"
        out.mkdir(exist_ok=True)
        values = ((varied(pixels, generator, strength) + 1) * 127.5).round().byte()
        with ThreadPoolExecutor() as pool:
            list(pool.map(save, (out / one.file for one in named), values.permute(0, 2, 3, 1).numpy()))
        found.append([f"{out.name}/{one.file}" for one in named])
    return found


def conversation(path: str, named: Named, question: Question) -> dict:
    """Return a record for mkd: one question about one picture, and the answer."""
    image, text = {"type": "image", "image": path}, {"type": "text", "text": question.text}
    answer = [{"type": "text", "text": getattr(named, question.key)}]
    turns = [{"role": "user", "content": [image, text]}, {"role": "assistant", "content": answer}]
    return {"messages": turns}


def write_training(
    folder: Path, out: Path, named: Sequence[Named], copies: int, seed: int, strength: float = 1.0
) -> None:
    """Write training conversations: every copy is asked for its name, every second one for its group."""
    with open(out, "w", encoding="utf-8") as file:
        for number, paths in enumerate(write_varied(folder, STYLES[0], named, copies, seed, strength)):
            for question in QUESTIONS[: 2 - number % 2]:
                for path, one in zip(paths, named, strict=True):
                    file.write(json.dumps(conversation(path, one, question)) + "\n")


def write_held_out(out: Path, named: Sequence[Named]) -> None:
    """Write the conversations about the pictures of the other style."""
    with open(out, "w", encoding="utf-8") as file:
        for question in QUESTIONS:
            for one in named:
                file.write(json.dumps(conversation(f"{STYLES[1]}/{one.file}", one, question)) + "\n")
