"""Check that a card has the figures of metrics.jsonl, and that one that a user wrote stays."""

from __future__ import annotations

import json
import math
import re

import pytest
import yaml

from mkd.release.card_file import is_own_text, marked, may_write
from mkd.release.model_card import ModelCard, title_of
from mkd.release.training_record import TrainingRecord, start_of_run
from tests.train.command import flags, make_files, read_metrics, run_main

HELD_OUT = ("--eval-interval", 2, "--eval-iters", 1, "--split", "80,20,0")


@pytest.fixture(scope="module")
def run(tmp_path_factory, ranks):
    """Return the folder of a run at TP 2 with its export; the student's folder names a licence."""
    files = make_files(tmp_path_factory.mktemp("card"))
    (files / "student" / "README.md").write_text("---\nlicense: mit\n---\n# A student\n")
    (files / "teacher" / "LICENSE.txt").write_text("terms")
    more = ("--save", files / "run", "--export-hf", files / "hf", "--tensor-model-parallel-size", 2)
    first, _ = run_main(ranks, flags(files, "run", *HELD_OUT, *more), world_size=2)
    assert first.exit_code == 0, first.stderr
    return files


def read(folder):
    return (folder / "README.md").read_text(encoding="utf-8")


def section(card, title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", card, re.MULTILINE | re.DOTALL).group(1)


def test_the_card_has_the_figures_of_the_run(run):
    card, records = read(run / "hf"), read_metrics(run / "run")
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "mit" and head["library_name"] == "transformers" and "base_model" not in head
    assert "knowledge-distillation" in head["tags"] and head["pipeline_tag"] == "text-generation"
    before, after = [record for record in records if record.get("split") == "valid"]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", card, re.MULTILINE)}
    assert rows["metric"] == ("before training", "after step 2")
    for label, key in {
        "divergence from the teacher, nats per token": "kd_loss",
        "top-1 agreement with the teacher": "top1_agreement",
        "cross entropy, nats per token": "ce_loss",
    }.items():
        assert rows[label] == (f"{before[key]:.4g}", f"{after[key]:.4g}")
    assert rows["perplexity"][1] == f"{math.exp(after['ce_loss']):.4g}"
    assert "256 tokens" in card and "tensor 2, pipeline 1, context 1, expert 1" in card
    command = section(card, "How it was trained").partition("```bash\n")[2].partition("\n")[0]
    assert command.startswith("mkd train --student-hf student --teacher-hf teacher ")
    assert str(run) not in card  # it may be read on another machine
    assert "torch 2" in card and "file LICENSE.txt" in section(card, "Licence")
    assert "Tasks and benchmarks" in section(card, "Not checked")
    assert "Held-out text" not in section(card, "Not checked")


def test_an_export_of_the_checkpoint_has_the_same_card_and_weights(run, ranks):
    words = ["--load", run / "run", "--hf-out", run / "again"]
    (done,) = run_main(ranks, [*map(str, words)], command="mkd.commands.export")
    assert done.exit_code == 0, done.stderr
    cards = [read(run / name) for name in ("hf", "again")]
    for title in ("Figures", "How it was trained", "Licence"):
        assert section(cards[0], title).split("<!--")[0] == section(cards[1], title).split("<!--")[0]
    files = [{path.name: path.read_bytes() for path in (run / name).iterdir()} for name in ("hf", "again")]
    assert files[0].keys() == files[1].keys()
    assert [name for name in files[0] if files[0][name] != files[1][name]] == ["README.md"]  # its title
    assert title_of(run / "hf") == run.name and title_of(run, "ann/student") == "ann/student"
    # A card that somebody has edited stays, and the weights are replaced.
    edited = cards[1].replace("# again", "# My student")
    (run / "again" / "README.md").write_text(edited, encoding="utf-8")
    (run / "again" / "model.safetensors").write_bytes(b"old")
    (done,) = run_main(ranks, [*map(str, words), "--overwrite"], command="mkd.commands.export")
    assert done.exit_code == 0, done.stderr
    assert read(run / "again") == edited
    assert (run / "again" / "model.safetensors").read_bytes() == files[0]["model.safetensors"]


def test_whose_card_it_is(tmp_path):
    text = marked("# A model\n\nwords\n")
    assert is_own_text(text) and not is_own_text(text.replace("words", "Words")) and not is_own_text("# A")
    assert may_write(tmp_path)
    (tmp_path / "README.md").write_text(text)
    assert may_write(tmp_path)
    (tmp_path / "README.md").write_bytes(b"\xff\xfe")
    assert not may_write(tmp_path)
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").symlink_to(tmp_path / "elsewhere")
    assert not may_write(tmp_path)


def test_a_checkpoint_without_a_run_and_models_of_the_hub(tmp_path):
    """Without a record the card claims nothing. Ids of the hub are named in the head for it."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    card = ModelCard("m", TrainingRecord.read(tmp_path), tmp_path).text()
    assert "left no record" in card and "no metrics" in card and "| before" not in card
    assert "Held-out text: the run evaluated none." in card and "image-text-to-text" in card
    hub = ["org/student", str(tmp_path)]
    (tmp_path / "plan.json").write_text(json.dumps(start_of_run(["--lr", "1", "--save=/data/run"], 8, hub)))
    lines = ["student:", '  hf: "org/student"  # --student-hf', "data:"]
    lines += ['  data_path: ["hub:org/text:train", "0.5", "b.jsonl"]  # --data-path']
    (tmp_path / "config.yaml").write_text("\n".join(lines))
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 3, "loss": 1.5, "ce_loss": null}\n')
    card = ModelCard("m", TrainingRecord.read(tmp_path, 3), tmp_path, 3).text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["base_model"] == ["org/student"] and head["datasets"] == ["org/text"]
    assert "mkd train --lr 1 --save=run" in card and "| processes | 8 |" in card
    assert "trained from text alone, starting from org/student in 3 steps, by mkd" in card
    assert TrainingRecord.read(tmp_path, 2).records == []
