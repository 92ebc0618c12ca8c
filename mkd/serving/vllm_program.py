"""Continue prompts greedily with vLLM: a program that needs vLLM alone, not mkd.

    python vllm_program.py ASKED.json ANSWER.json

ASKED: model (folder), dtype, ids (a list of token ids for each prompt), texts, max_tokens, max_length.
ANSWER: version, continuations (ids and logprobs, nats, of each prompt), tokenised (ids of each text).
"""

import json
import os
import sys

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def main(asked_file: str, answer_file: str) -> None:
    """Answer the question in one file with the other."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB; vLLM takes half the memory without it
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder
    import vllm

    with open(asked_file, encoding="utf-8") as file:
        asked = json.load(file)
    server = vllm.LLM(
        model=asked["model"],
        dtype=DTYPES[asked["dtype"]],
        max_model_len=asked["max_length"],
        enforce_eager=True,  # a check of a minute needs no compiled graphs
        skip_tokenizer_init=not asked["texts"],
        gpu_memory_utilization=asked["gpu_share"],
        seed=0,
    )
    greedy = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], logprobs=0, ignore_eos=True, detokenize=False
    )
    done = server.generate([{"prompt_token_ids": ids} for ids in asked["ids"]], greedy)
    continuations = []
    for one in done:
        ids = list(one.outputs[0].token_ids)
        found = [place[token].logprob for token, place in zip(ids, one.outputs[0].logprobs)]  # noqa: B905
        continuations.append({"ids": ids, "logprobs": found})
    tokenised = [list(server.get_tokenizer()(text)["input_ids"]) for text in asked["texts"]]
    answer = {"version": f"vLLM {vllm.__version__}", "continuations": continuations, "tokenised": tokenised}
    with open(answer_file, "w", encoding="utf-8") as file:
        json.dump(answer, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
