"""Export a stored teacher on the rank pool, and make flags of runs that train from it."""

from __future__ import annotations

from pathlib import Path

from tests.train.command import Result, flags, run_main

TOPK = "mkd.commands.topk"
DATA = ("--split", "80,20,0")


def export(
    ranks, files: Path, out: str, *more, world_size: int = 1, command: str = TOPK, **paths
) -> list[Result]:
    """Export the teacher of `files` into `out`, on every rank; `more` overrides the flags of a run."""
    argv = ["--out", str(files / out), "--samples-per-shard", "10"]
    argv += ["--logprob-dtype", "float32"] if command == TOPK else []
    argv += flags(files, f"{out} log", *DATA, *more, **paths)
    return run_main(ranks, argv, world_size, command=command)


def exported(ranks, files: Path, out: str, *more, world_size: int = 1, **paths) -> Path:
    """Return the folder of an export that ended well."""
    results = export(ranks, files, out, *more, world_size=world_size, **paths)
    assert [result.exit_code for result in results] == [0] * world_size, results[0].stderr
    return files / out


def offline(files: Path, run: str, cache: str, *more, **paths) -> list[str]:
    """Return the command line of a short run from a cache, without a teacher."""
    return flags(
        files, run, "--teacher-topk", str(files / cache), *DATA, *more, **({"teacher_hf": None} | paths)
    )
