"""Test the exam of pictures against transformers without a cache, and on a model that does not look."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForImageTextToText

from mkd.data.images.conversation import image_reader
from mkd.tokenizers.chat_input import Conversation
from mkd.tokenizers.load import load_tokenizer
from tests.tools.vlm.small_pictures import make_tiny, write_pictures
from tools.vlm.emoji_pictures import QUESTIONS, STYLES, conversation, read_pixels
from tools.vlm.picture_answers import Examiner, PictureExam
from tools.vlm.small_vlm import END, cut_vlm, num_image_tokens, num_parameters, prompt_ids


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    named = write_pictures(folder)
    return folder, named, read_pixels(folder, STYLES[1], named)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def exam(pictures):
    return PictureExam.of(pictures[2], pictures[1])


def test_wrong_names_are_of_the_same_group_and_swapped_pictures_of_another(exam):
    for one, names, groups, other in zip(
        exam.named, exam.choices["name"], exam.choices["group"], exam.swapped.tolist(), strict=True
    ):
        assert names[0] == one.name and len(set(names)) == len(names)
        assert {each.group for each in exam.named if each.name in names} == {one.group}
        assert groups[0] == one.group and sorted(groups) == ["animals", "things"]
        assert exam.named[other].group != one.group


def test_a_part_of_an_exam_keeps_pictures_and_names_together(exam):
    part = exam.part(3)
    for number, one in enumerate(part.named):
        old = exam.named.index(one)
        assert torch.equal(part.shown(False)[number], exam.pixels[old])
        assert torch.equal(part.shown(True)[number], exam.pixels[exam.swapped[old]])


def test_results_equal_those_of_whole_conversations(tiny, exam):
    """Run every conversation on its own, without a cache."""
    result, logps = Examiner(tiny).examine(exam)
    model = AutoModelForImageTextToText.from_pretrained(tiny).eval()
    likely, ce = {}, []
    for question, found in zip(QUESTIONS, logps, strict=True):
        prompt, tokenizer = prompt_ids(tiny, question.text, num_image_tokens(model.config))
        for number, texts in enumerate(exam.choices[question.key]):
            scores = []
            for place, text in enumerate(texts):
                ids = tokenizer(f" {text}{END}", add_special_tokens=False)["input_ids"]
                inputs = dict(
                    input_ids=torch.tensor([prompt + ids]), pixel_values=exam.pixels[None, None, number]
                )
                with torch.no_grad():
                    logits = model(**inputs).logits[0, len(prompt) - 1 : -1]
                expected = F.log_softmax(logits, -1)
                own = expected.gather(1, torch.tensor(ids)[:, None])
                scores.append(float(own.sum()))
                if place == 0:
                    assert torch.allclose(found[number, : len(ids)], expected, atol=1e-5)
                    ce += own.flatten().tolist()
            likely.setdefault(question.key, []).append(scores.index(max(scores)) == 0)
    assert result.name_of_4 == pytest.approx(sum(likely["name"]) / len(likely["name"]))
    assert result.group == pytest.approx(sum(likely["group"]) / len(likely["group"]))
    assert result.ce == pytest.approx(-sum(ce) / len(ce), rel=1e-5)
    assert (result.kl, result.top1) == (0.0, 1.0)


def test_a_model_that_does_not_look_answers_swapped_pictures_alike(tiny, exam):
    looks, blind = Examiner(tiny), Examiner(tiny)
    with torch.no_grad():
        blind.model.model.connector.modality_projection.proj.weight.zero_()
    right, logps = looks.examine(exam)
    swapped, _ = looks.examine(exam, is_swapped=True, teacher=logps)
    assert swapped.kl > 1e-6 and swapped.ce != right.ce
    results = [blind.examine(exam, is_swapped=one, teacher=logps)[0] for one in (False, True)]
    assert results[0] == results[1] and results[0].kl > 0


def test_mkd_reads_the_tokens_that_the_exam_asks_with(tiny, pictures, exam):
    folder, named, _ = pictures
    reader = image_reader(tiny, load_tokenizer("HuggingFaceTokenizer", str(tiny)), str(folder), 1 << 20)
    for question in QUESTIONS:
        turns = conversation(f"{STYLES[1]}/{named[0].file}", named[0], question)["messages"]
        image = turns[0]["content"][0].pop("image")
        ids, loss, (found,) = reader.encode(Conversation(turns), [image])
        prompt, tokenizer = prompt_ids(tiny, question.text, found.tokens - 3)
        answer = tokenizer(f" {getattr(named[0], question.key)}{END}", add_special_tokens=False)["input_ids"]
        assert ids.tolist()[: len(prompt) + len(answer)] == prompt + answer
        assert loss.nonzero()[0].tolist() == list(range(len(prompt), len(prompt) + len(answer)))


def test_answers_are_texts(tiny, exam):
    written = Examiner(tiny).answers(exam.pixels[:2], QUESTIONS[0])
    assert len(written) == 2 and not any(END in text for text in written)


def test_a_cut_keeps_the_first_layer_and_the_last_ones(tiny, tmp_path):
    cut_vlm(tiny, tmp_path / "cut", 2, 1)
    whole, cut = Examiner(tiny).model.model, Examiner(tmp_path / "cut").model.model
    for kept, own in ((0, 0), (2, 1)):
        one, other = whole.text_model.layers[kept].state_dict(), cut.text_model.layers[own].state_dict()
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert len(cut.vision_model.encoder.layers) == 1
    assert num_parameters(tmp_path / "cut")["connector"] == num_parameters(tiny)["connector"]
    cut_vlm(tiny, tmp_path / "copy", 3, 3)
    one, other = Examiner(tmp_path / "copy").model.state_dict(), Examiner(tiny).model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in other)
