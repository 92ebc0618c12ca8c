"""An agent of another process that plays a toy game with a tool, and writes records.

    python tool_game.py FOLDER GROUPS

The student asks a counter (its tool) by writing any tokens; the tool answers how many it wrote. The reward is
the number of short turns. Only the lines of `play` and `write_groups` know the form of records.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

TURNS, TURN_TOKENS = 3, 6


@torch.no_grad()
def play(model, tokenizer, number: int, member: int) -> dict:
    """Return the record of one trajectory: prompt, and turns of the student with results of the tool."""
    generator = torch.Generator().manual_seed(1000 * number + member)
    ids = tokenizer.encode(f"{number}: quick brown fox")
    loss, logp, short = [0] * len(ids), [None] * len(ids), 0
    for _ in range(TURNS):
        count = 0
        while count < TURN_TOKENS:
            scores = model(torch.tensor([ids])).logits[0, -1].double().log_softmax(0)
            allowed = scores.exp()[: len(tokenizer)]  # rows of the model beyond the tokenizer have no text
            token = int(torch.multinomial(allowed, 1, generator=generator))
            ids.append(token), loss.append(1), logp.append(scores[token].item())
            count += 1
            if token % 4 == 0:
                break
        answer = tokenizer.encode(f" lazy {count}.")
        ids, loss, logp = ids + answer, loss + [0] * len(answer), logp + [None] * len(answer)
        short += count < TURN_TOKENS
    name = f"game-{number}-{member}"
    return dict(id=name, group=f"game-{number}", ids=ids, loss=loss, logp=logp, reward=short, finish="stop")


def read_progress(folder: Path) -> dict:
    while not (folder / "progress.json").exists():
        time.sleep(0.05)
    return json.loads((folder / "progress.json").read_text())


def write_groups(folder: Path, groups: int, stop=lambda: False, ahead: int = 2) -> None:
    """Write the groups that the folder does not have yet, a file each, at most `ahead` steps early."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    version, model, tokenizer = None, None, None
    for number in range(groups):
        if (folder / f"group_{number:05d}.jsonl").exists():
            continue
        progress = read_progress(folder)
        while progress["complete_groups"] >= ahead * progress["groups_of_a_step"] and not stop():
            time.sleep(0.05)
            progress = read_progress(folder)
        if stop():
            return
        if progress["version"] != version:
            model = AutoModelForCausalLM.from_pretrained(progress["weights"], dtype=torch.float32).eval()
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(progress["weights"])
            version = progress["version"]
        records = [play(model, tokenizer, number, member) for member in range(progress["samples_per_prompt"])]
        lines = [json.dumps(record | {"version": version, "tag": "game"}) + "\n" for record in records]
        draft = folder / f".group_{number:05d}.partial"
        draft.write_text("".join(lines))
        os.replace(draft, folder / f"group_{number:05d}.jsonl")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_groups(Path(sys.argv[1]), int(sys.argv[2]))
