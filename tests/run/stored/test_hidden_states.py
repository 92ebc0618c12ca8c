"""Check training from stored hidden states: bit for bit the run with the teacher, or refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from mkd.data.stored.cache_meta import HiddenMeta
from mkd.data.stored.teacher_hidden import HEAD_FILE, write_head
from tests.reported import reported_codes, reported_text
from tests.tiny_models import add_tokenizer, make_model
from tests.train.command import (
    TEACHER,
    flags,
    make_files,
    poison,
    read_metrics,
    read_weights,
    run_main,
    write_records,
)
from tests.train.topk_files import DATA, export, exported

pq = pytest.importorskip("pyarrow.parquet")
HIDDEN = "mkd.commands.hidden"
EVALUATED = ("--eval-interval", 2, "--eval-iters", 2)
JSD = ("--kd-divergence", "jsd", "--kd-temperature", 2)
ONE, TP2 = (1, ()), (2, ("--tensor-model-parallel-size", 2))
TP2_SP = (2, (*TP2[1], "--sequence-parallel"))
PP2 = (2, ("--pipeline-model-parallel-size", 2))
VPP2 = (2, (*PP2[1], "--num-virtual-stages-per-pipeline-rank", 2))
TEACHER_LAYERS = {  # of the teacher's 3 layers; a stored teacher has none
    "PP2": ("--teacher-pipeline-layout", "2,1"),
    "PP2 VPP2": ("--teacher-pipeline-layout", "1,1,1,0"),
}
CP2 = (2, ("--context-parallel-size", 2))
DP2 = (2, ("--use-distributed-optimizer", "--num-workers", 1))
TIMES = (
    "time",
    "teacher_share",
    "tokens_per_s",
    "tflops",
    "memory",
    "teacher_ms",
    "mfu",
    "eta",
    "data_wait",
    "gib",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    files = make_files(tmp_path_factory.mktemp("hidden"))
    add_tokenizer(make_model(files / "deep", "qwen3", seed=1, num_hidden_layers=4))
    return files


@pytest.fixture(scope="module")
def cache(files, ranks):
    """Export on one process, in fp32."""
    exported(ranks, files, "cache", command=HIDDEN)
    return "cache"


def stored(files, run: str, cache: str, *more, **paths) -> list[str]:
    """Return the command line of a short run from stored states, without a teacher."""
    return flags(
        files, run, "--teacher-hidden", str(files / cache), *DATA, *more, **({"teacher_hf": None} | paths)
    )


def trained(ranks, files, argv, world_size=1) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Return (metrics records, weights) of a run that ends well."""
    results = run_main(ranks, argv, world_size)
    assert [result.exit_code for result in results] == [0] * world_size, results[0].stderr
    run = argv[argv.index("--log-dir") + 1]
    return read_metrics(files / run), read_weights(files / argv[argv.index("--export-hf") + 1])


def numbers(record: dict) -> dict:
    """Return what a record says of losses, gradients and tokens."""
    return {key: value for key, value in record.items() if not any(one in key for one in TIMES)}


def assert_equal(found, wanted):
    (records, weights), (wanted_records, wanted_weights) = found, wanted
    assert [numbers(one) for one in records] == [numbers(one) for one in wanted_records]
    assert len(records) == 4 and {"loss", "kd_loss", "grad_norm", "teacher_ce"} <= records[1].keys()
    assert weights.keys() == wanted_weights.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in wanted_weights.items())


def assert_near(found, wanted, tolerance=1e-5):
    (records, weights), (wanted_records, wanted_weights) = found, wanted
    for ours, theirs in zip(records, wanted_records, strict=True):
        for key in ("loss", "kd_loss", "teacher_ce", "grad_norm"):
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance), key
    for name, tensor in wanted_weights.items():
        assert (weights[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


LAYOUTS = {  # name -> (layout of the run, layout of the export)
    "one process": (ONE, ONE),
    "TP2 SP": (TP2_SP, TP2_SP),
    "PP2": (PP2, ONE),
    "PP2 VPP2": (VPP2, ONE),
    "CP2": (CP2, CP2),
    "DP2 distributed": (DP2, ONE),
    "TP2": (TP2, TP2),
}
QUICK = ("TP2 SP",)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in LAYOUTS]
)
def test_bit_for_bit_the_run_with_the_teacher(name, cache, files, ranks):
    """Losses, metrics, evaluations and weights are equal, in every layout and with any divergence."""
    (world_size, layout), (exporters, export_layout) = LAYOUTS[name]
    if export_layout:
        cache = f"cache {name}"
        exported(ranks, files, cache, *export_layout, world_size=exporters, command=HIDDEN)
    more = (*JSD, *EVALUATED, *layout, "--teacher-prefetch", 0, "--export-hf")
    paths = {"student_hf": "deep"} if "VPP" in name else {}
    online = (*DATA, *TEACHER_LAYERS.get(name, ()), *more, files / f"online {name} hf")
    online = flags(files, f"online {name}", *online, **paths)
    offline = stored(files, f"offline {name}", cache, *more, files / f"offline {name} hf", **paths)
    assert_equal(trained(ranks, files, offline, world_size), trained(ranks, files, online, world_size))


@pytest.mark.slow
def test_an_export_of_one_layout_trains_in_another(cache, files, ranks):
    more = (*JSD, *EVALUATED, *TP2[1], "--lr", 1, "--adam-eps", 1, "--export-hf")
    online = trained(ranks, files, flags(files, "tp2", *DATA, *more, files / "tp2 hf"), 2)
    argv = stored(files, "one to tp2", cache, *more, files / "one to tp2 hf")
    assert_near(trained(ranks, files, argv, 2), online)


PAIRS = {  # what a run has besides -> (processes, flags of both, flags of the run)
    "TP2 SP, micro-batch 2": (2, (*TP2_SP[1], "--micro-batch-size", 2), ()),
    "bf16, logits in fp32": (1, ("--bf16",), ("--kd-fp32-logits",)),
    "adapters": (1, (), ("--lora-rank", 4)),
    "experts of two models": (2, ("--expert-model-parallel-size", 2), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_other_settings_make_no_difference(name, files, ranks):
    """Losses and weights are those of the running teacher; exchanged experts round differently."""
    world_size, shared, own = PAIRS[name]
    models = {}
    if "experts" in name:
        models = {"student_hf": "moe student", "teacher_hf": "moe teacher"}
        for model, family in (("student", "qwen3_moe"), ("teacher", "mixtral")):
            add_tokenizer(make_model(files / f"moe {model}", family, num_hidden_layers=2))
    cache, more = f"cache {name}", (*JSD, *EVALUATED, *shared, *own, "--export-hf")
    exported(ranks, files, cache, *shared, world_size=world_size, command=HIDDEN, **models)
    online = flags(files, f"on {name}", *DATA, *more, files / f"on {name} hf", **models)
    alone = models | {"teacher_hf": None}
    offline = stored(files, f"off {name}", cache, *more, files / f"off {name} hf", **alone)
    compare = assert_near if models else assert_equal
    compare(*(trained(ranks, files, argv, world_size) for argv in (offline, online)))


def entry(path, **more) -> str:
    words = [f"{name}: {value}" for name, value in more.items()]
    return "{" + ", ".join([path, *words]) + "}"


@pytest.mark.parametrize("how", ["weighted_sum", pytest.param("average", marks=pytest.mark.slow)])
def test_stored_states_beside_a_teacher_that_runs(how, cache, files, ranks):
    """Two teachers, one of them stored, are the two that run; also in a pipeline that runs one ahead."""
    small = dict(TEACHER, seed=5, num_hidden_layers=2, hidden_size=48)
    if not (files / "second").exists():
        add_tokenizer(make_model(files / "second", **small))
    runs = []
    for name, first in (
        ("both", f"hf: '{files / 'teacher'}', pipeline_layout: '2,1'"),
        ("one", f"hidden: '{files / cache}'"),
    ):
        config = files / f"{name}.yaml"
        own = {} if how == "average" else {"temperature": 3}
        entries = [entry(f"hf: '{files / 'second'}'", name="second"), entry(first, name="first", **own)]
        config.write_text(f"teachers: [{', '.join(entries)}]\n")
        weighting = () if how == "average" else ("--teacher-weighting", "ce")
        more = ("--teacher-combination", how, *weighting, *EVALUATED, *PP2[1], "--config", config)
        hf = files / f"{how} {name} hf"
        argv = flags(files, f"{how} {name}", *DATA, *more, "--export-hf", hf, teacher_hf=None)
        runs.append(trained(ranks, files, argv, 2))
    assert_equal(*runs)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["tags", "tokenizers"])
def test_stored_states_beside_teachers_of_other_text(how, files, ranks):
    """The other teacher has records of another tag, or another tokenizer."""
    records = [
        {"text": f"{i}: " + "the quick brown fox " * (i % 7 + 1), "tag": "ab"[i % 2]} for i in range(60)
    ]
    write_records(files / "tagged.jsonl", *records)
    make_model(files / "stranger of text", **dict(TEACHER, seed=7))
    add_tokenizer(files / "stranger of text", text="pack my box with five dozen liquor jugs. ")
    is_tagged, teacher = how == "tags", f"hf: '{files / 'teacher'}'"
    first = f"hf: '{files / ('teacher' if is_tagged else 'stranger of text')}'"
    rest = "kd: {tag_key: tag, teacher_combination: route}" if is_tagged else ""
    tags = [{"tags": "[a]"}, {"tags": "[b]"}] if is_tagged else [{"xtoken": "{loss: partition_kl}"}, {}]
    runs, paths = [], {"teacher_hf": None, "data_path": "tagged.jsonl"}
    for name, second in (("export", teacher), ("on", teacher), ("off", f"hidden: '{files / f'of {how}'}'")):
        entries = [entry(first, name="x", **tags[0]), entry(second, name="y", **tags[1])]
        config = files / f"{how} {name}.yaml"
        config.write_text(f"teachers: [{', '.join(entries[:: -1 if name == 'export' else 1])}]\n{rest}\n")
        if name == "export":  # of the first teacher
            exported(ranks, files, f"of {how}", "--config", config, command=HIDDEN, **paths)
            continue
        more = (*EVALUATED, "--config", config, "--export-hf", files / f"{how} {name} hf")
        runs.append(trained(ranks, files, flags(files, f"{how} {name}", *DATA, *more, **paths)))
    assert_equal(*runs)


def test_training_resumes_bit_for_bit(cache, files, ranks):
    """A run that stops after a step and resumes is the run that does not stop."""
    more = (*JSD, *EVALUATED, "--export-hf")
    whole = trained(ranks, files, stored(files, "whole", cache, *more, files / "whole hf"))
    saved = ("--save", files / "saved", "--save-interval", 1)
    (result,) = run_main(ranks, stored(files, "begun", cache, *more[:-1], *saved, "--exit-interval", 1))
    assert result.exit_code == 0, result.stderr
    resumed = (*saved, "--load", files / "saved", *more, files / "begun hf")
    records, weights = trained(ranks, files, stored(files, "begun", cache, *resumed))
    del records[2]  # the evaluation at the end of the first part
    assert [one["loss"] for one in records] == [one["loss"] for one in whole[0]]
    assert all(torch.equal(weights[name], tensor) for name, tensor in whole[1].items())


def test_everybody_who_may_read_the_folder_may_read_the_head(tmp_path):
    (tmp_path / "other").touch()
    write_head(tmp_path, torch.zeros(3, 2))
    assert (tmp_path / HEAD_FILE).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_export_resumes(cache, files, ranks):
    """Shards that are there are kept; a lost shard and a lost head are made again, byte for byte."""
    copy = shutil.copytree(files / cache, files / "stopped")
    lost = [copy / "train-00001.parquet", copy / HEAD_FILE]
    wanted = [path.read_bytes() for path in lost]
    for path in lost:
        path.unlink()
    kept = {path: path.stat().st_mtime_ns for path in copy.glob("*.parquet")}
    (result,) = export(ranks, files, "stopped", command=HIDDEN)
    assert result.exit_code == 0 and "train: 1 of " in result.stdout, result.stderr
    assert [path.read_bytes() for path in lost] == wanted
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    meta = HiddenMeta.read(copy)
    assert (meta.row_bytes, meta.states_dtype) == (72 * 4, "float32")
    (refused,) = export(ranks, files, "stopped", "--seq-length", 64, command=HIDDEN)
    assert refused.exit_code == 65 and "data differ" in reported_text(refused.stderr)
    (refused,) = export(ranks, files, "stopped")
    assert refused.exit_code == 65 and "holds hidden states" in reported_text(refused.stderr)


def assert_refused(ranks, argv, exit_code, code, *named):
    """Check that two ranks end with one error before the models are built."""
    results = run_main(ranks, argv, world_size=2)
    assert [result.exit_code for result in results] == [exit_code] * 2, results[0].stderr
    message = reported_text(results[0].stderr)
    assert reported_codes(results[0].stderr) == [code] and not reported_codes(results[1].stderr), message
    assert "Traceback" not in message and all(text in message for text in named), message


def other_tokenizer(files):
    make_model(files / "stranger", **TEACHER)
    add_tokenizer(files / "stranger", text="pack my box with five dozen liquor jugs. ")
    return "--tokenizer-model", files / "stranger"


def flipped(path):
    """Change a byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def changed_meta(folder, **values):
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | values))


DAMAGES = {  # name -> (damage to the folder, code, text)
    "half": (lambda f: (f / "train-00001.parquet").unlink(), "teacher-cache-incomplete", "is incomplete"),
    "cut": (
        lambda f: (f / "train-00001.parquet").write_bytes((f / "train-00001.parquet").read_bytes()[:500]),
        "teacher-cache-incomplete",
        "train-00001.parquet is damaged",
    ),
    "flipped": (lambda f: flipped(f / "train-00000.parquet"), "teacher-cache-incomplete", "is damaged"),
    "no head": (lambda f: (f / HEAD_FILE).unlink(), "teacher-cache-incomplete", "head.tensor, is missing"),
    "other head": (lambda f: flipped(f / HEAD_FILE), "teacher-cache-incomplete", "is damaged"),
    "width": (lambda f: changed_meta(f, hidden_size=36), "teacher-cache-incomplete", "36 numbers"),
    "of two exports": (
        lambda f: changed_meta(f, export_id="1"),
        "teacher-cache-incomplete",
        "train-00000.parquet was written by another export",
    ),
    "nothing": (lambda f: (f / "meta.json").unlink(), "teacher-cache-not-found", "there is no meta.json"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_folders(name, cache, files, ranks):
    damage, code, text = DAMAGES[name]
    damage(shutil.copytree(files / cache, files / f"damaged {name}"))
    (result,) = run_main(ranks, stored(files, f"run {name}", f"damaged {name}", *JSD))
    (found,) = reported_codes(result.stderr)
    assert result.exit_code == 65 and found.startswith(code), found
    assert text in reported_text(result.stderr) and not (files / f"run {name}" / "metrics.jsonl").exists()


def test_what_does_not_fit_is_refused(cache, files, ranks):
    """Other data, another tokenizer, other weights, a teacher of another width, the other kind of cache."""
    poison(files / "teacher", files / "other teacher", 0.5)
    wide = add_tokenizer(make_model(files / "wide", **dict(TEACHER, hidden_size=96)))
    write_records(files / "half.jsonl", *({"text": f"{i}: the quick brown fox"} for i in range(30)))
    differs, weights = "teacher-cache-differs", "teacher-cache-weights-differ"
    for argv, exit_code, code, *named in (
        (stored(files, "a", cache, data_path="half.jsonl"), 65, f"{differs}: the teacher cache has"),
        (stored(files, "a", cache, "--seq-length", 64), 65, f"{differs}: was made with", "--seq-length"),
        (stored(files, "a", cache, *other_tokenizer(files)), 65, f"{differs}: is of another tokenizer"),
        (stored(files, "a", cache, teacher_hf="other teacher"), 66, weights, "other teacher"),
        (stored(files, "a", cache, teacher_hf=wide.name), 66, weights, str(wide)),
        (
            flags(files, "a", "--teacher-topk", files / cache, *DATA, teacher_hf=None),
            65,
            "teacher-cache-not-found: holds hidden states",
            "--teacher-hidden",
        ),
    ):
        assert_refused(ranks, argv, exit_code, code, *named)


TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}<|endoftext|>{% endfor %}"
REFUSING = "{% if 'lazy' in messages[0].content %}{{ raise_exception('too lazy') }}{% endif %}" + TEMPLATE


def test_documents_that_another_teacher_refuses_are_not_exported(files, ranks):
    """Its tokenizer has a chat template that takes no lazy dogs: the packs are those of the run."""
    for name, template in (("student", TEMPLATE), ("teacher", TEMPLATE), ("choosy", REFUSING)):
        source = files / ("teacher" if name == "choosy" else name)
        folder = shutil.copytree(source, files / f"chat {name}")
        if name == "choosy":
            add_tokenizer(folder, text="pack my box with five dozen liquor jugs. ")
        (folder / "chat_template.jinja").write_text(template)
    said = [["the quick brown fox", "the lazy dog"][i % 5 == 3] for i in range(40)]
    answer = {"role": "assistant", "content": "jumps"}
    asked = ({"role": "user", "content": f"{i}: {text}"} for i, text in enumerate(said))
    write_records(files / "chats.jsonl", *({"messages": [one, answer]} for one in asked))
    paths = {"student_hf": "chat student", "teacher_hf": None, "data_path": "chats.jsonl"}
    other, data = entry(f"hf: '{files / 'chat choosy'}'", name="x", xtoken="{loss: partition_kl}"), (*DATA,)
    data += ("--max-bad-records", 8)
    for name, first in (
        ("export", f"hf: '{files / 'chat teacher'}'"),
        ("run", f"hidden: '{files / 'chosen'}'"),
    ):
        entries = [entry(first, name="y"), other][:: 1 if name == "export" else -1]
        (files / f"choosy {name}.yaml").write_text(f"teachers: [{', '.join(entries)}]\n")
    exported(ranks, files, "chosen", *data, "--config", files / "choosy export.yaml", command=HIDDEN, **paths)
    argv = flags(files, "choosy", *data, "--config", files / "choosy run.yaml", **paths)
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0, result.stderr
    meta = HiddenMeta.read(files / "chosen")
    left_out = [json.loads(line) for line in (files / "choosy/quarantine.jsonl").read_text().splitlines()]
    assert len(left_out) == 8 and {one["teacher"] for one in left_out} == {"x"} and meta.parts["train"] > 0
