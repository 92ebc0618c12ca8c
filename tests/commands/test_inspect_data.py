"""Run `mkd inspect`, and check how it shows an alignment."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mkd.commands import data
from mkd.commands.inspect import main
from mkd.data.chat_roles import role_headers
from mkd.data.pack_view import BOLD, GREEN, GREY
from mkd.data.pack_view import RESET as PLAIN
from mkd.errors import EXIT_DATA, EXIT_DONE, EXIT_USAGE
from mkd.tokenizers.hugging_face import HuggingFaceTokenizer
from mkd.xtoken import AlignedText
from mkd.xtoken.align.align_view import COLOURS, RESET, view_alignment
from tests.reported import reported_codes
from tests.tokenizers.trained import CHATML, train_hf_tokenizer

TOOL = Path(__file__).resolve().parents[2] / "tools" / "inspect_data.py"
CHAT = [{"role": "user", "content": "Which fox?"}, {"role": "assistant", "content": "The fox."}]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return folders of two tokenizers: words as one token, and bytes only."""
    folders = []
    for name, size in (("words", 350), ("bytes", 259)):
        folders.append(str(tmp_path_factory.mktemp(name)))
        train_hf_tokenizer(vocab_size=size).save_pretrained(folders[-1])
    return folders


@pytest.fixture
def arguments(models, tmp_path):
    records = [
        {"text": "The fox\n"},
        {"messages": CHAT},
        {"prompt": "x", "completion": "The"},
        {"text": "not shown"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["--align", "--input", str(tmp_path / "a.jsonl"), "--student", models[0], "--teacher", models[1]]


def test_every_kind_of_record(arguments, capsys):
    assert main(arguments) == EXIT_DONE
    first, chat, completion = capsys.readouterr().out.strip().split("\n\n")
    header, student, teacher = first.splitlines()
    assert header.endswith(
        "a.jsonl:1: 4 student tokens, 8 teacher tokens, 4 chunks (1-1 2, 1-N 2, M-1 0, M-N 0)"
    )
    assert student == "student |The| fo|x|\\n|" and teacher == "teacher |T+h+e| +f+o|x|\\n|"
    assert "|The|" in chat and "|<|im_end|>|" in chat and "(W)" in chat
    assert completion.splitlines()[1:] == ["student |(x)|The|", "teacher |(x)|T+h+e|"]


def test_colours_on_a_terminal_only(arguments, monkeypatch):
    def shown():
        leader, follower = pty.openpty()
        with open(follower, "w") as terminal, contextlib.redirect_stdout(terminal):
            assert main([*arguments, "--limit", "1"]) == EXIT_DONE
            terminal.flush()
            text = os.read(leader, 10_000).decode()
        os.close(leader)
        return text

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert f"{COLOURS[0]}The{RESET}|{COLOURS[1]} fo{RESET}" in shown()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in shown()


def test_it_runs_as_a_script(arguments):
    result = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == EXIT_DONE and "\033" not in result.stdout and "|The|" in result.stdout
    assert "Warning" not in result.stderr


def test_bytes_that_are_no_text_are_escaped():
    tokenizer = HuggingFaceTokenizer(train_hf_tokenizer())
    ids = np.array(tokenizer.encode("\u4f60"))
    aligned = AlignedText(ids, ids, np.array([[0, 1, 0, 1], [1, 3, 1, 3]]))
    assert (
        view_alignment(aligned, tokenizer, tokenizer, colour=False).splitlines()[1]
        == r"student |\xe4|\xbd+\xa0|"
    )
    ids = np.array(tokenizer.encode("\x01\t\\"))
    aligned = AlignedText(ids, ids, np.array([[0, 1, 0, 1], [1, 2, 1, 2], [2, 3, 2, 3]]))
    assert (
        view_alignment(aligned, tokenizer, tokenizer, colour=False).splitlines()[1] == r"student |\x01|\t|\\|"
    )


def test_errors_name_the_record_and_what_to_do(arguments, tmp_path, capsys):
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"texts": "x"}\n')
    arguments[2] = str(tmp_path / "bad.jsonl")
    assert main(arguments) == EXIT_DATA
    error = capsys.readouterr().err
    assert reported_codes(error) == ["record-without-known-keys"] and "bad.jsonl:2: " in error
    assert main([*arguments, "--mode", "bytes"]) == EXIT_USAGE
    assert "use one of byte_offset, dp" in capsys.readouterr().err


@pytest.fixture
def packs(models, tmp_path):
    """Return arguments for packs of a prompt with completion (3 + 2 tokens) and of a text (2 tokens)."""
    records = [{"prompt": "The fox\n", "completion": "The"}, {"text": "The"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return ["--input", str(tmp_path / "a.jsonl"), "--student", models[0], "--seq-length", "10"]


def test_packs_with_borders_masks_and_sizes(packs, capsys):
    assert main(packs) == EXIT_DONE
    pack, summary = capsys.readouterr().out.strip().split("\n\n")
    assert pack.splitlines() == [
        "pack 0: 2 documents, 8 of 10 tokens, 3 with loss, 2 padding",
        "  [0, 6) |(The)|( fo)|(x)|(\\n)|The|<|endoftext|>|",
        "  [6, 8) |(The)|<|endoftext|>|",
    ]
    assert summary.splitlines()[1:] == [
        "share of loss tokens 0.375 (3 of 8 tokens)",
        "packing efficiency 0.800 (8 tokens in 10 places)",
        "document lengths: least 2, median 4, 90 % up to 5, 99 % up to 5, most 6 tokens",
    ]
    assert main([*packs, "--pack", "none", "--limit", "1"]) == EXIT_DONE
    output = capsys.readouterr().out
    assert "packing efficiency 0.400" in output and output.count("pack 0:") == 1 and "pack 1:" not in output


def test_packs_by_their_number(packs, capsys):
    """Show packs by their numbers in a run's files; the run held out the last document, a pack by itself."""
    run = [*packs, "--seq-length", "4", "--pack", "none", "--split", "1,1,0"]
    run += ["--overlong-conversations", "split"]
    assert main([*run, "--samples", "1", "0"]) == EXIT_DONE
    output = capsys.readouterr().out
    assert [line.split(":")[0] for line in output.splitlines() if line.startswith("pack ")] == [
        "pack 1",
        "pack 0",
    ]
    assert main([*run, "--samples", "2"]) == EXIT_USAGE
    assert "--samples 2: the file becomes packs 0 to 1\n  why: " in capsys.readouterr().err
    assert main([*packs, "--no-append-eod"]) == EXIT_DONE and "endoftext" not in capsys.readouterr().out


def test_tokens_without_loss_have_another_colour(packs, capsys):
    assert main([*packs, "--color"]) == EXIT_DONE
    assert f"|{GREY}\\n{PLAIN}|{GREEN}The{PLAIN}|" in capsys.readouterr().out
    assert main(packs) == EXIT_DONE
    assert "\033" not in capsys.readouterr().out


def test_a_conversation_has_a_line_for_each_message(models, tmp_path, capsys):
    chat = [{"role": "system", "content": "x"}, *CHAT, {"role": "user", "content": "x"}]
    records = [{"messages": chat}, {"text": "The fox"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["preview", str(tmp_path / "a.jsonl"), "--student", models[0], "--seq-length", "100"]
    assert data.main(words) == EXIT_DONE
    _, chat_line, *messages, text = capsys.readouterr().out.split("\n\n")[0].splitlines()
    loss = [line.split()[0] for line in messages if "|The|" in line]
    assert [line.split()[0] for line in messages] == ["system", "user", "assistant", "user"]
    assert (
        loss == ["assistant"] and " with loss" in chat_line and text.endswith("|(The)| fo|x|<|endoftext|>|")
    )
    shown = [line.partition("|")[2].rstrip("|") for line in messages]
    assert all(line.startswith(("<|im_start|>", "(<|im_start|>)")) for line in shown)
    assert data.main([*words, "--color"]) == EXIT_DONE
    assert f"{BOLD}assistant{PLAIN} |" in capsys.readouterr().out
    assert data.main([*words, "--input", words[1]]) == EXIT_USAGE and data.main(["other"]) == EXIT_USAGE
    assert "PATH and --input are both given" in capsys.readouterr().err
    assert data.main(["preview", "--student", models[0]]) == EXIT_USAGE


@pytest.mark.parametrize(
    "template, user, assistant",
    [
        (
            "{{ '<s>' }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
            "{{ m.content }}<|eot_id|>{% endfor %}",
            "<|start_header_id|>user<|end_header_id|>\n\n",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None, None),  # it does not tell roles apart
    ],
)
def test_headers_of_templates(template, user, assistant):
    headers = role_headers(HuggingFaceTokenizer(train_hf_tokenizer(template)))
    assert (headers.get("user"), headers.get("assistant")) == (user, assistant)


def test_a_pieces_first_token_has_no_loss_of_its_own(packs, capsys):
    settings = ["--seq-length", "2", "--limit", "9", "--overlong-conversations", "split"]
    assert main([*packs, *settings]) == EXIT_DONE
    # the piece is kept for its label, the first token of the next piece
    assert "|(x)|(\\n)|" in capsys.readouterr().out


def test_histogram(packs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([*packs, "--histogram", str(tmp_path / "out.png")]) == EXIT_DONE
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "out.png"
    ).stat().st_size > 3000


def test_what_packs_refuse(packs, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*packs, "--histogram", str(tmp_path / "out.png")]) == EXIT_USAGE
    assert "matplotlib is not installed" in capsys.readouterr().err and not (tmp_path / "out.png").exists()
    assert main([*packs, "--seq-length", "0"]) == EXIT_USAGE
    assert main([*packs, "--align"]) == EXIT_USAGE
    assert "--align needs --teacher" in capsys.readouterr().err
    packs[1] = str(tmp_path / "missing.jsonl")
    assert main(packs) == EXIT_DATA


def test_a_picture_that_cannot_be_written(packs, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main([*packs, "--histogram", str(tmp_path / "nowhere" / "out.png")]) == EXIT_USAGE
    assert "cannot be written: No such file" in capsys.readouterr().err
    assert main([*packs, "--histogram", str(tmp_path / "out.txt")]) == EXIT_USAGE
    said = capsys.readouterr()
    assert "out.txt is not the name of a picture" in said.err and said.out == ""  # before any work


def test_numbers_and_flags_that_mean_nothing(packs, models, capsys):
    assert main([*packs, "--limit", "-1"]) == EXIT_USAGE
    assert "'-1' is not a whole number of 0 or more" in capsys.readouterr().err
    assert main([*packs, "--align", "--teacher", models[1], "--max-bad-records", "2"]) == EXIT_USAGE
    assert "--max-bad-records has no effect with --align" in capsys.readouterr().err


def test_what_a_teacher_with_a_context_reads(arguments, models, tmp_path, capsys):
    argv = [*arguments[1:-2], "--context", "{prompt} Hint: {hint}", "--limit", "9"]
    records = [
        {"prompt": "fox", "completion": " The fox", "hint": "jumps"},
        {"prompt": "x", "completion": " The"},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(argv) == EXIT_DONE
    first, second = capsys.readouterr().out.strip().split("\n\n")
    _, own, theirs = ("".join(line.split("|")) for line in first.splitlines())
    assert "Hint" not in own and "Hint" in theirs.replace("(", "").replace(")", "")
    assert (
        own.rsplit(")", 1)[0] != own and own.rsplit(")", 1)[1] == theirs.rsplit(")", 1)[1]
    )  # the completion
    assert "0 chunks" in second  # a record without the hint is not taught
    assert main([*argv, "--teacher", models[1]]) == EXIT_USAGE
    assert main([*argv[:-4], "--context", "{open"]) == EXIT_USAGE
    assert "--context is not a template" in capsys.readouterr().err


def test_prompts_as_a_teacher_with_a_context_reads_them(arguments, tmp_path, capsys):
    """They have no completion; what a step makes is shown by its name."""
    argv = [*arguments[1:-2], "--prompts", "--limit", "9", "--context", "{prompt} Hint: {hint} {sibling}"]
    records = {"prompt": "fox", "hint": "jumps"}, {"prompt": "x"}
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert main(argv) == EXIT_DONE
    first, second = capsys.readouterr().out.strip().split("\n\n")
    _, own, theirs = ("".join(line.split("|")) for line in first.splitlines())
    bare = [line.partition(" ")[2].replace(")(", "").strip("()") for line in (own, theirs)]
    assert bare == ["fox", "fox Hint: jumps {sibling}"]
    assert "1 student token, 0 teacher tokens" in second
    assert main(argv[:-2]) == EXIT_USAGE
    assert "--prompts without --context" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--prompts"]])
def test_a_field_of_a_context_that_no_record_has(arguments, tmp_path, capsys, more):
    """It is an error, as in a run; a record that brings its own prompt needs no field."""
    argv = [*arguments[1:-2], "--limit", "1", *more]
    record = {"prompt": "fox", "hint": "jumps"} | ({} if more else {"completion": " The fox"})
    later = {**record, "solution": "here"}
    file = tmp_path / "a.jsonl"
    file.write_text(f"{json.dumps(record)}\n")
    for text, do in (
        ("{prompt} {hints}", "write {hint} in the context, or add hints to the records"),
        ("{prompt} {solution}", f"name one of their keys in the context ({', '.join(record)}), or add"),
    ):
        assert main([*argv, "--context", text]) == EXIT_DATA
        said = capsys.readouterr()
        (key,) = set(text.replace("{", " ").replace("}", " ").split()) - {"prompt"}
        assert said.out == "" and f"no record of {file} has {key}" in said.err and do in said.err
        assert f"the context has {{{key}}}, so the teacher has nothing to read" in said.err
        assert said.err.count("error[") == 1
    file.write_text(json.dumps({"messages": CHAT}))
    assert main([*argv, "--context", "{prompt}", "--context-system", "{solution}"]) == EXIT_DATA
    assert f"no record of {file} has solution" in capsys.readouterr().err
    others = [*[json.dumps(record)] * 99, "not a record", json.dumps(later)]
    file.write_text("\n".join(others))  # the first with the key is number 101
    assert main([*argv, "--context", "{prompt} {solution}"]) == EXIT_DATA
    assert f"none of the first 100 records of {file} has solution" in capsys.readouterr().err
    file.write_text("\n".join(others[1:]))
    assert main([*argv, "--context", "{prompt} {solution}"]) == EXIT_DONE
    file.write_text(json.dumps({**record, "teacher_prompt": "Which fox?"}))
    assert main([*argv, "--context", "{prompt} {solution}"]) == EXIT_DONE


def test_conversations_are_read_with_the_flags_of_training(tmp_path, capsys):
    template = "{{ strftime_now('%Y-%m-%d') + ' ' + (mood or '') + '\n' }}" + CHATML
    for name in ("student", "teacher"):
        train_hf_tokenizer(template).save_pretrained(tmp_path / name)
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": CHAT + CHAT}) + "\n")
    argv = ["--input", str(tmp_path / "a.jsonl"), "--student", str(tmp_path / "student")]
    argv += ["--chat-loss", "last", "--chat-date", "2020-02-29", "--chat-template-kwargs", '{"mood": "fox"}']
    for more in ([], ["--align", "--teacher", str(tmp_path / "teacher")]):
        assert main([*argv, *more]) == EXIT_DONE
        shown = capsys.readouterr().out.translate(str.maketrans("", "", "()|+"))
        assert "2020-02-29 fox" in shown
    assert main(argv) == EXIT_DONE
    assert capsys.readouterr().out.count("|<|im_end|>|") == 1, "only the last answer has loss"
    assert main([*argv, "--chat-loss", "marks"]) == EXIT_USAGE
    assert reported_codes(capsys.readouterr().err) == ["chat-template-without-marks"]
