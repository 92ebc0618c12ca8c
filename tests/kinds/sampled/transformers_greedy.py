"""Continue prompts greedily with transformers in fp32, and score given completions, as a process of its own.

In it, flash-linear-attention cannot be imported: transformers would compute with its kernels.

python -m tests.kinds.sampled.transformers_greedy FOLDER NEW_TOKENS < pairs.json
"""

from __future__ import annotations

import json
import subprocess
import sys

from tests.ranks import REPOSITORY


def continued(folder, pairs: list[tuple[list[int], list[int]]], new_tokens: int) -> list[tuple[list, list]]:
    """Return transformers' completion of each prompt, and its ln p of the completion in the pair."""
    command = [sys.executable, "-m", __name__, str(folder), str(new_tokens)]
    done = subprocess.run(command, input=json.dumps(pairs), capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: str, new_tokens: str) -> None:
    sys.modules["fla"] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoModelForCausalLM

    options = dict(attn_implementation="eager", experts_implementation="eager")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()
    settings = dict(do_sample=False, max_new_tokens=int(new_tokens), eos_token_id=None, pad_token_id=0)
    found = []
    for prompt, ids in json.load(sys.stdin):
        with torch.no_grad():
            made = model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
            scores = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        log_p = scores.double().log_softmax(1)[range(len(ids)), ids].tolist()
        found.append((made, log_p))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
