"""Set up a rollout server: find it, check that it serves the student, and say where records go."""

from __future__ import annotations

import math
import uuid
from functools import partial
from pathlib import Path

import numpy as np

from mkd.checkpoint.folders import oldest_iteration
from mkd.errors import UsageError
from mkd.kinds.sampled.server.rollout_record import RolloutRecord
from mkd.kinds.sampled.server.server_client import Refused, ServerClient, ServerModel, find_model
from mkd.kinds.sampled.server.server_source import ServerSource
from mkd.kinds.sampled.sources.text_source import SourceParts
from mkd.operations.run_folders import log_folder
from mkd.parallel.context import ParallelContext
from mkd.resolve.run_plan import Plan
from mkd.tokenizers.tokenizer import Tokenizer

PROBE_TOKENS = 200
PROBE_TEXT = "def f(x):\n    return 12345 + x  # caf\u00e9, \u6587\u5b57 \U0001f600"


def build_server_source(parts: SourceParts) -> ServerSource:
    """Return the source. Collective; raises UsageError on every rank if the server cannot serve this run."""
    plan, engine, state = parts.plan, parts.engine, parts.state
    rollout, checkpoint, context = plan.config.rollout, plan.config.checkpoint, engine.context
    client = ServerClient((rollout.rollout_server_url or "").rstrip("/"), rollout.rollout_server_timeout_s)
    model = _find_once(client, plan, context)
    record = None
    if checkpoint.save:
        save = Path(checkpoint.save)
        record = RolloutRecord(save / "rollouts", parts.digest, partial(oldest_iteration, save))
        if context.rank == 0 and not parts.resumes:
            record.forget(math.inf)
    return ServerSource(
        parts=state.models,
        context=context,
        sampling=parts.sampling,
        parameters_gathered=engine.parameters_gathered,
        export=parts.export,
        client=client,
        model=model.name,
        folder=log_folder(plan.config) / "rollout_weights",
        run_id=uuid.uuid4().hex[:12],
        max_staleness=rollout.max_staleness,
        num_rows=plan.student.shape.vocab_size,
        record=record,
    )


def _find_once(client: ServerClient, plan: Plan, context: ParallelContext) -> ServerModel:
    """Ask on rank 0 alone. Collective."""
    found: ServerModel | UsageError | None = None
    if context.rank == 0:
        assert plan.tokenizers is not None, "a run reads text"
        try:
            found = find_model(client, plan.config.training.seq_length)
            check_tokenizer(client, found.name, plan.tokenizers.student, "student")
        except UsageError as error:
            found = error
    found = context.broadcast_object(found)
    if isinstance(found, UsageError):
        found.on_all_ranks = True
        raise found
    assert found is not None
    return found


def _pieces(tokenizer: Tokenizer) -> str:
    """Return the text of evenly spaced tokens, which another vocabulary would cut in other places."""
    spaced = np.linspace(0, len(tokenizer.token_bytes) - 1, PROBE_TOKENS).astype(np.int64).tolist()
    pieces = [tokenizer.token_bytes[i] or b"" for i in dict.fromkeys(spaced)]
    return " ".join(piece.decode("utf-8", "ignore") for piece in pieces)


def check_tokenizer(client: ServerClient, model: str, tokenizer: Tokenizer, role: str) -> None:
    """Raise UsageError if the server turns a text into other ids. A server without a tokenizer is fine."""
    text = PROBE_TEXT + _pieces(tokenizer)
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    try:
        theirs = client.post("/tokenize", body)["tokens"]
    except Refused:
        return
    ours = list(tokenizer.encode_continuation(text))
    if theirs != ours:
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if len(set(pair)) > 1), 0)
        raise UsageError(
            f"the rollout server {client.url} has another tokenizer than the {role}",
            f"from token {place} on, a text has ids {theirs[place : place + 4]} there and "
            f"{ours[place : place + 4]} here",
            f"start it with the {role}'s folder and without --tokenizer",
            code="rollout-server-not-ready",
        )
