"""Export a teacher: the same at every layout, resumable, and never mixed with another export."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from mkd.config.load import load_config
from mkd.data.stored.cache_meta import META_FILE, TopKMeta
from mkd.run.stored.cache_description import ExportSettings, require_room, write_description
from mkd.run.stored.cache_export import plan_export
from mkd.run.stored.topk_export import TopKExport
from tests.reported import refused
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import flags, make_files, poison
from tests.train.topk_files import DATA, export, exported

pq = pytest.importorskip("pyarrow.parquet")
ROOT = Path(__file__).resolve().parent.parent.parent
T2 = ("--kd-temperature", 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def single(files, ranks):
    """Export by one process: k = 16, fp32, temperature 2."""
    return exported(ranks, files, "single", "--k", 16, *T2)


def stored_rows(folder: Path) -> dict:
    """Return (part, pack) -> (ids [n, k], log-probabilities [n, k], [n, 3]).

    The last holds the logarithm of the mass, the cross entropy and the entropy.
    """
    rows = {}
    for path in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(path).to_pylist():
            statistics = np.array(row["statistics"]).reshape(-1, 3)
            shape = (len(statistics), -1)
            columns = (np.array(row[name]).reshape(shape) for name in ("ids", "logprobs"))
            rows[path.name.split("-")[0], row["sample_id"]] = (*columns, statistics)
    return rows


def teacher_by_transformers(files: Path, teacher: str = "teacher") -> dict:
    """Return the same from transformers in fp32, with each document of a pack alone."""
    from transformers import AutoModelForCausalLM

    from mkd.tokenizers.load import load_tokenizer
    from tests.data.datasets import open_datasets

    model = AutoModelForCausalLM.from_pretrained(files / teacher, dtype=torch.float32).eval()
    datasets = open_datasets(
        data_path=[str(files / "text.jsonl")],
        split=DATA[1],
        seq_length=32,
        vocab_size=307,
        cache_dir=str(files / "cache"),
        tokenizer=load_tokenizer("HuggingFaceTokenizer", str(files / "student")),
    )
    rows = {}
    for part, dataset in zip(("train", "valid"), datasets, strict=True):
        for index in range(len(dataset)):
            pack, logits, start = dataset[index], torch.zeros(32, 307), 0
            for length, span in zip(pack.lengths, pack.spans, strict=True):
                with torch.no_grad():
                    ids = torch.from_numpy(pack.tokens[start : start + length])
                    logits[start : start + length] = model(ids[None]).logits[0]
                start += span
            chosen = pack.loss_mask != 0
            logits, labels = logits[chosen].double(), torch.from_numpy(pack.labels[chosen])
            top = (logits / 2).log_softmax(dim=1).topk(16, dim=1)
            log_p = logits.log_softmax(dim=1)
            ce, entropy = -log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(dim=1)
            statistics = torch.stack([top.values.logsumexp(dim=1), ce, entropy], dim=1)
            rows[part, index] = (top.indices.numpy(), top.values.numpy(), statistics.numpy())
    return rows


def assert_same(found: dict, wanted: dict, tolerance: float) -> None:
    """Compare exports; ids may differ only where two log-probabilities are nearly equal."""
    assert found.keys() == wanted.keys()
    for key, (ids, logprobs, statistics) in wanted.items():
        assert np.abs(found[key][1] - logprobs).max() <= tolerance * np.abs(logprobs).max()
        assert np.abs(found[key][2] - statistics).max() <= tolerance * np.abs(statistics).max()
        gaps = -np.diff(logprobs, axis=1)
        clear = np.ones_like(ids, dtype=bool)
        for side in (clear[:, 1:], clear[:, :-1]):
            side &= gaps > 2 * tolerance * np.abs(logprobs).max()
        clear[:, -1] = False  # the next id may be equally probable
        assert clear.mean() > 0.9
        assert np.array_equal(found[key][0][clear], ids[clear])


def test_equals_transformers(single, files):
    assert_same(stored_rows(single), teacher_by_transformers(files), 1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_teacher_with_experts_equals_transformers(replicas, files, ranks):
    """Replicas that share experts run equally many packs, though the last shard has fewer than the others."""
    name, size = f"experts {replicas}", ("--teacher-expert-model-parallel-size", replicas)
    make_model(files / name, "qwen3_moe", seed=3, scale=4.0)
    add_tokenizer(files / name)
    cache = exported(
        ranks, files, f"{name} cache", "--k", 16, *T2, *size, world_size=replicas, teacher_hf=name
    )
    shards = [pq.read_metadata(path).num_rows for path in cache.glob("train-*.parquet")]
    assert min(shards) < max(shards)
    assert_same(stored_rows(cache), teacher_by_transformers(files, name), 1e-5)


LAYOUTS = {
    "TP2 SP": (2, ("--tensor-model-parallel-size", 2, "--sequence-parallel")),
    "PP2": (2, ("--pipeline-model-parallel-size", 2, "--teacher-pipeline-layout", "2,1")),
    "PP2 VPP2": (
        2,
        (
            "--pipeline-model-parallel-size",
            2,
            "--num-virtual-stages-per-pipeline-rank",
            2,
            "--teacher-pipeline-layout",
            "1,1,1,0",
            "--global-batch-size",
            12,
        ),
    ),
    "DP2 micro-batch 2": (2, ("--micro-batch-size", 2)),
    # In the last round a process has no shard, and gathers the layers for the others.
    "DP4 over peers": (4, ("--teacher-residency", "peers", "--teacher-peers", 4)),
    "TP2 PP2": (
        4,
        (
            "--tensor-model-parallel-size",
            2,
            "--pipeline-model-parallel-size",
            2,
            "--teacher-pipeline-layout",
            "1,2",
        ),
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * ("TP2 PP2" in one)) for one in LAYOUTS]
)
def test_every_layout_writes_the_same(name, single, files, ranks):
    world_size, layout = LAYOUTS[name]
    cache = exported(ranks, files, name, "--k", 16, *T2, *layout, world_size=world_size)
    assert [path.name for path in sorted(cache.iterdir())] == [path.name for path in sorted(single.iterdir())]
    assert_same(stored_rows(cache), stored_rows(single), 1e-5)


def test_half_precision(single, files, ranks):
    """Log-probabilities lose at most 2^-11 of their size; masses, cross entropies and entropies nothing."""
    half = stored_rows(exported(ranks, files, "half", "--k", 16, *T2, "--logprob-dtype", "float16"))
    for key, (_, logprobs, statistics) in stored_rows(single).items():
        assert np.abs(half[key][1] - logprobs).max() <= 1.001 * 2**-11 * np.abs(logprobs).max()
        assert np.array_equal(half[key][2], statistics)


def test_goes_on_where_it_stopped(single, files, ranks):
    """Existing shards are kept, later ones are the same, and a second complete export writes nothing."""
    cache = Path(shutil.copytree(single, files / "stopped"))
    lost = cache / "train-00001.parquet"
    wanted = lost.read_bytes()
    lost.unlink()
    kept = {path: path.stat().st_mtime_ns for path in cache.glob("*.parquet")}
    (result,) = export(ranks, files, "stopped", "--k", 16, *T2)
    assert result.exit_code == 0 and "train: 1 of " in result.stdout, result.stderr
    assert lost.read_bytes() == wanted
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    (result,) = export(ranks, files, "stopped", "--k", 16, *T2)
    assert result.exit_code == 0 and "train: 0 of " in result.stdout


def test_a_folder_holds_one_cache(single, files, ranks):
    for more, differing in (
        (("--k", 8, *T2), "k differ"),
        (("--k", 16), "temperature differ"),
        (("--k", 16, *T2, "--seq-length", 64), "data differ"),
    ):
        results = export(ranks, files, "single", *more, world_size=2)
        assert [result.exit_code for result in results] == [65, 65]
        assert "holds another teacher cache" in results[0].stderr and differing in results[0].stderr
        assert "choose another --out" in results[0].stderr and "error" not in results[1].stderr


def test_overwrite_replaces_another_cache_and_resumes_the_same(single, files, ranks):
    """No shard of the other cache stays, and no other file goes."""
    cache = Path(shutil.copytree(single, files / "replaced"))
    (cache / "notes.txt").write_text("kept")
    before = {path.name for path in cache.iterdir()}
    (refused,) = export(ranks, files, "replaced", "--k", 4, *T2)
    assert refused.exit_code == 65 and {path.name for path in cache.iterdir()} == before
    more = ("--k", 4, *T2, "--samples-per-shard", 100, "--overwrite")
    exported(ranks, files, "replaced", *more, world_size=2)
    names = {"meta.json", "notes.txt", "train-00000.parquet", "valid-00000.parquet"}
    assert {path.name for path in cache.iterdir()} == names < before
    assert {ids.shape[1] for ids, *_ in stored_rows(cache).values()} == {4}
    (result,) = export(ranks, files, "replaced", *more)
    assert result.exit_code == 0 and "train: 0 of 1 shard to make" in result.stdout, result.stderr


def test_only_a_cache_is_replaced(files):
    """Its description, of any version, tells that it is one. Data of the hub have names like shards."""
    out = files / "other files"
    out.mkdir()
    data, shard, described = (
        out / name for name in ("train-00000-of-00010.parquet", "train-00000.parquet", META_FILE)
    )
    data.write_text("data")
    plan = plan_export(load_config(flags(files, "described", *DATA)).config, 1)
    settings = ExportSettings(out, 10)
    allowed, describe = (
        replace(settings, overwrite=True),
        partial(TopKExport(settings, 4, "float32").describe, plan),
    )
    what = describe({"train": 20})
    meta = write_description(plan, settings, what)
    shard.write_text("a shard")
    for text, code in (
        (None, "teacher-cache-in-the-way: tells that they are a cache"),
        ("", "teacher-cache-in-the-way: description of a teacher cache"),
        ('{"name": "a data set"}', "teacher-cache-in-the-way: description of a teacher cache"),
    ):
        described.unlink() if text is None else described.write_text(text)
        for given in (settings, allowed):
            with refused(code) as caught:
                require_room(given, describe)
            assert "--overwrite" not in caught.value.do
            with refused(code):
                write_description(plan, given, what)
        assert shard.exists() and (text is None or described.read_text() == text)
    described.write_text(json.dumps(asdict(meta) | {"format_version": 1}))
    with refused("teacher-cache-in-the-way: description of a teacher cache") as caught:
        require_room(settings, describe)
    assert "--overwrite" in caught.value.do and require_room(allowed, describe)
    assert write_description(plan, allowed, what) == meta == TopKMeta.read(out)
    assert not shard.exists() and data.read_text() == "data" and not require_room(allowed, describe)


def test_a_teacher_that_is_not_finite(files, ranks):
    """A finite weight of the head overflows."""
    poison(files / "teacher", files / "nan teacher", 3e38, "lm_head.weight")
    results = export(ranks, files, "nan", teacher_hf="nan teacher", world_size=2)
    assert [result.exit_code for result in results] == [70, 70]
    assert f"{files / 'nan teacher'}: the teacher's predictions of " in results[0].stderr
    assert "they are in train shards 0, 1 of 10 packs each" in results[0].stderr
    assert not list((files / "nan").glob("train*"))


def test_wrong_flags(files, ranks):
    for more, paths, exit_code, text in (
        (("--k", 308), {}, 64, "--k 308 is not from 1 to 307"),
        (("--k", 0), {}, 64, "--k 0 is not from 1 to 307"),
        (("--samples-per-shard", 0), {}, 64, "--samples-per-shard is 0"),
        ((), {"teacher_hf": None}, 64, "no teacher is given"),
        ((), {"data_path": "nothing.jsonl"}, 65, "nothing found"),
        (("--kk", 3), {}, 64, "--kk is not a flag of mkd"),
    ):
        (result,) = export(ranks, files, "wrong", *more, **paths)
        assert result.exit_code == exit_code and text in result.stderr
        assert not (files / "wrong").exists()


@pytest.mark.parametrize("more", [(), ("--overwrite",)])
def test_a_cache_is_never_beside_a_model(more, files, ranks):
    before = sorted((files / "student").iterdir())
    (result,) = export(ranks, files, "student", *more)
    assert result.exit_code == 64 and "error[choose-another-folder]" in result.stderr
    assert sorted((files / "student").iterdir()) == before


def test_a_dry_run_ends_after_the_checks(files, ranks):
    (result,) = export(ranks, files, "dry", "--dry-run")
    assert result.exit_code == 0 and "with --dry-run nothing is written" in result.stdout, result.stderr
    assert not (files / "dry").exists()


def test_as_a_user_starts_it(files):
    argv = ["--out", files / "alone", "--k", 4, *flags(files, "alone log", *DATA)]
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "export_teacher_topk.py", *map(str, argv)],
        cwd=files,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "packs, k = 4, " in done.stdout
    assert (files / "alone" / "valid-00000.parquet").exists()
