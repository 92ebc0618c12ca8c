"""Check training from a stored teacher: equal to training with the teacher, refused if it does not fit."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from mkd.config.load import load_config
from mkd.run.plan_run import plan_run
from mkd.run.plan_text import objective
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
from tests.train.topk_files import DATA, export, exported, offline

pytest.importorskip("pyarrow")
EVALUATED = ("--eval-interval", 2, "--eval-iters", 2)
# An update is then proportional to the gradient. Adam's usual update turns the rounding of tiny gradients
# into steps of full size.
LINEAR = ("--lr", 1, "--adam-eps", 1)
T2 = ("--kd-temperature", 2)
COMPARED = (
    "loss",
    "ce_loss",
    "kd_loss",
    "teacher_ce",
    "teacher_entropy",
    "top1_agreement",
    "num_loss_tokens",
    "grad_norm",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("topk"))


@pytest.fixture(scope="module")
def cache(files, ranks):
    """Export with k = 16, fp32, temperature 2."""
    exported(ranks, files, "cache16", "--k", 16, *T2)
    return "cache16"


def trained(ranks, files, argv, world_size=1) -> tuple[list[dict], dict[str, torch.Tensor]]:
    """Return (metrics records, weights) of a run that ends well."""
    results = run_main(ranks, argv, world_size)
    assert [result.exit_code for result in results] == [0] * world_size, results[0].stderr
    run = argv[argv.index("--log-dir") + 1]
    return read_metrics(files / run), read_weights(files / argv[argv.index("--export-hf") + 1])


def assert_same_run(found, wanted, tolerance=1e-5):
    (records, weights), (wanted_records, wanted_weights) = found, wanted
    assert len(records) == len(wanted_records) == 4, "evaluation, two steps, evaluation"
    for ours, theirs in zip(records, wanted_records, strict=True):
        for key in COMPARED:
            if key in theirs:
                assert ours[key] == pytest.approx(theirs[key], rel=tolerance, abs=1e-7), key
    for name, tensor in wanted_weights.items():
        assert (weights[name] - tensor).abs().max() <= tolerance * tensor.abs().max(), name


@pytest.mark.parametrize("size", ["", "--context-parallel-size", "--expert-model-parallel-size"])
def test_all_ids_give_the_run_with_the_teacher(size, files, ranks):
    """With k = the vocabulary, losses, metrics, evaluation and updated weights are those of --teacher-hf."""
    layout, world_size = ((size, 2, *T2), 2) if size else (T2, 1)
    models = {}
    if "expert" in size:
        models = {"student_hf": "moe student", "teacher_hf": "moe teacher"}
        for name, family in (("student", "qwen3_moe"), ("teacher", "mixtral")):
            add_tokenizer(make_model(files / f"moe {name}", family, num_hidden_layers=2))
    full = f"cache307 {size}"
    exported(ranks, files, full, "--k", 307, *layout, world_size=world_size, **models)
    hf = [str(files / f"{name} {size}") for name in ("online hf", "offline hf")]
    more = (*layout, *EVALUATED, *LINEAR, "--export-hf")
    online = trained(ranks, files, flags(files, "online", *DATA, *more, hf[0], **models), world_size)
    argv = offline(files, "full", full, *more, hf[1], **models | {"teacher_hf": None})
    assert_same_run(trained(ranks, files, argv, world_size), online)


LAYOUTS = {
    "TP2": (2, ("--tensor-model-parallel-size", 2)),
    "TP2 SP": (2, ("--tensor-model-parallel-size", 2, "--sequence-parallel")),
    "PP2": (2, ("--pipeline-model-parallel-size", 2)),
    "DP2 workers": (2, ("--num-workers", 1, "--use-distributed-optimizer")),
    "micro-batch 2": (1, ("--micro-batch-size", 2)),
}


@pytest.fixture(scope="module")
def single(cache, files, ranks):
    """Return the run of one process."""
    argv = offline(files, "single", cache, *T2, *EVALUATED, *LINEAR, "--export-hf", files / "single hf")
    return trained(ranks, files, argv)


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[pytest.mark.slow] * ("workers" in one)) for one in LAYOUTS]
)
def test_every_layout_gives_the_same_run(name, single, cache, files, ranks):
    world_size, layout = LAYOUTS[name]
    argv = offline(files, name, cache, *T2, *EVALUATED, *LINEAR, *layout, "--export-hf", files / f"{name} hf")
    assert_same_run(trained(ranks, files, argv, world_size), single)


def test_a_run_with_held_out_data_is_saved_and_resumed(single, cache, files, ranks):
    """A checkpoint names the corpora of the evaluation, also behind a data set with the teacher's rows."""
    saved = ("--save", files / "saved", "--save-interval", 1)
    first = offline(files, "begun", cache, *T2, *EVALUATED, *LINEAR, *saved, "--exit-interval", 1)
    (result,) = run_main(ranks, first)
    assert result.exit_code == 0, result.stderr
    more = (*saved, "--load", files / "saved", "--export-hf", files / "gone on hf")
    records, weights = trained(ranks, files, offline(files, "begun", cache, *T2, *EVALUATED, *LINEAR, *more))
    stopped = records.pop(2)  # the evaluation at the end of the first part
    assert (stopped["split"], stopped["iteration"]) == ("valid", 1)
    assert_same_run((records, weights), single)
    assert records[-1]["gap_closed"] == pytest.approx(single[0][-1]["gap_closed"], rel=1e-4)


def test_records_hold_the_metrics_of_a_teacher_that_did_not_run(single):
    records, _ = single
    for record in records:
        assert min(record[name] for name in ("kd_loss", "teacher_ce", "teacher_entropy")) > 0
        assert record["loss"] == pytest.approx(0.5 * record["ce_loss"] + 0.5 * record["kd_loss"], rel=1e-6)


def losses_by_sample(argv):
    """Return the loss of every pack of this rank's stream in one epoch, by pack number.

    The student is as loaded.
    """
    import torch.distributed as dist

    from mkd.config.load import load_config
    from mkd.data.loader import TrainStream
    from mkd.evaluation.evaluate import evaluation_objective
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect
    from mkd.run.build_data import build_data
    from mkd.run.build_engine import build_engine
    from mkd.run.plan_run import plan_run
    from mkd.train.stage_inputs import stage_inputs

    plan = plan_run(load_config(argv).config, dist.get_world_size())
    context = ParallelContext.create(detect())
    dataset, _ = build_data(plan, context)
    engine, _ = build_engine(plan, context)
    stage, objective = engine.stages[0].module, evaluation_objective(engine)
    options = dict(data_parallel_rank=context.dp_rank, data_parallel_size=context.dp_size, micro_batch_size=1)
    stream = TrainStream(dataset, global_batch_size=2, seed=plan.config.training.seed, **options)
    losses = {}
    for _ in range(-(-len(dataset) // 2)):
        for batch in stream.next_step():
            with torch.no_grad():
                output = stage(*stage_inputs(batch, padding_joins_document=False))
                loss, _, report = objective(stage, batch, output)
            losses[batch.sample_ids[0]] = (loss.item(), objective.sums(report).kd_mean)
    return losses


def test_neither_order_nor_data_parallelism_matters(cache, files, ranks):
    """Another seed and twice the ranks change order and rank of packs; each keeps its loss, bit by bit."""
    runs = []
    for world_size, seed in ((1, 1), (1, 2), (2, 3)):
        results = ranks.run(losses_by_sample, world_size, offline(files, "order", cache, *T2, "--seed", seed))
        runs.append({sample: loss for result in results for sample, loss in result.items()})
    first, *others = runs
    assert len(first) > 20 and min(kd for _, kd in first.values()) > 0
    for losses in others:
        assert list(losses) != list(first)
        assert losses == first


def assert_refused(ranks, argv, exit_code, code, *named):
    """Check that two ranks end with one error, the same exit code, and no step."""
    results = run_main(ranks, argv, world_size=2)
    assert [result.exit_code for result in results] == [exit_code] * 2, results[0].stderr
    message = reported_text(results[0].stderr)
    assert reported_codes(results[0].stderr) == [code] and not reported_codes(results[1].stderr), message
    assert "Traceback" not in message and all(text in message for text in named), message


def test_other_weights(cache, files, ranks):
    """One element of one weight is enough for a refusal; the same teacher elsewhere is accepted."""
    poison(files / "teacher", files / "other teacher", 0.5)
    shutil.copytree(files / "teacher", files / "same teacher")
    assert_refused(
        ranks,
        offline(files, "weights", cache, *T2, teacher_hf="other teacher"),
        66,
        "teacher-cache-weights-differ",
        str(files / "other teacher"),
    )
    (result,) = run_main(ranks, offline(files, "weights", cache, *T2, teacher_hf="same teacher"))
    assert result.exit_code == 0, result.stderr


def test_other_tokenizer(cache, files, ranks):
    make_model(files / "stranger", **TEACHER)
    add_tokenizer(files / "stranger", text="pack my box with five dozen liquor jugs. ")
    argv = offline(files, "tokenizer", cache, *T2, "--tokenizer-model", files / "stranger")
    assert_refused(ranks, argv, 65, "teacher-cache-differs: is of another tokenizer")


@pytest.mark.parametrize(
    "more",
    [
        ("--seq-length", 64),
        ("--pack", "none"),
        ("--overlong", "truncate"),
        ("--no-append-eod",),
        ("--context-parallel-size", 2),
    ],
)
def test_other_data_flags_are_named(more, cache, files, ranks):
    argv = offline(files, "data", cache, *T2, *more)
    assert_refused(ranks, argv, 65, "teacher-cache-differs: was made with", more[0])


def test_another_split(cache, files, ranks):
    argv = offline(files, "data", cache, *T2, "--split", "70,30,0")
    assert_refused(ranks, argv, 65, "teacher-cache-differs: the teacher cache has")


def test_other_text(cache, files, ranks):
    """The text has as many packs of the same lengths: the digest of a pack differs."""
    lines = [json.loads(line) for line in (files / "text.jsonl").read_text().splitlines()]
    changed = [{"text": line["text"].replace("brown", "brawn")} for line in lines]
    (files / "changed.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    argv = offline(files, "text", cache, *T2, data_path="changed.jsonl")
    (result,) = run_main(ranks, argv)
    (code,) = reported_codes(result.stderr)
    assert result.exit_code == 65 and code in (
        "teacher-cache-differs: the teacher saw another",
        "teacher-cache-differs: the teacher cache has",
    )


def test_other_temperature(cache, files, ranks):
    named = "teacher-cache-temperature-differs", "use --kd-temperature 2.0"
    assert_refused(ranks, offline(files, "temperature", cache), 64, *named)


def test_a_teachers_own_temperature(cache, files, single, ranks):
    """A teacher's temperature overrides the common one, as with a teacher that runs."""
    config = files / "own.yaml"
    config.write_text(f"teachers: [{{topk: '{files / cache}', temperature: 2}}]\n")
    argv = offline(files, "own", cache, *EVALUATED, *LINEAR, "--export-hf", files / "own hf")
    at = argv.index("--teacher-topk")
    assert_same_run(trained(ranks, files, [*argv[:at], *argv[at + 2 :], "--config", str(config)]), single)
    config.write_text(f"teachers: [{{topk: '{files / cache}', temperature: 1}}]\n")
    named = "teacher-cache-temperature-differs", "use teachers[0].temperature 2.0"
    own = "--config", str(config), "--overwrite"
    assert_refused(ranks, [*argv[:at], *argv[at + 2 :], *map(str, T2), *own], 64, *named)


def test_a_run_resumes_only_with_the_export_that_it_had(cache, files, ranks):
    save = ("--save", files / "to go on")
    (result,) = run_main(ranks, offline(files, "to go on", cache, *T2, *save))
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in (files / "text.jsonl").read_text().splitlines()]
    write_records(files / "half.jsonl", *lines[:30])
    exported(ranks, files, "other data", "--k", 16, *T2, data_path="half.jsonl")
    exported(ranks, files, "other k", "--k", 8, *T2)
    more = (*T2, *save, "--load", files / "to go on", "--train-iters", 3)
    refused = {"data.files": offline(files, "more", "other data", *more, data_path="half.jsonl")}
    refused |= {"loss.stored_k": offline(files, "more", "other k", *more)}
    in_fp8 = shutil.copytree(files / cache, files / "in fp8")
    meta = json.loads((in_fp8 / "meta.json").read_text())
    (in_fp8 / "meta.json").write_text(json.dumps(meta | {"precision": "fp8 tensorwise"}))
    refused |= {"loss.stored_precision": offline(files, "more", "in fp8", *more)}
    for name, argv in refused.items():
        assert_refused(ranks, argv, 66, "run-differs", f" {name}")
    config = load_config([*map(str, refused["loss.stored_precision"])]).config
    assert "exported with layers in fp8 tensorwise" in objective(plan_run(config, 1))


def test_a_cache_says_in_which_precision_its_teacher_ran(files, ranks):
    """An interrupted export resumes in this precision only; a cache of version 0.1.0 does not say it."""
    described = exported(ranks, files, "precision", "--k", 4) / "meta.json"
    assert json.loads(described.read_text())["precision"] == "fp32"
    (result,) = export(ranks, files, "precision", "--k", 4, "--bf16")
    assert result.exit_code == 65 and "precision differ" in reported_text(result.stderr)
    older = {key: value for key, value in json.loads(described.read_text()).items() if key != "precision"}
    described.write_text(json.dumps(older))
    exported(ranks, files, "precision", "--k", 4, "--bf16")
    assert json.loads(described.read_text())["precision"] == "fp32 or bf16", "of shards that may be there"


def test_only_forward_kl(cache, files, ranks):
    argv = offline(files, "divergence", cache, *T2, "--kd-divergence", "reverse_kl")
    assert_refused(ranks, argv, 64, "stored-teacher-excludes: cannot be computed from", "reverse_kl")


def test_no_cache_no_held_out_part_not_finished(cache, files, ranks):
    argv = offline(files, "nothing", "nowhere", *T2)
    assert_refused(ranks, argv, 65, "teacher-cache-not-found", "nowhere")
    (result,) = export(ranks, files, "no valid", "--k", 4, *T2, "--split", "1")
    assert result.exit_code == 0, result.stderr
    held_out = ("--split", "1", "--valid-data-path", files / "text.jsonl")
    argv = offline(files, "no valid run", "no valid", *T2, *EVALUATED, *held_out)
    assert_refused(ranks, argv, 65, "teacher-cache-differs: has no", "drop --eval-interval")
    (files / "no valid" / "train-00002.parquet").unlink()
    argv = offline(files, "part", "no valid", *T2, "--split", "1")
    assert_refused(ranks, argv, 65, "teacher-cache-incomplete: the teacher cache")


def test_a_smaller_student_needs_an_export_for_it(files, ranks):
    """A student with fewer ids cannot use an export over all of the teacher's ids.

    It trains from an export that was made for the student.
    """
    small = make_model(files / "small", "qwen3", seed=1, num_hidden_layers=2, vocab_size=301)
    add_tokenizer(small)
    exported(ranks, files, "cache over 307", "--k", 8, student_hf=None)
    exported(ranks, files, "cache over 301", "--k", 8, student_hf="small")
    argv = offline(files, "small", "cache over 307", student_hf="small")
    assert_refused(ranks, argv, 65, "teacher-cache-differs: ids, the student has", "--student-hf")
    (result,) = run_main(ranks, offline(files, "small", "cache over 301", student_hf="small"))
    assert result.exit_code == 0, result.stderr


def test_weighted_records_beside_a_stored_teacher_keep_the_gradient_of_the_head(files, ranks):
    """Two terms pass over the head, one of them through autograd: DDP must take both gradients."""
    records = ({"text": f"{i}: the quick brown fox", "score": 1 + i % 3} for i in range(60))
    write_records(files / "scored.jsonl", *records)
    exported(ranks, files, "scored cache", "--k", 16, *T2, data_path="scored.jsonl")
    more = (*T2, *EVALUATED, *LINEAR, "--weight-key", "score", "--export-hf")

    def run(name, *layout, world_size=1):
        words = (*more, files / f"{name} hf", *layout)
        argv = offline(files, name, "scored cache", *words, data_path="scored.jsonl")
        return trained(ranks, files, argv, world_size)

    assert_same_run(run("scored pp2", "--pipeline-model-parallel-size", 2, world_size=2), run("scored"))
