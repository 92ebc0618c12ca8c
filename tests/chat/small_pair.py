"""Tiny models with a chat template, and the greedy completions of transformers."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

import torch

from tests.tiny_models import make_model
from tests.tokenizers.trained import train_hf_tokenizer
from tests.train.command import call_main

NEW_TOKENS = 24
TEXT = "The quick brown fox"


def make_chat_model(folder: Path, family: str = "llama", **sizes) -> Path:
    """Make a tiny model that completes texts and conversations."""
    make_model(folder, family, vocab_size=384, **sizes)
    train_hf_tokenizer().save_pretrained(folder)
    return folder


def run_command(name: str, argv: list, typed: str = "") -> tuple[int, str, str]:
    """Run `mkd NAME` on this rank of the pool with `typed` on stdin; return (exit code, stdout, stderr)."""
    earlier, sys.stdin = sys.stdin, io.StringIO(typed)
    try:
        return call_main([str(one) for one in argv], f"mkd.commands.{name}")
    finally:
        sys.stdin = earlier


def run_directly(name: str, argv: list) -> tuple[int, str]:
    """Run `mkd NAME` in this process, up to an error before torch is needed; return (exit code, stderr)."""
    from importlib import import_module

    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr):
        code = import_module(f"mkd.commands.{name}").main([str(one) for one in argv])
    return code, stderr.getvalue()


def sampled(argv: list, out: Path) -> list[dict]:
    """Run `mkd sample ... --out FILE` on this rank, and return the entries of the file on rank 0."""
    code, _, stderr = run_command("sample", [*argv, "--out", out])
    assert code == 0, stderr
    is_first = os.environ.get("LOCAL_RANK", "0") == "0" and out.exists()
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if is_first else []


def greedy_ids(folders: list[Path], prompt: str) -> list[list[int]]:
    """Return the ids that each model writes greedily after a text and after a message, in mkd's engine."""
    from mkd.chat.generation import Generation
    from mkd.chat.named_model import ModelsRequest
    from mkd.chat.sampled_prompts import read_asked, sample_prompts, tokenised
    from mkd.chat.writer import load_writers, open_readers
    from mkd.platform import detect

    found = []
    for folder in folders:
        readers = open_readers(ModelsRequest(str(folder), dtype="fp32"), is_cuda=False, num_ranks=1)
        asked = read_asked([prompt], (), False, None) + read_asked([prompt], (), True, "Be brief.")
        generation = Generation(NEW_TOKENS, 0.0, 1.0, 0)
        requests = tokenised(readers, asked, 1)
        (writer,) = load_writers(readers, detect())
        found += [one.ids.tolist() for *_, (one,) in sample_prompts([writer], asked, requests, generation)]
        writer.context.close()
    return found


@torch.no_grad()
def generated(folder: Path, prompts: list[list[int]], stops: list[str]) -> list[list[int]]:
    """Return the greedy completions of transformers, which never writes rows without a token.

    On a GPU if there is one: where fla is installed, its kernels take no tensors of the CPU.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    unused = sorted(set(range(model.config.vocab_size)) - set(tokenizer.get_vocab().values()))
    settings = dict(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=tokenizer.convert_tokens_to_ids(stops),
        pad_token_id=0,
        suppress_tokens=unused,
    )
    rows = [torch.tensor([ids], device=device) for ids in prompts]
    return [model.generate(row, **settings)[0, row.shape[1] :].tolist() for row in rows]
