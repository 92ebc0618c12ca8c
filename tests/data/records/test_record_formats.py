"""Files of other trainers, with what apply_chat_template of transformers makes of them as the reference."""

from __future__ import annotations

import json
import re
import subprocess

import pytest

from mkd.data.corpus.documents import encode_documents, encode_record
from mkd.data.prompt_readers import encode_prompt
from mkd.data.prompts import parse_prompt
from mkd.data.records.format_hints import format_hint
from mkd.data.records.kinds import Record
from mkd.data.records.parsing import parse_row
from mkd.data.records.rows import read_rows
from mkd.errors import DataError
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from tests.reported import refused
from tests.tokenizers.trained import train_hf_tokenizer

ARGUMENTS = "call.function.arguments | tojson"
TOOL_CHATML = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n"
    "{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if brief is defined %}[{{ brief }}]{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }} {{ ARGUMENTS }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARGUMENT_FORMS = {
    "objects": ARGUMENTS,
    "texts": "'' + call.function.arguments",
    "both": "call.function.arguments if call.function.arguments is string else " + ARGUMENTS,
}


def tool_tokenizer(form="objects"):
    return train_hf_tokenizer(TOOL_CHATML.replace("ARGUMENTS", ARGUMENT_FORMS[form]))


HF = tool_tokenizer()
TOKENIZER = HuggingFaceTokenizer(HF)
SYSTEM, ASK = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which fox?"}
SAID = {"role": "assistant", "content": "The quick one."}
BAD = {"role": "assistant", "content": "A dog."}
GIVEN = {"name": "find", "arguments": {"what": "fox", "count": 2}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": GIVEN}]}
RESULT = {"role": "tool", "content": "brown"}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
RAN = [ASK, CALL, RESULT, SAID]


def sharegpt(*turns):
    return [{"from": speaker, "value": value} for speaker, value in turns]


def encoded(record):
    row = record if isinstance(record, bytes) else json.dumps(record).encode()
    return encode_record(parse_row(row), TOKENIZER, True)


def trained(document):
    return HF.decode(document.ids[document.loss == 1])


RENDERED = {
    "openai": ({"messages": RAN, "tools": TOOLS, "parallel_tool_calls": False}, RAN, TOOLS),
    "texts of Arrow": ({"messages": json.dumps(RAN), "tools": json.dumps(TOOLS)}, RAN, TOOLS),
    "functions": ({"messages": [ASK, {"role": "assistant", "function_call": GIVEN}, RESULT]}, RAN[:3], None),
    "tool calls as text": (
        {"messages": [ASK, {**CALL, "tool_calls": json.dumps(CALL["tool_calls"])}, RESULT, SAID]},
        RAN,
        None,
    ),
    "sharegpt": (
        {
            "conversations": sharegpt(
                ("system", "Be brief."), ("human", "Which fox?"), ("gpt", "The quick one.")
            )
        },
        [SYSTEM, ASK, SAID],
        None,
    ),
    "llama-factory": (
        {
            "conversations": sharegpt(
                ("human", "Which fox?"),
                ("function_call", json.dumps(GIVEN)),
                ("observation", "brown"),
                ("gpt", "The quick one."),
            ),
            "system": "Be brief.",
            "tools": json.dumps(TOOLS),
        },
        [SYSTEM, *RAN],
        TOOLS,
    ),
    "ms-swift": (
        {
            "messages": [
                ASK,
                {"role": "tool_call", "content": json.dumps(GIVEN)},
                {**RESULT, "role": "tool_response"},
            ]
        },
        RAN[:3],
        None,
    ),
    "other names": ({"conversations": [ASK, {**SAID, "role": "model"}]}, [ASK, SAID], None),
    "roles in capitals": (
        {"messages": [ASK | {"role": "User"}, SAID | {"role": "Assistant"}], "system": "Be brief."},
        [SYSTEM, ASK, SAID],
        None,
    ),
    "trl": ({"prompt": [SYSTEM, ASK], "completion": [SAID]}, [SYSTEM, ASK, SAID], None),
    "trl with tools": ({"prompt": [ASK], "completion": RAN[1:], "tools": TOOLS}, RAN, TOOLS),
    "null keys": (
        {"messages": [ASK | {"tool_calls": None, "name": None}, SAID | {"tool_calls": []}]},
        [ASK, SAID],
        None,
    ),
    "reasoning": (
        {"messages": [ASK, SAID | {"reasoning": "Hm."}]},
        [ASK, SAID | {"reasoning_content": "Hm."}],
        None,
    ),
}


@pytest.mark.parametrize("case", RENDERED)
def test_records_are_rendered_as_transformers_does(case):
    record, messages, tools = RENDERED[case]
    document = encoded(record)
    whole = HF.apply_chat_template(messages, tools=tools, return_dict=False)
    assert document.ids.tolist() == whole
    call = '<call>find {"what": "fox", "count": 2}</call><|im_end|>' * (CALL in messages)
    reasoning = "<think>Hm.</think>" * (case == "reasoning")
    said = f"{reasoning}The quick one.<|im_end|>" * (SAID["content"] in json.dumps(messages))
    assert trained(document) == call + said


def test_template_variables_of_a_record():
    whole = HF.apply_chat_template([ASK, SAID], brief="yes", return_dict=False)
    for variables in ({"brief": "yes"}, json.dumps({"brief": "yes"})):
        assert encoded({"messages": [ASK, SAID], "chat_template_kwargs": variables}).ids.tolist() == whole


@pytest.mark.parametrize("form", ARGUMENT_FORMS)
@pytest.mark.parametrize("given", [GIVEN["arguments"], '{"what":"fox"}'], ids=["object", "text"])
def test_arguments_have_the_form_that_the_template_reads(form, given):
    hf = tool_tokenizer(form)
    call = {**CALL, "tool_calls": [{"type": "function", "function": {"name": "find", "arguments": given}}]}
    text = HuggingFaceTokenizer(hf).render(parse_row({"messages": [ASK, call]}).values[0])
    written = re.search("<call>find (.*)</call>", text)[1]
    as_object = given if isinstance(given, dict) else json.loads(given)
    kept = isinstance(given, str) and form != "objects"
    assert written == (given if kept else json.dumps(as_object))


def test_rows_of_a_table_do_not_show_the_keys_of_others(tmp_path):
    """A table has all keys in all rows: those of another tool's arguments and schema are null."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    other = {"type": "function", "function": {"name": "go", "arguments": {"where": "home"}}}
    there = [ASK, {**CALL, "tool_calls": [other]}, SAID]
    schema = [
        {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}, "strict": True}}
    ]
    rows = [
        {"messages": RAN, "tools": TOOLS, "chat_template_kwargs": {"brief": "yes"}},
        {"messages": there, "tools": schema, "chat_template_kwargs": {"long": "no"}},
        {"messages": [ASK, SAID]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    found = [encode_record(parse_row(row), TOKENIZER, True) for _, row in read_rows(tmp_path / "t.parquet")]
    for document, row in zip(found, rows, strict=True):
        options = row.get("chat_template_kwargs", {})
        whole = HF.apply_chat_template(row["messages"], tools=row.get("tools"), return_dict=False, **options)
        assert document.ids.tolist() == whole


def test_only_the_completion_of_a_conversational_prompt_has_loss():
    document = encoded({"prompt": [ASK, BAD, ASK], "completion": [SAID]})
    assert document.ids.tolist() == HF.apply_chat_template([ASK, BAD, ASK, SAID], return_dict=False)
    assert trained(document) == "The quick one.<|im_end|>"


def test_tools_of_pairs_and_prompts():
    pair = {"prompt": [ASK, CALL, RESULT], "chosen": [SAID], "rejected": [BAD], "tools": json.dumps(TOOLS)}
    for document, answer in zip(
        encode_documents(parse_row(json.dumps(pair).encode()), TOKENIZER, True), (SAID, BAD), strict=True
    ):
        messages = [*RAN[:3], answer]
        assert document.ids.tolist() == HF.apply_chat_template(messages, tools=TOOLS, return_dict=False)
        assert trained(document) == answer["content"] + "<|im_end|>"
    for key in ("messages", "prompt", "conversations"):
        record = {
            key: [ASK],
            "tools": TOOLS,
            "system": "Be brief.",
            "chat_template_kwargs": {"brief": 1},
            "answer": 4,
        }
        prompt, fields = parse_prompt(record)
        options = dict(tools=TOOLS, add_generation_prompt=True, brief=1, return_dict=False)
        assert encode_prompt(prompt, TOKENIZER).tolist() == HF.apply_chat_template([SYSTEM, ASK], **options)
        assert fields["answer"] == 4 and key not in fields


def has(key, value=True, **others):
    return {"messages": [ASK, SAID], key: value, **others}


@pytest.mark.parametrize(
    ("record", "code"),
    [
        (has("label", False), "record-key-not-supported"),
        (has("rejected_response", "no"), "record-key-not-supported"),
        (has("rejected_messages", [ASK]), "record-key-not-supported"),
        (has("chosen", [SAID], rejected=[BAD]), "record-key-not-supported"),
        (has("videos", ["a.mp4"]), "record-key-not-supported"),
        (has("image", "a.png"), "record-key-not-supported"),
        (has("teacher_prompt", "q"), "record-key-not-supported"),
        (has("functions", [{"name": "f"}]), "record-key-not-supported"),
        ({"prompt": "p", "completion": "c", "label": True}, "record-key-not-supported"),
        ({"text": "a", "privileged_context": "b"}, "record-key-not-supported"),
        (has("tools", "no JSON"), "record-value-not-valid: it must be"),
        (has("tools", [3]), "record-value-not-valid: it must be"),
        (has("chat_template_kwargs", [1]), "record-value-not-valid: it must be"),
        (
            {"messages": [SYSTEM, ASK], "system": "Be long."},
            "record-ambiguous: the record has `system`, and its",
        ),
        (
            {"messages": [ASK, {**ASK, "tool_calls": [GIVEN]}]},
            "record-value-not-valid: has tool_calls, and the role",
        ),
        (
            {"messages": [ASK, {**CALL, "tool_calls": [{**GIVEN, "arguments": "{"}]}]},
            "record-value-not-valid: it must be",
        ),
        (
            {"messages": [ASK, {"role": "assistant", "content": None}]},
            "record-field-not-text: it must be a string",
        ),
        ({"conversations": sharegpt(("stranger", "hi"))}, "record-value-not-valid: `from` is"),
        (
            {"conversations": sharegpt(("function_call", "find the fox"))},
            "record-value-not-valid: it must be",
        ),
        ({"prompt": "p", "completion": [SAID]}, "record-ambiguous: they are all texts, or all lists"),
        ({"prompt": [ASK], "completion": []}, "record-value-not-valid: a conversation is a list"),
        ({"messages": "hello"}, "record-value-not-valid: a conversation is a list"),
    ],
)
def test_what_is_refused(record, code):
    with refused(code, DataError):
        parse_row(json.dumps(record).encode())


def test_keys_of_other_uses_are_no_reason_to_refuse():
    labelled = {"text": "a fox", "label": 3, "image": "a.png", "audio": {"path": "a.wav"}}
    assert parse_row(labelled).ignored == ("label", "image", "audio")
    assert parse_row(has("label", 2, videos=[], rejected=None)).ignored == ("label", "videos")


def test_an_empty_content_is_told():
    with pytest.raises(DataError) as caught:
        parse_row({"messages": [ASK, {"role": "assistant", "content": None}]})
    assert 'write ""' in caught.value.do


TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
PAIR = {"prompt": [ASK], "chosen": [SAID], "rejected": [BAD]}
CONVERTED = [
    ({"instruction": "q", "input": "", "output": "a"}, {"messages": TURNS}),
    (
        {"instruction": "q", "input": "i", "output": "a", "history": [["b", "c"]], "system": "s"},
        {
            "messages": [
                {"role": "system", "content": "s"},
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": "c"},
                {"role": "user", "content": "q\ni"},
                {"role": "assistant", "content": "a"},
            ]
        },
    ),
    ({"question": "q", "answer": "a"}, {"messages": TURNS}),
    ({"prompt": "q", "response": "a"}, {"messages": TURNS}),
    ({"query": "q", "response": "a"}, {"messages": TURNS}),
    ({"chosen": [ASK, SAID], "rejected": [ASK, BAD]}, PAIR),
    (
        {
            "input": {"messages": [ASK], "tools": TOOLS},
            "preferred_output": [SAID],
            "non_preferred_output": [BAD],
        },
        {**PAIR, "tools": TOOLS},
    ),
]


@pytest.mark.parametrize(("record", "expected"), CONVERTED)
def test_other_formats_are_told_their_command(record, expected):
    with pytest.raises(DataError) as caught:
        parse_row(record)
    program = re.search(r"jq -c '(.*)' FILE.jsonl > NEW.jsonl", caught.value.do)
    assert program, caught.value.report()
    try:
        made = subprocess.run(
            ["jq", "-c", program[1]], input=json.dumps(record), capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("jq is not installed")
    assert json.loads(made.stdout) == expected, made.stderr
    assert isinstance(parse_row(made.stdout.encode()), Record)


def test_tables_are_told_to_become_lines():
    assert "pyarrow" in format_hint(["question", "answer"], is_table=True)
    assert format_hint(["body"]) is None and "Megatron" in format_hint(["input_ids", "labels"])


@pytest.mark.parametrize(
    ("record", "program"),
    [
        (
            {"dialogue": [{"from": "human", "value": "q"}], "tools": []},
            "{messages: .dialogue} + del(.dialogue)",
        ),
        ({"chat": [{"role": "user", "content": "q"}], "id": 1}, "{messages: .chat} + del(.chat)"),
        ({"data": [{"text": "a"}, {"text": "b"}], "version": "1"}, ".data[]"),
        ({"body": "a"}, "{text: .body}"),
        ({"body": "a", "title": "b"}, None),
        ({"a": [{"text": "a"}], "b": [{"text": "b"}]}, None),
        ({"my-data": [{"text": "a"}]}, None),
    ],
)
def test_records_of_unknown_keys_are_converted_by_the_shape_of_their_values(record, program):
    with refused("record-without-known-keys") as caught:
        parse_row(json.dumps(record).encode())
    assert caught.value.do == (
        "rename the keys of the file"
        if program is None
        else f"convert it: jq -c '{program}' FILE.jsonl > NEW.jsonl"
    )
