"""Run a step with a teacher that reads another prompt, and compute the same loss with plain transformers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import write_records
from tests.train.rollout_run import EOS

SEQ_LENGTH, RATIO, TEMPERATURE, BETA = 88, 0.5, 2.0, 0.3
NUM_RECORDS, NUM_PACKS = 13, 4
WORDS = ("quick brown", "fox jumps over", "lazy", "the dog is not")
HINT = "Answer {prompt} knowing {solution}."
END = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] + ':' + m.content + '<|endoftext|>' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def make_files(folder: Path) -> Path:
    """Make a student, a teacher of another family, and records of all forms."""
    sizes = dict(num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=3, head_dim=8)
    add_tokenizer(make_model(folder / "student", "qwen3", seed=1, tie_word_embeddings=True, **sizes | EOS))
    other = dict(hidden_size=72, num_hidden_layers=4, intermediate_size=128, vocab_size=330)
    add_tokenizer(make_model(folder / "teacher", "llama", seed=2, **other | EOS))
    for name in ("student", "teacher"):
        (folder / name / "chat_template.jinja").write_text(TEMPLATE)
    write_records(folder / "records.jsonl", *(record_of(i) for i in range(NUM_RECORDS)))
    return folder


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def answer_of(i: int) -> str:
    return " ".join(WORDS[(i + k) % 4] for k in range(i % 3 + 1))


def record_of(i: int) -> dict:
    """Return a record: a text, one turn, two turns, without a context, or with one of its own."""
    question, solution = f"{i} {WORDS[i % 4]}?", {"solution": " ".join(WORDS[: i % 4 + 1])}
    if i % 4 == 0:
        return {"prompt": question, "completion": " " + answer_of(i)} | solution
    turn = [said("user", question), said("assistant", answer_of(i))]
    if i % 4 == 1:
        return {"messages": turn} | solution
    if i % 4 == 2:
        earlier = [said("system", "lazy"), said("user", "fox"), said("assistant", "the dog")]
        return {"messages": earlier + turn} | solution
    own = (
        {},
        {"teacher_prompt": f"{i}: {solution['solution']}"},
        {"teacher_messages": [said("user", "over")]},
    )
    return {"messages": turn} | own[i // 4 % 3]


@dataclass(frozen=True)
class Sides:
    """Ids of both prompts and of the completion, and the loss tokens of the student's whole text."""

    own: list[int]
    theirs: list[int] | None  # None: no context
    completion: list[int]
    earlier: tuple[int, ...] = ()  # tokens of `own` that have loss


def sides_of(record: dict, hf, hint: str = HINT) -> Sides:
    """Return what both models read of a record, from the documentation alone."""

    def encode(text):
        return hf(text)["input_ids"]

    def chat(messages):
        return hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    if "prompt" in record:
        hint = hint.format(**record)
        return Sides(encode(record["prompt"]), encode(hint), encode(record["completion"]) + [0])
    *before, last = record["messages"]
    own = encode(chat(before))
    whole = encode(chat(before) + last["content"] + END)
    assert whole[: len(own)] == own, "tokens do not cross the border"
    theirs = None
    if "teacher_messages" in record:
        theirs = record["teacher_messages"]
    elif "teacher_prompt" in record:
        theirs = [*before[:-1], said("user", record["teacher_prompt"])]
    elif "solution" in record:
        theirs = [*before[:-1], said("user", hint.format(prompt=before[-1]["content"], **record))]
    earlier: tuple[int, ...] = ()
    if len(before) > 1:
        start = len(encode(chat(before[:2])))
        earlier = tuple(range(start, start + len(encode(before[2]["content"] + END))))
    return Sides(own, None if theirs is None else encode(chat(theirs)), whole[len(own) :], earlier)


def write_config(folder: Path, live: bool = False, **context) -> Path:
    """Write a configuration whose teacher has the context."""
    path = folder / ("live.yaml" if live else "context.yaml")
    model = {"weights": "live"} if live else {"hf": str(folder / "teacher")}
    teacher = model | {"name": "knows", "context": {"user": HINT, "missing": "skip"}}
    teacher["context"] |= context
    path.write_text(json.dumps({"teachers": [teacher]}))
    return path


def argv(files: Path, run: str, *more: object, config: Path | None = None) -> list[str]:
    """Return the command line of a run whose steps have all records."""
    words: list[object] = ["--student-hf", files / "student", "--config", config or write_config(files)]
    words += ["--data-path", files / "records.jsonl", "--seq-length", SEQ_LENGTH, "--no-shuffle"]
    words += ["--kd-ratio", RATIO, "--kd-temperature", TEMPERATURE, "--kd-divergence", "jsd"]
    words += ["--kd-jsd-beta", BETA, "--global-batch-size", NUM_PACKS, "--train-iters", 4, "--lr", 1e-3]
    words += ["--log-dir", files / run, "--data-cache-path", files / "cache"]
    return [str(word) for word in (*words, *more)]


def reference(folder: Path, out_dir: Path, *, live: bool = False) -> dict[str, float]:
    """Write float64 gradients as a folder; return both losses and their sum. Every record runs alone."""
    from tests.train.hf_gradients import load

    student = load(folder / "student")
    teacher = student if live else load(folder / "teacher").requires_grad_(False)
    found = backward(folder, student, teacher)
    for parameter in student.parameters():
        parameter.data = parameter.grad
    student.save_pretrained(out_dir)
    return found


def backward(folder: Path, student: torch.nn.Module, teacher: torch.nn.Module) -> dict[str, float]:
    """Add the gradients of a step to those of the student; return both losses, their sum and the counts."""
    from transformers import AutoTokenizer

    from mkd.losses.dense_reference import dense_kd
    from tests.losses.objectives import objective_of

    hf = AutoTokenizer.from_pretrained(folder / "student")
    records = [sides_of(record_of(i), hf) for i in range(NUM_RECORDS)]
    num_tokens = sum(len(one.completion) + len(one.earlier) for one in records)
    num_taught = sum(len(one.completion) for one in records if one.theirs is not None)
    found = dict(ce=0.0, kd=0.0)
    for one in records:
        ids = torch.tensor(one.own + one.completion)
        logits = student(ids[None]).logits[0]
        rows = torch.arange(len(one.own) - 1, len(ids) - 1)
        places = torch.cat([torch.tensor(one.earlier, dtype=torch.int64) - 1, rows])
        ce = torch.nn.functional.cross_entropy(logits[places], ids[places + 1], reduction="sum") / num_tokens
        kd = torch.zeros((), dtype=torch.float64)
        if one.theirs is not None:
            with torch.no_grad():
                theirs = teacher(torch.tensor(one.theirs + one.completion)[None]).logits[0]
            theirs = theirs[len(one.theirs) - 1 : -1]
            sizes = dict(student_vocab_size=logits.shape[1], teacher_vocab_size=theirs.shape[1], kd_ratio=1.0)
            objective = objective_of(**sizes, temperature=TEMPERATURE, divergence="jsd", jsd_beta=BETA)
            labels, mask = ids[rows + 1], torch.ones(len(rows), dtype=torch.float64)
            kd = dense_kd(logits[rows], theirs, labels, mask, objective).loss / num_taught
        ((1 - RATIO) * ce + RATIO * kd).backward()
        found["ce"] += ce.item()
        found["kd"] += kd.item()
    found["loss"] = (1 - RATIO) * found["ce"] + RATIO * found["kd"]
    return found | {"num_loss_tokens": num_tokens, "num_taught": num_taught}
