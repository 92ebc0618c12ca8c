"""Continue prompts greedily with transformers and its cache: vllm_program.py without vLLM.

python transformers_program.py ASKED.json ANSWER.json
"""

import json
import sys


def main(asked_file: str, answer_file: str) -> None:
    """Answer the question in one file with the other."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with open(asked_file, encoding="utf-8") as file:
        asked = json.load(file)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[asked["dtype"]]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.AutoConfig.from_pretrained(asked["model"], trust_remote_code=False)
    sees_images = getattr(config, "vision_config", None) is not None
    loader = transformers.AutoModelForImageTextToText if sees_images else transformers.AutoModelForCausalLM
    model = loader.from_pretrained(asked["model"], dtype=dtype, trust_remote_code=False, use_safetensors=True)
    model.eval().to(device)
    continuations = []
    with torch.no_grad():
        for ids in asked["ids"]:
            tokens, cache, found = torch.tensor([ids], device=device), None, []
            chosen = []
            for _ in range(asked["max_tokens"]):
                out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
                scores = out.logits[0, -1].float().log_softmax(-1)
                token, cache = int(scores.argmax()), out.past_key_values
                chosen.append(token)
                found.append(float(scores[token]))
                tokens = torch.tensor([[token]], device=device)
            continuations.append({"ids": chosen, "logprobs": found})
    tokenised = []
    if asked["texts"]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(asked["model"], trust_remote_code=False)
        tokenised = [list(tokenizer(text)["input_ids"]) for text in asked["texts"]]
    version = f"transformers {transformers.__version__}"
    with open(answer_file, "w", encoding="utf-8") as file:
        json.dump({"version": version, "continuations": continuations, "tokenised": tokenised}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
