"""Chat templates of released models, read from the wheel of TRL, whose marked versions are the oracle."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile

import pytest
from jinja2.exceptions import TemplateError

from mkd.data.records.parsing import parse_row
from mkd.errors import DataError
from mkd.tokenizers.chat_input import ChatSettings
from mkd.tokenizers.chat_template import with_parts
from mkd.tokenizers.load import load_tokenizer
from tests.reported import Reported
from tests.tokenizers.chat_templates import INLINE, ONE_CALL, PLAIN, REPEATED, ROUNDS, THINK, TOOLS, TWO_CALLS
from tests.tokenizers.trained import train_hf_tokenizer

pytestmark = pytest.mark.download

WHEEL = "trl==1.16.0"
BAR = "\uff5c"
CONTROL = re.compile(
    r"<\|[\w]+\|>|</s>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<end_of_utterance>|\[/?[A-Z_]+\]"
    rf"|<\|?tool_\w+\|?>|<{BAR}[^>]*?{BAR}>"
)
END = {  # beginning of a template's name -> the token that ends a completion
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseek": f"<{BAR}end\u2581of\u2581sentence{BAR}>",
    "gemma4": "<turn|>",
    "diffusion_gemma": "<turn|>",
    "gemma": "<end_of_turn>",
    "glm": "<|endoftext|>",
    "gptoss": "<|return|>",
    "idefics": "<end_of_utterance>",
    "smolvlm": "<end_of_utterance>",
    "llama3": "<|eot_id|>",
    "muse": "<|eot|>",
    "phi": "<|end|>",
}
OTHER_STOPS = ("<|call|>", "<|eom_id|>")  # listed in the generation_config.json of such models
CONVERSATIONS = {
    "plain": (PLAIN, None),
    "system": ([{"role": "system", "content": "Be brief."}, *PLAIN], None),
    "repeated": (REPEATED, None),
    "inline": (INLINE, None),
    "think": (THINK, None),
    "call": ([ONE_CALL[0], {**ONE_CALL[1], "content": ""}, *ONE_CALL[2:]], TOOLS),
    "rounds": (ROUNDS, TOOLS),
    "calls": (TWO_CALLS, TOOLS),
    "parts": ([{**one, "content": [{"type": "text", "text": one["content"]}]} for one in PLAIN], None),
}
WITH_CALLS = {"call", "rounds", "calls"}
NO_TOOLS = {
    "deepseek_r1_distill",
    "deepseekv3",
    "idefics3",
    "llama3",
    "phi3",
    "phi3_5",
    "qwen2_5_vl",
    "smolvlm",
}
REFUSED = {  # templates that drop tools, all calls or the second one; a turn with a call has no end
    **dict.fromkeys(
        ((name, case) for name in NO_TOOLS for case in WITH_CALLS),
        "chat-template-drops-tools: does not write the record's tools",
    ),
    **dict.fromkeys(
        (("lfm2", case) for case in WITH_CALLS), "chat-template-drops-tools: does not write its tool_calls"
    ),
    ("gptoss", "calls"): "chat-template-drops-tools: does not write its tool_calls",
    **dict.fromkeys((("diffusion_gemma", case) for case in WITH_CALLS), "chat-turn-not-found"),
}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    """Return name -> text of all templates."""
    folder = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        subprocess.run([*command, "--dest", str(folder), WHEEL], check=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        pytest.skip(f"{WHEEL} could not be downloaded")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        named = [name for name in wheel.namelist() if name.endswith(".jinja")]
        return {name.split("/")[-1].removesuffix(".jinja"): wheel.read(name).decode() for name in named}


def open_both(name, template, folder, chat):
    """Return (transformers' tokenizer, mkd's, strings of the control tokens) for a template."""
    end = next((token for start, token in END.items() if name.startswith(start)), "<|im_end|>")
    controls = [end, "<s>", *sorted(set(CONTROL.findall(template)) - {end})]
    hf = train_hf_tokenizer(template, specials=controls, vocab_size=600)
    hf.bos_token = "<s>"
    hf.save_pretrained(folder)
    stops = [hf.convert_tokens_to_ids(one) for one in (end, *OTHER_STOPS) if one in controls]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return hf, load_tokenizer("HuggingFaceTokenizer", str(folder), chat), controls


def as_read(messages, tools):
    """Return the conversation of a record, whose parts without images become texts."""
    return parse_row(json.dumps({"messages": messages, "tools": tools}).encode()).values[0]


def reads_texts(hf):
    """Return True if the template reads contents that are texts."""
    try:
        return PLAIN[0]["content"] in hf.apply_chat_template(PLAIN, tokenize=False)
    except (TemplateError, TypeError):
        return False


def marked(hf, messages, tools):
    """Return (ids, marks) of transformers; None if the template refuses the conversation or marks nothing."""
    try:
        found = hf.apply_chat_template(
            messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
    except (TemplateError, TypeError, ValueError, KeyError):
        return None
    return (found["input_ids"], found["assistant_masks"]) if sum(found["assistant_masks"]) else None


def conventions(hf, text, controls):
    """Return the places where marks follow other conventions: control tokens, header, tags of thinking."""
    ask = [{"role": "user", "content": "a"}]
    bare, prompt = (
        hf.apply_chat_template(ask, tokenize=False, add_generation_prompt=p) for p in (False, True)
    )
    header = prompt.removeprefix(bare).strip()
    words = [*controls, "<think>", "</think>", "assistant", *filter(None, [header])]
    return [found.span() for word in words for found in re.finditer(re.escape(word), text)]


def regions(mask):
    """Return (first, last) of each run of tokens with loss."""
    padded = [0, *mask, 0]
    edges = [i for i in range(1, len(padded)) if padded[i] != padded[i - 1]]
    return [(start - 1, end - 2) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def check_turns(text, offsets, mask, marks, allowed, messages):
    """Check that a mask has the turns' texts and ends, and differs from the marks by conventions only."""
    found = regions(mask)
    assert len(found) == sum(one["role"] == "assistant" for one in messages)
    for _, last in found:  # the token that closes a turn has loss
        assert any(start <= offsets[last][0] and offsets[last][1] <= end for start, end in allowed)
    for (start, end), mine, theirs in zip(offsets, mask, marks, strict=True):
        if mine != theirs and text[start:end].strip():
            assert any(first <= start and end <= last for first, last in allowed), text[start:end]


def test_marks_decide_and_turns_without_them_agree(templates, tmp_path):
    """The ids are those of transformers. Turns differ from marks by conventions only, or are refused."""
    right, refusals = 0, {}
    for name in sorted(one for one in templates if one.endswith("_training")):
        model = name.removesuffix("_training")
        hf, turns, controls = open_both(model, templates[name], tmp_path / name, ChatSettings("turns"))
        _, by_marks, _ = open_both(model, templates[name], tmp_path / name, ChatSettings())
        for case, record in CONVERSATIONS.items():
            conversation = as_read(*record)
            theirs = conversation.messages if reads_texts(hf) else with_parts(conversation.messages)
            expected = marked(hf, theirs, conversation.tools)
            if expected is None:
                continue
            try:
                ids, mask = turns.apply_chat_template(conversation)
            except DataError as error:
                refusals[model, case] = Reported.of(error)
                if error.code == "chat-turn-not-found":  # with marks it is not needed
                    assert by_marks.apply_chat_template(conversation) == expected
                continue
            assert ids == expected[0] and by_marks.apply_chat_template(conversation) == expected
            text = turns.render(conversation)
            offsets = hf.backend_tokenizer.encode(text, add_special_tokens=False).offsets
            allowed = conventions(hf, text, controls)
            check_turns(text, offsets, mask, expected[1], allowed, conversation.messages)
            right += 1
    assert refusals == REFUSED
    assert right == 232


def test_templates_as_released_give_the_ids_of_transformers(templates, tmp_path):
    """Llama 3.1 and 3.2 write the date, and allow one call at a time."""
    for name in ("llama3_1", "llama3_2"):
        hf, tokenizer, controls = open_both(name, templates[name], tmp_path / name, ChatSettings())
        for record in CONVERSATIONS.values():
            if record[0] is TWO_CALLS:
                continue
            one = as_read(*record)
            ids, mask = tokenizer.apply_chat_template(one)
            assert ids == hf.apply_chat_template(one.messages, tools=one.tools)["input_ids"]
            parts = [hf.decode(ids[first : last + 1]) for first, last in regions(mask)]
            assert len(parts) == sum(message["role"] == "assistant" for message in one.messages)
            assert all(part.endswith("<|eot_id|>") for part in parts)
