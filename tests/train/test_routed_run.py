"""Check whole runs of teachers by tag: records, metrics, refused tags, resuming, and forwards that run."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

from tests.reported import reported_codes
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, make_files, read_metrics, read_weights, run_main, write_records

TAGS = ("math", "code", "law")
SHARES = (0.70, 0.25, 0.05)


def tagged(i: int) -> dict:
    tag = TAGS[(i % 20 >= 14) + (i % 20 == 19)]
    return {"text": f"{i}: " + f"{tag} the quick brown fox " * (i % 5 + 1), "domain": tag, "score": 1}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = make_files(tmp_path_factory.mktemp("routed-run"))
    add_tokenizer(make_model(folder / "second", "qwen2", seed=3, num_hidden_layers=2))
    write_records(folder / "tagged.jsonl", *map(tagged, range(200)))
    write_records(folder / "laws.jsonl", *({"text": f"law {i} is the fox"} for i in range(40)))
    return folder


def command(files, run, *more, teachers=None, kd=None, **paths):
    """Return the command line of a run with two experts."""
    own = [{"name": "mathematician", "tags": ["math"]}, {"name": "other"}]
    entries = zip(teachers or own, ("teacher", "second"), strict=True)
    settings = {
        "teachers": [{"hf": str(files / folder), **one} for one, folder in entries],
        "kd": {"teacher_combination": "route", "tag_key": "domain", **(kd or {})},
    }
    path = files / f"{run}.yaml"
    path.write_text(json.dumps(settings), encoding="utf-8")
    paths = {"teacher_hf": None, "data_path": "tagged.jsonl"} | paths
    return [*flags(files, run, *more, **paths), "--config", str(path)]


def test_what_a_run_writes(files, ranks):
    more = ("--split", "90,10", "--eval-interval", 2, "--kd-ratio", 0.3)
    (result,) = run_main(ranks, command(files, "run", *more))
    assert result.exit_code == 0, result.stderr
    assert "tag math: 140 documents, " in result.stdout and "taught by mathematician" in result.stdout
    records = read_metrics(files / "run")
    assert {record.get("split") for record in records} == {None, "valid"}
    for record in records:
        parts = {name: record.get(f"teacher_weight/{name}", 0) for name in ("mathematician", "other")}
        kd = sum(weight * record[f"kd_loss/{name}"] for name, weight in parts.items() if weight)
        assert record["kd_loss"] == pytest.approx(kd, rel=1e-6)
        assert record["loss"] == pytest.approx(0.7 * record["ce_loss"] + 0.3 * record["kd_loss"], rel=1e-6)
        tokens = {tag: record[f"tokens/{tag}"] for tag in TAGS}
        assert sum(tokens.values()) == record["num_loss_tokens"]
        by_tag = sum(record[f"ce/{tag}"] * tokens[tag] for tag in TAGS if tokens[tag])
        assert record["ce_loss"] == pytest.approx(by_tag / record["num_loss_tokens"], rel=1e-6)
        if tokens["math"]:
            assert record["kd_loss/math"] == pytest.approx(record["kd_loss/mathematician"], rel=1e-12)


def test_a_resumed_run_has_the_same_bits(files, ranks):
    """The checkpoint is saved in the middle of a line of metrics."""
    own = ("--train-iters", 6, "--log-interval", 4, "--save", files / "saved", "--save-interval", 3)
    found = []
    for more in ((), ("--load", files / "saved")):
        argv = command(files, "resumed", *own, *more, "--export-hf", files / f"hf{len(more)}")
        (result,) = run_main(ranks, argv)
        assert result.exit_code == 0, result.stderr
        found.append((read_weights(files / f"hf{len(more)}"), read_metrics(files / "resumed")))
        shutil.rmtree(files / "saved" / "iter_0000006")
        (files / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    (weights, lines), (resumed, resumed_lines) = found
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    measured = ("step_time_ms", "tokens_per_s_per_gpu", "tflops_per_gpu", "teacher_share")
    for ours, theirs in zip(lines, resumed_lines, strict=True):
        assert {key for key in ours if ours[key] != theirs[key]} <= set(measured)


@pytest.mark.parametrize(
    ("more", "code"),
    [
        (dict(teachers=({"tags": ["math"]}, {"tags": ["code"]})), "add-flag"),  # nobody teaches law
        (dict(kd={"tag_weights": {"math": 1, "code": 2}}), "add-flag"),  # law has no weight
        (dict(kd={"tag_key": "subject"}), "record-value-not-valid"),  # no record has it
        (dict(kd={"tag_key": None}), "add-flag"),
        (dict(kd={"tag_weights": {"math": 0}}), "value-not-valid"),
        (dict(kd={"teacher_combination": "average"}), "remove-flag"),
        (
            dict(teachers=({"tags": ["math"], "context": {"user": "{prompt} !"}}, {})),
            "record-value-not-valid",
        ),
        (dict(teachers=({"name": "code", "tags": ["math"]}, {"tags": ["code"]})), "names-equal"),
        (dict(teachers=({"tags": ["math"]}, {"name": "law"})), "names-equal"),  # a tag of the data alone
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(more, code, files, ranks):
    (result,) = run_main(ranks, command(files, "refused", **more))
    assert result.exit_code in (64, 65) and code in reported_codes(result.stderr)


def test_files_with_tags_and_a_teacher_without_records(files, ranks):
    teachers = ({"name": "lawyer", "tags": ["law"]}, {"name": "idle", "tags": ["code"]})
    kd = {"tag_key": None, "tag_weights": {"law": 2, "code": 1}}
    more = ("--data-tags", f"{files / 'laws.jsonl'}=law")
    argv = command(files, "laws", *more, teachers=teachers, kd=kd, data_path="laws.jsonl")
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    assert "teacher idle never runs: no record has the tag code" in result.stdout + result.stderr
    for record in read_metrics(files / "laws"):
        assert record["teacher_weight/lawyer"] == pytest.approx(2 / 3)
        assert record["kd_loss"] == pytest.approx(2 / 3 * record["kd_loss/law"], rel=1e-6)
        assert record["tokens/code"] == 0 and record["kd_loss/idle"] is None


def test_weights_of_records_beside_tags(files, ranks):
    """With a weight of 1 everywhere, the loss of records with weights is that without."""
    found = []
    for run, more in (("plain", ()), ("scored", ("--weight-key", "score"))):
        (result,) = run_main(ranks, command(files, run, *more))
        assert result.exit_code == 0, result.stderr
        found.append(read_metrics(files / run))
    for ours, theirs in zip(*found, strict=True):
        for key in ("loss", "kd_loss", "kd_loss/math", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key


def lengths(random, count: int, most: int):
    return np.minimum(random.lognormal(6.2, 0.9, count).astype(int) + 16, most)


def test_packs_of_one_tag_are_full_and_few_forwards_run():
    """Three tags of .70, .25 and .05 with a teacher each: one forward in three runs, beside 4 peers too."""
    from mkd.data.loader import BatchLayout
    from mkd.data.packing.best_fit import pack_pieces
    from mkd.data.tags import TeacherRoutes

    random, seq_length = np.random.default_rng(0), 4096
    sizes, tags = lengths(random, 4000, seq_length), random.choice(3, 4000, p=SHARES)
    mixed, pure = (pack_pieces(sizes, seq_length, "bfd", tags=own) for own in (None, tags))
    of_packs = [np.unique(tags[pure.pieces_of(pack)]) for pack in range(len(pure))]
    assert all(len(own) == 1 for own in of_packs)
    fill = [sizes.sum() / (len(packs) * seq_length) for packs in (mixed, pure)]
    print(f"fill {fill[0]:.4f} mixed, {fill[1]:.4f} by tag")
    assert fill[1] > fill[0] - 0.003
    of_mixed = [set(tags[mixed.pieces_of(pack)]) for pack in range(len(mixed))]
    needed = np.mean([len(own) for own in of_mixed]) / 3

    class Packs:
        @staticmethod
        def tags_of(packs):
            return np.concatenate(of_packs)[packs]

    for peers in (1, 4):
        routes = TeacherRoutes(tuple(frozenset({n}) for n in range(3)), (tuple(range(peers)),) * 3)
        layout = BatchLayout(1, 128, 0, 4, routes=routes)
        order = np.random.default_rng(1).permutation(len(pure))[: len(pure) // 128 * 128]
        dealt = [one for batch in order.reshape(-1, 128) for one in layout.deal(batch, Packs())]
        share = np.mean([one.needed_teachers for one in dealt])
        print(f"{peers} in step: {share:.3f} of the forwards run, {needed:.3f} with mixed packs alone")
        assert share <= 0.35 < needed
