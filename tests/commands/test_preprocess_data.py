"""Run `mkd preprocess` as a person does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from mkd.commands.inspect import main as inspect
from mkd.commands.preprocess import main
from mkd.data.corpus.store import TokenStore
from mkd.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE
from tests.data.images.tiny_processors import image_file, make_smolvlm, picture
from tests.reported import reported_codes

TOOL = Path(__file__).resolve().parents[2] / "tools" / "preprocess_data.py"
# The loader's threads end late here, and free the semaphores of their queues slowly: a program that does not
# wait for them ends in the middle of that.
SLOW_THREADS = """
import atexit, runpy, sys, threading, time
from multiprocessing import queues, synchronize

feed, unlink, ending = queues.Queue._feed, synchronize.sem_unlink, threading.Event()

def late_feed(*arguments):
    feed(*arguments)
    ending.wait(2)

def slow_unlink(name):
    unlink(name)
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.5)

def end():
    ending.set()
    time.sleep(0.2)

queues.Queue._feed, synchronize.sem_unlink = late_feed, slow_unlink
atexit.register(end)
if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("spm") / "m"
    sentences = iter(["The quick brown fox jumps over the lazy dog."] * 9)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_prefix=str(prefix),
        vocab_size=40,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return f"{prefix}.model"


def test_files_become_a_corpus(model, tmp_path):
    for name, texts in (("a.jsonl", ["The fox"] * 300), ("b.jsonl", ["lazy dog", "brown"])):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    command = [
        sys.executable,
        "-c",
        SLOW_THREADS,
        TOOL,
        "--input",
        tmp_path / "a.jsonl",
        tmp_path / "b.jsonl",
        "--output-prefix",
        tmp_path / "c",
    ]
    command += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model, "--workers", 2]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert result.returncode == EXIT_DONE and "Warning" not in result.stderr, result.stderr
    store = TokenStore(str(tmp_path / "c"))
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    assert len(store) == 302 and store.document(300)[0].tolist() == [
        *processor.encode("lazy dog"),
        processor.eos_id(),
    ]
    numbers = re.search(r"302 documents, (\d+) tokens, (\d+) loss tokens, \d+ tokens/s", result.stdout)
    assert int(numbers[1]) == store.num_tokens and int(numbers[2]) == store.num_tokens - 302


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        ((), EXIT_DATA, "bad.jsonl:2: text is a number\n  why: "),
        (("--tokenizer-type", "Unknown"), EXIT_USAGE, "--tokenizer-type Unknown is not known"),
        (("--workers", "0"), EXIT_USAGE, "--workers 0 is not a number of processes"),
    ],
)
def test_errors_have_their_exit_codes(model, tmp_path, capsys, options, exit_code, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "ok"}\n{"text": 1}\n')
    common = ["--input", str(tmp_path / "bad.jsonl"), "--output-prefix", str(tmp_path / "c")]
    common += ["--tokenizer-model", model, "--tokenizer-type", "SentencePieceTokenizer"]
    assert main([*common, *options]) == exit_code
    output = capsys.readouterr()
    assert message in output.err and not output.out and not list(tmp_path.glob("c.*"))


@pytest.mark.parametrize("part", ["places.bin", "quarantine.jsonl"])
def test_no_file_of_a_corpus_is_replaced_unasked(part, model, tmp_path, capsys):
    (tmp_path / f"c.{part}").write_text("mine")
    argv = ["--input", "none.txt", "--output-prefix", str(tmp_path / "c")]
    assert main([*argv, "--tokenizer-model", model, "--tokenizer-type", "NullTokenizer"]) == EXIT_USAGE
    message = capsys.readouterr().err
    assert (
        reported_codes(message) == ["already-exists: --output-prefix"]
        and f"holds a corpus: .{part}" in message
    )


def test_eos_can_be_left_out(model, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "The fox"}\n')
    options = ["--tokenizer-model", model, "--tokenizer-type", "SentencePieceTokenizer", "--no-append-eod"]
    assert (
        main(["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "c"), *options])
        == EXIT_DONE
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    assert TokenStore(str(tmp_path / "c")).document(0)[0].tolist() == processor.encode("The fox")


def test_lines_of_a_text_file_are_documents_of_a_corpus(model, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("The fox\n\nlazy dog\nbrown\n")
    options = [
        "--tokenizer-model",
        model,
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--no-append-eod",
        "--overwrite",
    ]
    command = ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "c"), *options]
    processor = sentencepiece.SentencePieceProcessor(model_file=model)
    assert main(command) == EXIT_DONE
    store = TokenStore(str(tmp_path / "c"))
    assert [store.document(i)[0].tolist() for i in range(len(store))] == [
        processor.encode(text) for text in ("The fox", "lazy dog", "brown")
    ]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "Every line of a .txt file that is not blank is a document" in said


def test_images_are_read_below_the_root(tmp_path, capsys):
    """The count of images is printed, and `mkd inspect` shows their places; a limit is checked first."""
    folder, flags = make_smolvlm(tmp_path / "model"), ["--image-root", str(tmp_path)]
    (tmp_path / "a.png").write_bytes(image_file(picture(40, 40)))
    content = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what is it?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "a fox"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    argv = ["--input", str(tmp_path / "a.jsonl"), "--output-prefix", str(tmp_path / "c"), *flags]
    argv += ["--tokenizer-model", str(folder)]
    assert main(argv) == EXIT_DONE
    assert "c: 1 document, " in (printed := capsys.readouterr().out) and ", 1 images, " in printed
    assert (
        inspect(["--input", str(tmp_path / "c"), "--student", str(folder), "--seq-length", "256"])
        == EXIT_DONE
    )
    assert ": 40 x 40 pixels, 80 patches\n" in capsys.readouterr().out
    assert main([*argv, "--max-image-side", "0"]) == EXIT_USAGE
    assert reported_codes(capsys.readouterr().err) == ["out-of-range: is not a number of pixels"]
