"""The settings of where a teacher's layers are, and in which precision they compute."""

from __future__ import annotations

from dataclasses import dataclass

from mkd.config.field import Range, option


@dataclass(frozen=True)
class PlaceSettings:
    """The place of a teacher's decoder layers. No place changes results, so runs may resume with another."""

    residency: str = option(
        "device",
        "place of the teacher's weights. device: the GPU. student: the frozen weights of a student with "
        "adapters, if the teacher is that model (--teacher-hf student-base); chosen by itself where it is "
        "possible. host: pinned host memory. peers: --teacher-peers "
        "processes of a machine each keep a part of every layer. With host and peers, layers come to the "
        "device one after another, which saves device memory. Packs of some thousand tokens hide the "
        "transfers; peers need fewer tokens than host",
        choices=("device", "host", "peers", "student"),
    )
    peers: int | None = option(
        None,
        "processes that split the teacher's layers, 2 or more; required with --teacher-residency peers. It "
        "must divide data-parallel x context-parallel size, and the processes of a machine",
        valid=Range("2 or more", lambda x: x >= 2),
    )


@dataclass(frozen=True)
class PrecisionSettings:
    """The precision of the products in a teacher's decoder layers. It is part of the loss."""

    precision: str = option(
        "bf16",
        "precision of the products in the teacher's layers. bf16: the run's precision. fp8: weights and "
        "activations are rounded to FP8 (E4M3), for about half the memory and, in a dense teacher, two "
        "thirds of the time. Of a teacher with experts, only these are rounded. fp8 needs --bf16 and, for a "
        "dense teacher, a GPU with FP8. stored: experts keep the FP8 or MXFP4 of their checkpoint in memory, "
        "with the results of bf16, in more time",
        choices=("bf16", "fp8", "stored"),
    )
    fp8_recipe: str = option(
        "tensorwise",
        "scales of --teacher-precision fp8. tensorwise: one for each weight and each activation; of experts, "
        "one for each output channel and each token. blockwise: one for 128 x 128 weights and one for 128 "
        "channels of a token, which is slower",
        choices=("tensorwise", "blockwise"),
    )
