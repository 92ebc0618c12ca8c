"""Benchmark tokenisation: tokens per second of a corpus build, beside bare calls of `tokenizers`."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from tools.benchmarks.benchmark_report import Report, Requirement, table
from tools.benchmarks.results import Other

ROOT = Path(__file__).resolve().parents[2]
TEXTS = ("README.md", "CHANGELOG.md", "docs/*.md", "mkd/data/*.py", "mkd/losses/*.py")
LEARNED_TOKENS = 8192
BARE = "bare tokenizers, 1 process"
MIB = 2**20
T = TypeVar("T")


def benchmark(folder: Path | None, mebibytes: int, workers: Sequence[int], seed: int) -> Report:
    """Time the build of a corpus with each number of processes, and print the table."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    from mkd.data.store_builder import build_store
    from mkd.tokenizers.hugging_face import HuggingFaceTokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    source = paragraphs()
    hf = AutoTokenizer.from_pretrained(folder) if folder else learned_tokenizer(source)
    tokenizer, backend = HuggingFaceTokenizer(hf), Tokenizer.from_str(hf.backend_tokenizer.to_str())
    texts = drawn(source, mebibytes * MIB, seed)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "texts.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
        tokens, seconds = timed(lambda: sum(len(backend.encode(text).ids) for text in texts))
        rates = {BARE: (1, tokens / seconds)}
        for count in workers:
            prefix = str(Path(place) / f"corpus{count}")
            build = partial(build_store, [str(path)], prefix, tokenizer, False, count)
            summary, seconds = timed(build)
            assert summary.tokens == tokens, "both are the same tokens"
            rates[f"mkd, {count or 'this'} process{'es' * (count > 1)}"] = (max(count, 1), tokens / seconds)
    first = next(rate for name, (_, rate) in rates.items() if name != BARE)
    rows = [
        [name, f"{rate:.4g}", f"{rate / count:.4g}", f"{rate / rates[BARE][1]:.2f}", f"{rate / first:.2f}"]
        for name, (count, rate) in rates.items()
    ]
    case = f"{mebibytes} MiB of records, {tokenizer.vocab_size} tokens"
    header = ["", "tokens/s", "a process", "of bare", "of the first"]
    print(table(f"tokenise {case}, {len(texts)} records, {usable()} cores", header, rows))
    requirement = Requirement("R19", first / rates[BARE][1], "of the bare rate in one process", ">=", 0.8)
    others = [Other(case, name, "rate", "tokens/s", rate) for name, (_, rate) in rates.items()]
    return Report([requirement], others=others)


def timed(run: Callable[[], T]) -> tuple[T, float]:
    """Return (result, seconds)."""
    begin = time.perf_counter()
    return run(), time.perf_counter() - begin


def usable() -> int:
    return len(os.sched_getaffinity(0))


def paragraphs() -> list[str]:
    """Return the paragraphs of this repository's documents and of some of its code."""
    paths = sorted(path for pattern in TEXTS for path in ROOT.glob(pattern))
    return [text for path in paths for text in path.read_text(encoding="utf-8").split("\n\n") if text.strip()]


def drawn(source: Sequence[str], size: int, seed: int) -> list[str]:
    """Return records of some paragraphs each, of about `size` characters together."""
    random, found = np.random.default_rng(seed), []
    shuffled = cycle([source[i] for i in random.permutation(len(source))])
    while size > 0:
        found.append("\n\n".join(islice(shuffled, int(random.integers(1, 12)))))
        size -= len(found[-1])
    return found


def learned_tokenizer(source: Sequence[str]):
    """Return a byte-level BPE tokenizer that has learned `source`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED_TOKENS, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(source, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
