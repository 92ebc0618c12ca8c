"""Check what the training command says and returns for impossible input: what, why, do, and exit code."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from tests.reported import reported_codes, reported_text
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import TEACHER, flags, make_files, poison, read_metrics, run_main, write_records

ROOT = Path(__file__).resolve().parent.parent.parent
USAGE, DATA, CHECKPOINT, NON_FINITE = 64, 65, 66, 70


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("errors"))


def assert_refused(ranks, argv, exit_code, *texts, world_size=1):
    """Check that every rank returns `exit_code` and rank 0 alone prints one error.

    The error contains all `texts` or codes, and no traceback.
    """
    results = run_main(ranks, argv, world_size)
    assert [result.exit_code for result in results] == [exit_code] * world_size, results[0].stderr
    message = reported_text(results[0].stderr)
    assert "Traceback" not in message
    for text in texts:
        assert text in message or text in reported_codes(results[0].stderr), text
    assert all(not reported_text(result.stderr) for result in results[1:])


def test_unknown_and_unsupported_flags_before_torch_is_imported():
    """The script itself reports all of them in one answer."""
    argv = [
        "--kd-rati",
        "0.5",
        "--num-layers",
        "12",
        "--use-flash-attn",
        "--kd-divergence",
        "tvd",
        "--mtp-num-layers",
    ]
    code = "import sys, mkd.run.main as m; c = m.main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules; sys.exit(c)"
    for command in ([ROOT / "pretrain_kd.py"], ["-c", code]):
        done = subprocess.run(
            [sys.executable, *command, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (USAGE, "")
        assert done.stderr.startswith("error: 5 problems:\n[1] ")
        expected = (
            "flag-unknown",
            "flag-replaced: known, not supported: use",
            "remove-flag: known, not supported: safe to drop",
            "flag-not-yet",
            "value-unknown: is not a known value",
        )
        assert sorted(reported_codes(done.stderr)) == sorted(expected)
        assert "do:  did you mean --kd-ratio?\n" in done.stderr


def test_problems_of_settings_and_missing_files_come_before_torch_is_imported(files, tmp_path):
    """Each in a fraction of a second: of the range of a value, the layout, a model and the data."""
    argv = flags(files, "early", "--lr", "-1", "--global-batch-size", 3, "--micro-batch-size", 2)
    argv += ["--data-path", str(tmp_path / "none.jsonl"), "--teacher-hf", str(tmp_path / "nobody")]
    code = "import sys, mkd.run.main as m; c = m.main(sys.argv[1:]); "
    code += "print([n for n in ('torch', 'numpy', 'transformers') if n in sys.modules]); sys.exit(c)"
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (USAGE, "[]\n"), done.stderr
    expected = [
        "batch-not-divisible: is not divisible by",
        "data-path-not-found: nothing found",
        "hf-model-not-found",
        "out-of-range: must be",
    ]
    assert sorted(reported_codes(done.stderr)) == sorted(expected)


def test_layers_that_do_not_divide(files, ranks):
    assert_refused(
        ranks,
        flags(files, "layers", "--pipeline-model-parallel-size", 2),
        USAGE,
        "layers-not-divisible: layers do not divide over",
        world_size=2,
    )


def test_batch_arithmetic(files, ranks):
    assert_refused(
        ranks,
        flags(files, "batch", "--global-batch-size", 9, "--micro-batch-size", 2),
        USAGE,
        "batch-not-divisible: is not divisible by",
        world_size=2,
    )
    assert_refused(
        ranks,
        flags(files, "batch", "--tensor-model-parallel-size", 4),
        USAGE,
        "world-not-divisible: cannot be divided into replicas",
    )


def test_several_problems_at_once(files, ranks):
    wrong = ("--global-batch-size", 3, "--micro-batch-size", 2, "--min-lr", 1)
    argv = flags(files, "several", *wrong, student_hf="nowhere")
    assert_refused(
        ranks,
        argv,
        USAGE,
        "3 problems:",
        "[1] error[hf-model-not-found]: ",
        "nowhere does not exist",
        "[2] error[numbers-contradict]: ",
        "[3] error[batch-not-divisible]: ",
    )


def test_problems_of_one_model_are_counted_with_the_others(files, ranks):
    """A teacher with two wrong sizes and a missing task are three problems, not a list in a list."""
    folder = shutil.copytree(files / "teacher", files / "wrong sizes")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 400, "intermediate_size": 112}))
    task = ("--eval-interval", 1, "--eval-completions", files / "none.jsonl")
    argv = flags(files, "one", *task, teacher_hf="wrong sizes")
    assert_refused(
        ranks,
        argv,
        USAGE,
        "3 problems:",
        "[1] error[hf-config-of-other-weights]: ",
        "(intermediate_size)",
        "[2] error[hf-config-of-other-weights]: ",
        "(vocab_size)",
        "[3] error[data-file-unreadable]: ",
    )


def test_no_teacher_no_data_no_steps(files, ranks):
    argv = flags(files, "none", "--train-iters", 0, teacher_hf=None, data_path=None)
    assert_refused(
        ranks,
        argv,
        USAGE,
        "3 problems:",
        "add-flag: train-iters is",
        "model-missing: no teacher is given",
        "data-path-missing: no training data is given",
    )


@pytest.mark.fault(28)
def test_another_tokenizer(files, ranks):
    add_tokenizer(make_model(files / "stranger", **TEACHER), text="pack my box with five dozen liquor jugs. ")
    assert_refused(
        ranks,
        flags(files, "tokenizer", teacher_hf="stranger"),
        USAGE,
        "tokenizers-differ: has another tokenizer than the",
        str(files / "stranger"),
    )


def test_missing_data_file(files, ranks):
    """An error that only rank 0 can see ends every rank."""
    assert_refused(
        ranks,
        flags(files, "missing", data_path="nothing.jsonl"),
        DATA,
        "data-path-not-found: nothing found",
        str(files / "nothing.jsonl"),
        world_size=2,
    )


@pytest.mark.parametrize(
    "line, code",
    [
        ('{"text": "cut', "record-not-json: not valid JSON"),
        ('{"txt": "misspelt"}', "record-without-known-keys"),
        ('{"text": 5}', "record-field-not-text: it must be a string"),
    ],
)
@pytest.mark.fault(24)
def test_malformed_line(line, code, files, ranks):
    path = write_records(files / "bad.jsonl", {"text": "fine"}, "", line, {"text": "fine too"})
    assert_refused(ranks, flags(files, "malformed", data_path="bad.jsonl"), DATA, f"{path}:3: ", code)


@pytest.mark.fault(35)
def test_all_tokens_masked(files, ranks):
    write_records(files / "masked.jsonl", *[{"prompt": "the quick brown fox", "completion": ""}] * 3)
    assert_refused(
        ranks,
        flags(files, "masked", "--no-append-eod", data_path="masked.jsonl"),
        DATA,
        "corpus-without-loss-tokens",
    )


def test_token_ids_that_the_models_do_not_know(files, ranks):
    builder = IndexedDatasetBuilder(str(files / "wide.bin"), dtype=np.int32)
    for ids in ([1, 2, 3], [4, 307, 5]):
        builder.add_document(np.asarray(ids, dtype=np.int32), [len(ids)])
    builder.finalize(str(files / "wide.idx"))
    assert_refused(
        ranks,
        flags(files, "wide", data_path="wide"),
        DATA,
        "token-beyond-vocabulary: the model knows 0 to",
        "document 1 has token id 307, the model knows 0 to 306",
    )


def test_missing_model_folder(files, ranks):
    assert_refused(
        ranks,
        flags(files, "folder", teacher_hf="nowhere"),
        CHECKPOINT,
        "hf-model-not-found",
        str(files / "nowhere"),
    )


@pytest.mark.fault(31)
def test_weight_map_that_leaves_the_folder(files, ranks):
    folder = shutil.copytree(files / "teacher", files / "escape")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "../student/model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert_refused(
        ranks,
        flags(files, "escape", teacher_hf="escape"),
        CHECKPOINT,
        "untrusted-files: weight_map sends tensor",
        "model.norm.weight",
    )


@pytest.mark.parametrize(
    "pointer, text",
    [
        ("garbage", "latest_checkpointed_iteration.txt holds 'garbage'"),
        ("7", "iter_0000007"),
        (None, "latest_checkpointed_iteration.txt is missing"),
    ],
)
@pytest.mark.fault(4)
def test_damaged_pointer(pointer, text, files, ranks):
    folder = files / f"pointer {pointer}"
    (folder / "iter_0000002").mkdir(parents=True)
    if pointer is not None:
        (folder / "latest_checkpointed_iteration.txt").write_text(pointer)
    argv = flags(files, "pointer", "--load", folder)
    assert_refused(ranks, argv, CHECKPOINT, "checkpoint-none-whole", str(folder), text)


@pytest.fixture(scope="module")
def saved(files, ranks):
    """Return a checkpoint of two steps."""
    (result,) = run_main(ranks, flags(files, "saved", "--save", files / "saved"))
    assert result.exit_code == 0, result.stderr
    return files / "saved"


@pytest.mark.parametrize(
    "name, content",
    [
        ("mkd.json", b"{"),
        ("mkd.json", b'{"iteration": 2}'),
        ("metadata.json", b"{"),
        (".metadata", b"garbage"),
        ("common.pt", b"garbage"),
        ("__0_0.distcp", b"garbage"),
        ("__0_0.distcp", None),
    ],
)
@pytest.mark.fault(6)
def test_damaged_checkpoint(name, content, saved, files, ranks, tmp_path):
    path = shutil.copytree(saved, tmp_path / "damaged") / "iter_0000002" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    argv = flags(files, "damaged", "--train-iters", 3, "--load", tmp_path / "damaged")
    assert_refused(ranks, argv, CHECKPOINT, "checkpoint-none-whole", str(path))


def test_checkpoint_of_another_model(saved, files, ranks):
    argv = flags(files, "shape", "--train-iters", 3, "--load", saved, student_hf="teacher")
    assert_refused(
        ranks,
        argv,
        CHECKPOINT,
        "checkpoint-of-another-model: is a checkpoint of another model",
        "num_layers 2 instead of 3, hidden_size 48 instead of 72, ",
    )


@pytest.mark.parametrize("flag", ["--log-dir", "--save", "--export-hf"])
def test_a_folder_that_cannot_be_made_ends_the_run_before_its_first_step(flag, files, ranks):
    argv = flags(files, "folders", flag, files / "text.jsonl" / "below")
    assert_refused(ranks, argv, USAGE, "not-writable", str(files / "text.jsonl" / "below"))


def test_config_that_is_no_object(files, ranks):
    shutil.copytree(files / "teacher", files / "list")
    write_records(files / "list" / "config.json", [])
    argv = flags(files, "list", teacher_hf="list")
    assert_refused(
        ranks,
        argv,
        CHECKPOINT,
        "model-config-not-valid: is not a JSON object",
        str(files / "list" / "config.json"),
    )


@pytest.mark.parametrize(
    "role, world_size, more",
    [
        ("student", 1, ()),
        ("student", 2, ("--pipeline-model-parallel-size", 2, "--teacher-pipeline-layout", "2,1")),
        ("teacher", 1, ()),
        ("teacher", 2, ("--tensor-model-parallel-size", 2)),
        ("teacher", 2, ("--use-distributed-optimizer", "--kd-ratio", 1)),
    ],
)
@pytest.mark.fault(19, 20)
def test_non_finite_loss_stops_before_the_update(role, world_size, more, files, ranks):
    """A finite weight of the head overflows: what is not finite in a file is refused while it is loaded."""
    name = f"{role} {world_size} {len(more)}"
    head = {"student": "model.embed_tokens.weight", "teacher": "lm_head.weight"}[role]
    poison(files / role, files / name, 3e38, head)
    save, export = files / f"{name} save", files / f"{name} hf"
    argv = flags(files, f"{name} save", "--save", save, "--export-hf", export, *more, **{f"{role}_hf": name})
    assert_refused(
        ranks, argv, NON_FINITE, "step-not-finite", "loss sum nan, gradient norm nan", world_size=world_size
    )
    assert read_metrics(save) == []
    assert not list(save.glob("iter_*")) and not (save / "latest_checkpointed_iteration.txt").exists()
    assert not list(export.iterdir())
    for before, after in ranks.run(hash_around_failure, world_size, argv):
        assert before == after


def hash_around_failure(argv):
    """Return SHA-256 of this rank's parameters before training and after a failure on a non-finite loss."""
    import torch.distributed as dist

    from mkd.config.load import load_config
    from mkd.errors import NonFiniteError
    from mkd.platform import detect
    from mkd.run.loop import train
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    run = build_run(plan_run(load_config(argv).config, dist.get_world_size()), detect())
    before = _hash(run.engine.stages)
    with pytest.raises(NonFiniteError):
        train(run)
    run.reporter.close()
    return before, _hash(run.engine.stages)


def _hash(chunks) -> str:
    digest = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in sorted(chunk.named_parameters()):
            digest.update(name.encode() + parameter.detach().numpy().tobytes())
    return digest.hexdigest()
