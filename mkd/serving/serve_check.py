"""Compare the greedy text of an export in a server with mkd's own scores of the same tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from mkd.convert.models import load_from_hf
from mkd.convert.parity import mkd_logits
from mkd.errors import CheckpointError
from mkd.parallel.context import ParallelContext
from mkd.plan.models.model_shape import ModelShape
from mkd.platform import detect
from mkd.serving.served_prompts import ServedPrompts, prompts_of
from mkd.serving.server_process import Answer, Asked, ask, has_vllm

TOLERANCES = {"fp32": 1e-3, "bf16": 0.25}
"""Largest difference of two log-probabilities, nats, that rounding explains. mkd computes in fp32."""


@dataclass(frozen=True)
class ServeCheck:
    """An export, a server, and what they may differ by."""

    folder: Path
    server: str  # vllm, transformers, or auto
    python: str | None  # of the server; None: mkd's own
    dtype: str | None  # of the server; None: bf16 on a GPU, else fp32
    prompts: Path | None
    max_tokens: int
    tolerance: float | None
    timeout_s: float


@dataclass(frozen=True)
class Agreement:
    """Differences over all tokens that the server has generated, in nats."""

    version: str
    dtype: str
    num_tokens: int
    largest: float  # |ln p of the server - ln p of mkd|
    mean: float
    regret: float  # largest ln p of mkd's best token - ln p of the server's token, both by mkd
    num_best: int  # tokens that are mkd's best ones, too
    wrong_texts: tuple[str, ...]  # which the server reads as other tokens

    def lines(self, tolerance: float) -> Iterator[str]:
        """Yield the result for people."""
        yield f"server          {self.version}, {self.dtype}, greedy; mkd in fp32"
        yield f"tokens          {self.num_tokens}, of which {self.num_best} are mkd's most likely ones, too"
        yield f"|d ln p|        {self.largest:.3g}, mean {self.mean:.3g} nats; tolerance {tolerance:g}"
        yield f"regret          {self.regret:.3g} nats; tolerance {2 * tolerance:g}"

    def problems(self, tolerance: float) -> Iterator[str]:
        """Yield what is beyond the tolerance."""
        if self.wrong_texts:
            yield f"the server reads {self.wrong_texts[0]!r} as other tokens"
        if not self.largest <= tolerance:  # NaN too
            yield f"log-probabilities differ by up to {self.largest:.3g} nats"
        if not self.regret <= 2 * tolerance:  # each of the two tokens may be off by the tolerance
            yield f"the server chose a token that is {self.regret:.3g} nats less likely than mkd's"


def run(check: ServeCheck) -> None:
    """Print the comparison. Raises CheckpointError beyond the tolerance, or if the server cannot run."""
    shape = ModelShape.from_hf_dir(check.folder)
    context = ParallelContext.create(detect())
    python = check.python or sys.executable
    server = check.server
    if server == "auto":
        server = "vllm" if has_vllm(python) else "transformers"
        if server == "transformers":
            print(
                "vLLM is not installed here (--server-python PYTHON of its environment): using transformers"
            )
    dtype = check.dtype or ("bf16" if context.device.type == "cuda" else "fp32")
    prompts = prompts_of(check.folder, shape.vocab_size, check.prompts)
    longest = max(map(len, prompts.ids)) + check.max_tokens
    asked = Asked(str(check.folder.resolve()), dtype, prompts.ids, prompts.texts, check.max_tokens, longest)
    answer = ask(server, check.python, asked, check.timeout_s)
    found = compare(check.folder, shape, context, prompts, answer, dtype)
    context.leave()
    tolerance = TOLERANCES[dtype] if check.tolerance is None else check.tolerance
    print("\n".join(found.lines(tolerance)))
    problems = [*found.problems(tolerance)]
    if problems:
        raise CheckpointError(
            f"{found.version} does not serve {check.folder} as mkd computes it: {'; '.join(problems)}",
            "what the server's users see is not what was trained",
            "check the export with `mkd parity`; if that agrees, the server computes another model",
            code="parity-beyond-tolerance",
        )
    print("agreed")


def compare(
    folder: Path,
    shape: ModelShape,
    context: ParallelContext,
    prompts: ServedPrompts,
    answer: Answer,
    dtype: str,
) -> Agreement:
    """Score the server's tokens with mkd's model of the folder, in fp32, all continuations in one pack."""
    model = load_from_hf(folder, shape, torch.float32, context)
    pairs = [*zip(prompts.ids, answer.continuations, strict=True)]
    documents = [torch.tensor([*prompt, *ids]) for prompt, (ids, _) in pairs]
    logits = mkd_logits(model, documents, context.device)  # [tokens of all documents, v]
    gaps, regrets, start = [], [], 0
    for document, (prompt, (ids, logprobs)) in zip(documents, pairs, strict=True):
        rows = logits[start + len(prompt) - 1 : start + len(document) - 1].double().log_softmax(-1)
        own = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
        gaps.append((own - torch.tensor(logprobs, dtype=torch.float64)).abs())
        regrets.append(rows.max(dim=1).values - own)
        start += len(document)
    gap, regret = torch.cat(gaps), torch.cat(regrets)
    read = zip(prompts.texts, prompts.ids, answer.tokenised, strict=False)
    return Agreement(
        version=answer.version,
        dtype=dtype,
        num_tokens=len(gap),
        largest=float(gap.max()),
        mean=float(gap.mean()),
        regret=float(regret.max()),
        num_best=int((regret == 0).sum()),
        wrong_texts=tuple(text for text, ours, theirs in read if ours != theirs),
    )
