"""A GGUF file of an export, written by llama.cpp's own converter."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from mkd.config.flags import require_writable
from mkd.errors import CheckpointError, MkdError, UsageError

CONVERTER = "convert_hf_to_gguf.py"
LLAMA_CPP = "LLAMA_CPP"  # variable: the checkout of llama.cpp, or the converter itself
TYPES = ("f32", "f16", "bf16", "q8_0", "auto")
HOW_TO_GET = (
    f"git clone https://github.com/ggml-org/llama.cpp, then set {LLAMA_CPP} to that folder; its converter "
    "needs `pip install gguf`"
)
MOST_LINES = 5  # of the converter's output in an error


@dataclass(frozen=True)
class GGUFFile:
    """A file to write, and its type of numbers."""

    path: Path
    kind: str = "auto"

    def problem(self, overwrite: bool) -> MkdError | None:
        """Return why the file cannot be written, before anything is exported; None if it can."""
        try:
            if self.path.exists() and not overwrite:
                raise UsageError(
                    f"--gguf {self.path} exists",
                    "it would be replaced",
                    "choose another file, or give --overwrite",
                    code="already-exists",
                )
            require_writable("--gguf", self.path)
            find_converter()
        except MkdError as error:
            return error
        return None

    def command(self, folder: Path) -> list[str]:
        """Return the command that converts the export in `folder`."""
        converter = str(find_converter())
        runs = [sys.executable, converter] if converter.endswith(".py") else [converter]
        return [*runs, str(folder), "--outfile", str(self.path), "--outtype", self.kind]

    def shown(self, folder: Path) -> str:
        """Return the command for a reader on another machine."""
        words = [CONVERTER, folder.name or str(folder), "--outfile", self.path.name, "--outtype", self.kind]
        return shlex.join(["python", *words])

    def write(self, folder: Path) -> None:
        """Convert the export in `folder`. Raises CheckpointError if llama.cpp cannot."""
        done = subprocess.run(self.command(folder), capture_output=True, text=True, check=False)
        if done.returncode == 0 and self.path.exists():
            return
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise CheckpointError(
            f"llama.cpp could not convert {folder} to GGUF (exit code {done.returncode})",
            "\n       ".join(lines[-MOST_LINES:]) or "it printed nothing",
            f"the export in {folder} is complete: repair the cause, then {shlex.join(self.command(folder))}",
            code="after-export-failed",
        )


def find_converter() -> Path:
    """Return llama.cpp's converter: of LLAMA_CPP, else on the path. Raises UsageError without one."""
    place = os.environ.get(LLAMA_CPP)
    if place:
        path = Path(place).expanduser()
        path = path / CONVERTER if path.is_dir() else path
        if path.is_file():
            return path
        what, why = f"{LLAMA_CPP}={place} has no {CONVERTER}", "--gguf needs the converter of llama.cpp"
        raise UsageError(what, why, HOW_TO_GET, code="package-missing")
    found = shutil.which(CONVERTER)
    if found is None:
        what, why = f"{CONVERTER} is not found", "--gguf needs the converter of llama.cpp"
        raise UsageError(what, why, HOW_TO_GET, code="package-missing")
    return Path(found)
