"""Figures of the alignment on many real texts and all pairs of real tokenizers.

    python -m tests.xtoken.alignment_report [--documents 1000]

The texts are Debian packages (the Debian handbook, manual pages and the Python documentation in many
languages), sources of the standard library, tables of digits, and emoji. They and the tokenizers are kept in
the folder of MKD_DOWNLOADS.
"""

from __future__ import annotations

import argparse
import gzip
import html
import random
import re
import subprocess
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from statistics import median

from mkd.tokenizers.spans import EncodedText
from mkd.tokenizers.tokenizer import Tokenizer
from mkd.xtoken import align_spans
from mkd.xtoken.published.align_dp import align_dp
from tests.xtoken.brute_force import check_chunks, check_spans, random_text, walk
from tests.xtoken.real_tokenizers import NAMES, downloads_folder, load_real

PACKAGES = ("debian-handbook", "manpages-ja", "manpages-zh", "manpages-ru", "python3.11-doc")
PAIRS = list(permutations(NAMES, 2))
DOCUMENT_CHARACTERS = 16_000
TIMED_TOKENS = 4096


def documents(folder: Path, count: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, text): the same share of `count` of every kind."""
    packages = fetch_packages(folder)
    share = count // (len(PACKAGES) + 3) + 1
    generator = random.Random(0)
    for package in PACKAGES:
        files = sorted(path for path in (packages / package).rglob("*") if path.is_file() and is_text(path))
        for path in generator.sample(files, min(share, len(files))):
            yield package, text_of(path)[:DOCUMENT_CHARACTERS]
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for path in (sources * (share // len(sources) + 1))[:share]:
        text = path.read_text(encoding="utf-8", errors="replace")
        begin = generator.randrange(max(1, len(text) - DOCUMENT_CHARACTERS))
        yield "code", text[begin : begin + DOCUMENT_CHARACTERS]
    for _ in range(share):
        yield "digits", digit_table(generator, 120)
        yield "emoji and any code point", random_text(generator, 400)


def fetch_packages(folder: Path) -> Path:
    """Return the folder with the unpacked Debian packages."""
    out = folder / "debian"
    if not out.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            Path(scratch, "out").mkdir()
            subprocess.run(["apt-get", "download", *PACKAGES], cwd=scratch, check=True, capture_output=True)
            for archive in Path(scratch).glob("*.deb"):
                subprocess.run(
                    ["dpkg-deb", "-x", archive, f"{scratch}/out/{archive.name.split('_')[0]}"], check=True
                )
            Path(scratch, "out").rename(out)
    return out


def is_text(path: Path) -> bool:
    return path.name.endswith((".rst.txt", ".html")) or (path.suffix == ".gz" and "/man/" in path.as_posix())


def text_of(path: Path) -> str:
    if path.suffix == ".gz":
        return gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix != ".html":
        return text
    return html.unescape(re.sub(r"<[^>]*>", "", re.sub(r"(?s)<(script|style).*?</\1>", "", text)))


def digit_table(generator: random.Random, rows: int) -> str:
    return "\n".join(" ".join(str(generator.randrange(10**6)) for _ in range(8)) for _ in range(rows))


def check_all(tokenizers: dict[str, Tokenizer], texts: list[tuple[str, str]]) -> None:
    """Check every pair on every text: chunks are those of the plain walk and cover the same bytes."""
    chunks_of, exact, kinds = Counter(), Counter(), Counter(kind for kind, _ in texts)
    for kind, text in texts:
        encoded = {name: tokenizer.encode_spans(text) for name, tokenizer in tokenizers.items()}
        for name, one in encoded.items():
            check_spans(one, text.encode())
            assert one.ids.tolist() == tokenizers[name].encode(text)
            exact[name] += is_exact(tokenizers[name], one, text.encode())
        for student, teacher in PAIRS:
            ours, theirs = encoded[student], encoded[teacher]
            chunks = align_spans(ours, theirs).tolist()
            assert chunks == walk(ours, theirs), (kind, student, teacher)
            check_chunks(chunks, ours, theirs)
            chunks_of[student, teacher] += len(chunks)
    print(f"{len(texts)} documents: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}")
    for name in NAMES:
        print(
            f"  {name}: token bytes join to the text in {exact[name]} documents, "
            f"offsets decide in {len(texts) - exact[name]}"
        )
    total = sum(chunks_of.values())
    print(
        f"{total} chunks of {len(PAIRS)} ordered pairs: "
        "100% equal the plain walk and cover the same bytes on both sides"
    )


def is_exact(tokenizer: Tokenizer, encoded: EncodedText, data: bytes) -> bool:
    joined = b"".join(tokenizer.token_bytes[i] or b"\xff" for i in encoded.ids[encoded.ends >= 0].tolist())
    return joined in (data, b" " + data)


def time_alignment(tokenizers: dict[str, Tokenizer], texts: list[tuple[str, str]]) -> None:
    """Print the milliseconds for a document of 4,096 student tokens on this core."""
    core, encoding = [], []
    for start in range(0, min(len(texts), 400), 8):
        text = "\n".join(text for _, text in texts[start : start + 8])
        for student, teacher in PAIRS:
            encoded = tokenizers[student].encode_spans(text)
            if len(encoded) <= TIMED_TOKENS:
                continue
            cut = text.encode()[: encoded.ends[TIMED_TOKENS]].decode("utf-8", "ignore")
            begin = time.perf_counter()
            sides = tokenizers[student].encode_spans(cut), tokenizers[teacher].encode_spans(cut)
            between = time.perf_counter()
            align_spans(*sides)
            core.append(1e3 * (time.perf_counter() - between))
            encoding.append(1e3 * (between - begin))
    print(
        f"document of {TIMED_TOKENS} student tokens ({len(core)} timed): "
        f"alignment {median(core):.2f} ms median, "
        f"{max(core):.2f} ms at most; both encodings with spans {median(encoding):.1f} ms median"
    )


def compare_digits(tokenizers: dict[str, Tokenizer]) -> None:
    """Compare both modes on a table of digits, `dp` in plain Python and compiled."""
    text = digit_table(random.Random(1), 40)
    for student, teacher in (("gpt2", "qwen3"), ("qwen3", "gpt2")):
        ours, theirs = (tokenizers[name].encode_spans(text) for name in (student, teacher))
        align_dp(ours, theirs, text.encode())  # compiles
        times, found = [], []
        for run in (
            lambda ours, theirs: align_spans(ours, theirs),
            lambda ours, theirs: align_dp(ours, theirs, text.encode()),
            lambda ours, theirs: align_dp(ours, theirs, text.encode(), compile=False),
        ):
            begin = time.perf_counter()
            found.append(run(ours, theirs).tolist())
            times.append(time.perf_counter() - begin)
        print(
            f"digits, {student} ({len(ours)} tokens) with {teacher} ({len(theirs)}): "
            f"byte_offset {1e3 * times[0]:.2f} ms, dp "
            f"compiled {1e3 * times[1]:.0f} ms ({times[1] / times[0]:.0f} x), "
            f"dp in plain Python {1e3 * times[2]:.0f} ms "
            f"({times[2] / times[0]:.0f} x); same chunks: {found[0] == found[1] == found[2]}"
        )


def compare_modes(tokenizers: dict[str, Tokenizer], texts: list[tuple[str, str]]) -> None:
    """Print the share of 1-1 chunks of English prose that `dp` has too."""
    prose = [text for kind, text in texts if kind == "python3.11-doc"][:30]
    same = single = extra = 0
    for text in prose:
        encoded = {name: tokenizer.encode_spans(text) for name, tokenizer in tokenizers.items()}
        for student, teacher in PAIRS:
            exact, found = (
                {tuple(chunk) for chunk in chunks.tolist() if chunk[1] - chunk[0] == chunk[3] - chunk[2] == 1}
                for chunks in (
                    align_spans(encoded[student], encoded[teacher]),
                    align_dp(encoded[student], encoded[teacher], text.encode()),
                )
            )
            same, single, extra = same + len(exact & found), single + len(exact), extra + len(found - exact)
    print(
        f"English prose: dp has {same} of {single} 1-1 chunks "
        f"({100 * same / single:.4f}%), and {extra} others"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--documents", type=int, default=1000, metavar="N", help="at least this many (default 1000)"
    )
    count = parser.parse_args().documents
    with tempfile.TemporaryDirectory() as scratch:
        folder = downloads_folder(Path(scratch))
        tokenizers = load_real(folder)
        texts = list(documents(folder, count))
    time_alignment(tokenizers, random.Random(2).sample(texts, len(texts)))
    compare_digits(tokenizers)
    compare_modes(tokenizers, texts)
    check_all(tokenizers, texts)


if __name__ == "__main__":
    main()
