"""Words for the layouts of a benchmark: `tp2,pp2`, `peers4,fp8`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mkd.errors import UsageError
from mkd.human import counted
from tools.benchmarks.random_engine import PairSettings

NUMBERED = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "vp": "--num-virtual-stages-per-pipeline-rank",
    "ep": "--expert-model-parallel-size",
    "ahead": "--teacher-prefetch",
    "peers": "--teacher-peers",
    "block": "--recompute-num-layers",
}
BEFORE = {
    "peers": ("--teacher-residency", "peers"),
    "block": ("--recompute-granularity", "full", "--recompute-method", "block"),
}
PLAIN = {
    "dp": (),
    "selective": ("--recompute-granularity", "selective"),
    "sft": (),
    "fp8": ("--teacher-precision", "fp8"),
    "host": ("--teacher-residency", "host"),
    "eager": ("--cuda-graphs", "off"),
    "distributed": ("--use-distributed-optimizer",),
    "auto": ("--pipeline-layout", "auto"),
}
"""Words without a number: data parallelism alone, no teacher, and flags of pretrain_kd.py."""


@dataclass(frozen=True)
class Arm:
    """One layout."""

    name: str
    sizes: dict[str, int]
    words: tuple[str, ...]

    @property
    def changes_loss(self) -> bool:
        """True if the loss is not that of the plain pair: the teacher is rounded, or there is none."""
        return bool({"fp8", "sft"} & set(self.words))

    def settings(self, settings: PairSettings, world_size: int) -> PairSettings:
        """Return the pair in this layout; `settings.num_microbatches` is the number of packs of a step.

        Raises UsageError if processes or packs cannot be divided. Teachers are ahead as in a run.
        """
        tensor, pipeline = self.sizes.get("tp", 1), self.sizes.get("pp", 1)
        data, rest = divmod(world_size, tensor * pipeline)
        if rest or settings.num_microbatches % max(1, data):
            packs = counted(settings.num_microbatches, "pack")
            what = f"layout {self.name!r} cannot have {counted(world_size, 'process')} and {packs}"
            do = f"start a multiple of {tensor * pipeline} processes, with as many packs for each replica"
            raise UsageError(what, "", do, code="world-not-divisible")
        flags = ["--teacher-prefetch", "auto"]
        for word, number in self.sizes.items():
            flags += BEFORE.get(word, ())
            flags += [NUMBERED[word], str(number)] if word not in ("tp", "pp", "vp") else []
        for word in self.words:
            flags += PLAIN[word]
        return replace(
            settings,
            num_microbatches=settings.num_microbatches // data,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            virtual_stages=self.sizes.get("vp", 1),
            kd_ratio=0.0 if "sft" in self.words else settings.kd_ratio,
            flags=(*settings.flags, *flags),
        )


def arm_of(text: str) -> Arm:
    """Return the layout of words with commas between them. Raises UsageError if one is not known."""
    sizes, words = {}, []
    for word in text.split(","):
        numbered = re.fullmatch(r"([a-z]+)(\d+)", word)
        if numbered and numbered[1] in NUMBERED:
            sizes[numbered[1]] = int(numbered[2])
        elif word in PLAIN:
            words.append(word)
        else:
            known = ", ".join([f"{name}N" for name in NUMBERED] + list(PLAIN))
            raise UsageError(
                f"layout word {word!r} is not known", "", f"choose: {known}", code="value-unknown"
            )
    return Arm(text, sizes, tuple(words))
