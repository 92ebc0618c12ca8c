"""Tasks with images: the numbers of transformers under every layout, during training too, and bad records."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from mkd.evaluation.tasks import read_tasks
from tests.data.images.tiny_processors import image_file, make_qwen, picture
from tests.reported import refused, reported_codes
from tests.train.command import flags, read_metrics, run_main, write_records
from tests.train.two_processors import with_text, with_weights

CHOICES = ["red", "a brown fox", "over"]
SP = ("--tensor-model-parallel-size", 2, "--sequence-parallel")
LAYOUTS = {
    "one process": (1, ()),
    "TP2 + SP": (2, SP),
    "PP2, micro-batch 2": (2, ("--pipeline-model-parallel-size", 2, "--micro-batch-size", 2)),
    "CP2 DP2": (4, ("--context-parallel-size", 2)),
}


@pytest.fixture(scope="module", params=["Qwen2_5_VL", pytest.param("Qwen3_5Moe", marks=pytest.mark.slow)])
def files(request, tmp_path_factory):
    """Make a model, and tasks whose questions differ by their pictures alone, or have none."""
    folder = tmp_path_factory.mktemp("image_tasks")
    student = with_text(with_weights(make_qwen(folder / "student", request.param), seed=1))
    for seed in (1, 2):
        (student / "pictures" / f"same{seed}.png").write_bytes(image_file(picture(40, 24, seed)))
    asked = dict(question="what is it?", choices=CHOICES, answer=0)
    pictures = [["same1.png"], ["same2.png"], ["3.png", "1.png"], []]
    write_records(folder / "what.jsonl", *({**asked, "images": images} for images in pictures))
    texts = [dict(prompt="what is it?", completion=answer, images=["2.png"]) for answer in CHOICES]
    write_records(folder / "say.jsonl", *texts)
    return folder


@torch.no_grad()
def reference(files):
    """Return ln p of each answer that has images by transformers, in the order of the tasks."""
    folder = files / "student"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    pad, end = (tokenizer.convert_tokens_to_ids(one) for one in ("<|image_pad|>", "<|im_end|>"))
    scores = []
    for task in read_tasks([files / "what.jsonl"], [files / "say.jsonl"]):
        for pair in task.pairs():
            if not pair.images:
                scores.append(None)
                continue
            images = [np.asarray(_open(folder / "pictures" / name)) for name in pair.images]
            seen = processor(images, return_tensors="pt", input_data_format="channels_last")
            content = [*({"type": "image"} for _ in images), {"type": "text", "text": pair.prompt}]
            asked = [{"role": "user", "content": content}]
            answer = [{"role": "assistant", "content": pair.continuation.strip()}]
            prompt, whole = (
                tokenizer.apply_chat_template(messages, add_generation_prompt=not more, return_dict=False)
                for messages, more in ((asked, ()), (asked + answer, answer))
            )
            counts = iter((seen["image_grid_thw"].prod(1) // 4).tolist())
            stop = len(prompt) + whole[len(prompt) :].index(end)
            ids = [one for token in whole[:stop] for one in [token] * (next(counts) if token == pad else 1)]
            ids = torch.tensor([ids])
            logits = model(ids, mm_token_type_ids=(ids == pad).int(), **seen).logits[0, :-1]
            log_p = logits.double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            scores.append(float(log_p[len(prompt) - stop :].sum()))
    return scores


def _open(path):
    from PIL import Image

    return Image.open(path).convert("RGB")


def scores_of(argv: list[str], files) -> list[float]:
    """Return the log-likelihoods of both tasks on this rank."""
    import torch.distributed as dist

    from mkd.config.load import load_config
    from mkd.data.images.conversation import image_reader
    from mkd.evaluation.scores import log_likelihoods
    from mkd.evaluation.task_evaluator import TaskEvaluator
    from mkd.platform import detect
    from mkd.run.one_model import plan_model
    from mkd.tokenizers.hugging_face import load_hugging_face

    plan = plan_model([], load_config(argv).config, dist.get_world_size())
    context, training = plan.join(detect()), plan.config.training
    tokenizer = load_hugging_face(str(files / "student"))
    images = image_reader(files / "student", tokenizer, str(files / "student/pictures"), 1 << 20)
    sizes = dict(seq_length=training.seq_length, micro_batch_size=training.micro_batch_size)
    seen = dict(images=images, sequence_parallel=plan.config.parallel.sequence_parallel)
    tasks = read_tasks([files / "what.jsonl"], [files / "say.jsonl"])
    evaluator = TaskEvaluator.build(tasks, tokenizer, context, vocab_size=400, **sizes, **seen)
    return log_likelihoods(plan.build(context), evaluator.batches).tolist()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_numbers_of_transformers(name, files, ranks):
    world_size, layout = LAYOUTS[name]
    argv = ["--student-hf", files / "student", "--seq-length", 256, "--global-batch-size", 8, *layout]
    results = ranks.run(scores_of, world_size, [str(word) for word in argv], files)
    assert all(one == results[0] for one in results)
    expected = reference(files)
    pairs = [(own, other) for own, other in zip(results[0], expected, strict=True) if other is not None]
    assert len(pairs) == 2 * 9 + 3
    assert [own for own, _ in pairs] == pytest.approx([other for _, other in pairs], rel=1e-5)
    assert results[0][:3] != results[0][3:6], "the picture alone differs"


def test_the_commands_score_images_alone_and_in_training(files, ranks):
    tasks = ("--multiple-choice", files / "what.jsonl", "--completions", files / "say.jsonl")
    shared = ("--image-root", files / "student/pictures", "--seq-length", 256)
    command = [*tasks, "--student-hf", files / "student", "--out", files / "out.json", *shared]
    (alone,) = run_main(ranks, [str(word) for word in command], command="mkd.commands.evaluate")
    assert alone.exit_code == 0, alone.stderr
    found = json.loads((files / "out.json").read_text())
    nats = -sum(reference(files)[-3:])
    assert found["eval/say/ce"] * found["eval/say/num_tokens"] == pytest.approx(nats, rel=1e-5)
    during = ("--eval-multiple-choice", files / "what.jsonl", "--eval-interval", 1, "--eval-iters", 1)
    given = dict(teacher_hf="student", data_path="student/chats.jsonl", image_root="student/pictures")
    argv = [str(word) for word in flags(files, "run", *during, *shared, **given)]
    (trained,) = run_main(ranks, argv)
    assert trained.exit_code == 0, trained.stderr
    first = next(one for one in read_metrics(files / "run") if one["split"] == "tasks")
    for metric in ("accuracy", "accuracy_norm"):
        assert first[f"eval/what/{metric}"] == found[f"eval/what/{metric}"]


@pytest.mark.parametrize(
    ("code", "images", "more"),
    [
        ("image-unreadable: is the URL", ["https://example.com/a.png"], ()),
        ("record-images-not-valid: images is a", "a.png", ()),
        ("images-not-read: has questions with images", ["1.png"], ("--num-fewshot", 1)),
        ("image-outside-root: lies outside of --image-root", ["../config.json"], ()),
        ("longer-than-seq-length: the question with its images and", ["1.png"], ("--seq-length", 32)),
    ],
)
def test_a_bad_record_is_refused(code, images, more, files, ranks, tmp_path):
    records = [dict(question="what?", choices=CHOICES, answer=0, images=images)] * 2
    path = write_records(tmp_path / "bad.jsonl", *records)
    argv = ["--multiple-choice", path, "--student-hf", files / "student", "--seq-length", 256]
    argv += ["--image-root", files / "student/pictures", *more]
    (done,) = run_main(ranks, [str(word) for word in argv], command="mkd.commands.evaluate")
    assert done.exit_code == 65 and reported_codes(done.stderr) == [code], done.stderr
    assert f"{path}, line " in done.stderr or "--num-fewshot" in more


def test_a_model_of_text_refuses_images(files):
    from mkd.evaluation.requests import encode_pairs
    from mkd.tokenizers.hugging_face import load_hugging_face

    pairs = read_tasks([files / "what.jsonl"], [])[0].pairs()
    with refused("images-not-read: the record has images, and the"):
        encode_pairs(pairs, load_hugging_face(str(files / "student")), 64, 400)
