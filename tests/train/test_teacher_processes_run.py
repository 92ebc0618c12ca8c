"""Whole runs with a teacher on processes of its own, each rank a process: result, resume, and a death."""

from __future__ import annotations

import json

import pytest

from mkd.errors import EXIT_DONE
from tests.kinds.sampled.small_server import small_server
from tests.train import context_rollout_run, context_run, record_run, reward_run, rollout_run
from tests.train.command import flags, make_files, read_metrics, write_records
from tests.train.processes import STRAGGLER_S, run_processes
from tests.xtoken.small_tokenizers import train_byte_level

APART = ("--teacher-processes", "1")
EVALUATED = ("--eval-interval", "2", "--eval-iters", "1", "--split", "80,20")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("sides"))


def losses(folder) -> list[tuple]:
    """Return the losses and norms of a run's records."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(one["iteration"], one.get("split"), one["loss"], one.get("grad_norm")) for one in records]


def run(folder, argv, processes: int, fault: str = ""):
    folder.mkdir(exist_ok=True)
    return run_processes(folder, argv, processes, fault=fault)


def test_a_run_and_its_resumption_with_another_split(files, tmp_path):
    """Bit for bit that of a teacher beside the student, also if it stops between, and with data workers.

    A worker moves its batches into shared memory: rows that were views of them read freed memory.
    """
    more = [*EVALUATED, "--train-iters", "4"]
    (alone,) = run(tmp_path, [*flags(files, "alone", save=files / "alone"), *more], 1)
    assert alone.code == EXIT_DONE, alone.output
    half = flags(files, "split", save=files / "split", load=files / "split")
    ended = run(tmp_path, [*half, *more, *APART, "--num-workers", "1", "--exit-interval", "2"], 2)
    assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
    (rest,) = run(tmp_path, [*half, *more], 1)
    assert rest.code == EXIT_DONE, rest.output
    assert losses(files / "split") == losses(files / "alone")
    records = [json.loads(line) for line in (files / "split" / "metrics.jsonl").read_text().splitlines()]
    waits = [one["iteration"] for one in records if "teacher_wait_ms" in one]
    assert waits == [1, 2]  # the rest ran without processes of the teacher


@pytest.mark.slow
def test_teachers_by_tag_with_data_workers_stopped_and_resumed(files, tmp_path):
    """One teacher has a process of its own, one has not, and some steps hold one tag alone."""
    texts = [f"{i}: " + "the quick brown fox " * (i % 7 + 1) for i in range(60)]
    records = ({"text": text, "domain": "rare" if i % 15 == 0 else "often"} for i, text in enumerate(texts))
    write_records(files / "tagged.jsonl", *records)

    def written(name, **more):
        teachers = [{"hf": str(files / "teacher"), "name": one, "tags": [one]} for one in ("rare", "often")]
        teachers[0] |= {"name": "one", **more}
        settings = {"teachers": teachers, "kd": {"teacher_combination": "route", "tag_key": "domain"}}
        (files / name).write_text(json.dumps(settings))
        more = (*EVALUATED, "--train-iters", "6", "--num-workers", "1", "--config", files / name)
        own = {"save": files / "tags", "load": files / "tags"} if name == "apart.yaml" else {}
        folder = "tags" if own else "tags beside"
        return flags(files, folder, *more, teacher_hf=None, data_path="tagged.jsonl", **own)

    beside, apart = written("beside.yaml"), written("apart.yaml", processes=1)
    (alone,) = run(tmp_path, beside, 1)
    assert alone.code == EXIT_DONE, alone.output
    for more in (("--exit-interval", "4"), ()):
        ended = run(tmp_path, [*apart, *more], 2)
        assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
    assert losses(files / "tags") == losses(files / "tags beside")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return rollout_run.make_files(tmp_path_factory.mktemp("prompts"))


@pytest.mark.slow
def test_completions_of_the_student_and_a_resumption_with_another_split(prompts, tmp_path):
    """While the student samples, evaluates and saves, the teacher waits; it ends where the student stops."""
    held_out = ("--valid-data-path", prompts / "text.jsonl", "--eval-interval", 2, "--log-interval", 1)
    common = (*held_out, "--max-new-tokens", 8)
    (alone,) = run(tmp_path, rollout_run.argv(prompts, "alone", *common, "--save", prompts / "alone"), 1)
    assert alone.code == EXIT_DONE, alone.output
    parts = rollout_run.argv(prompts, "parts", *common, "--save", prompts / "parts")
    resumed = [*parts, "--load", str(prompts / "parts")]
    ended = run(tmp_path, [*parts, *APART, "--exit-interval", "2"], 2)
    assert [one.code for one in ended] == [EXIT_DONE] * 2, [one.output for one in ended]
    (rest,) = run(tmp_path, resumed, 1)
    assert rest.code == EXIT_DONE, rest.output
    assert losses(prompts / "parts") == losses(prompts / "alone")
    waits = [one["iteration"] for one in read_metrics(prompts / "parts") if "teacher_wait_ms" in one]
    assert waits == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["context", "xtoken"])
def test_a_row_of_the_teacher_and_a_resumption_with_another_split(kind, tmp_path):
    """The first two steps have one process of the teacher, the others two. Held-out text too."""
    files = context_rollout_run.make_rollout_files(tmp_path)
    teacher = context_rollout_run.knowing({"hf": str(files / "teacher")})
    if kind == "xtoken":
        train_byte_level(300).save_pretrained(files / "teacher")
        teacher["xtoken"] = {}
    config = context_rollout_run.write_teachers(files / "run.yaml", teacher)
    common = ("--valid-data-path", files / "records.jsonl", "--eval-interval", 2, "--log-interval", 1)

    def train(name, *more, processes=1):
        words = context_rollout_run.argv(files, name, config, *common, "--save", files / name, *more)
        ended = run(tmp_path, words, processes)
        assert [one.code for one in ended] == [EXIT_DONE] * processes, [one.output for one in ended]
        return losses(files / name)

    train("parts", *APART, "--exit-interval", 2, processes=2)
    assert train("parts", *STAGES, "--load", files / "parts", processes=3) == train("alone")


STAGES = ("--teacher-processes", 2, "--teacher-pipeline-model-parallel-size", 2)


@pytest.mark.slow
def test_several_updates_with_the_same_completions(prompts, tmp_path):
    """States of the second update are asked for during the first one."""

    def train(name, *more, processes=1):
        words = ("--rollout-updates", 3, "--max-new-tokens", 8, "--log-interval", 1, "--save", prompts / name)
        ended = run(tmp_path, reward_run.argv(prompts, name, *words, *more), processes)
        assert [one.code for one in ended] == [EXIT_DONE] * processes, [one.output for one in ended]
        return losses(prompts / name)

    assert train("updates apart", *STAGES, processes=3) == train("updates")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["context", "xtoken"])
def test_rows_of_a_teacher_that_data_workers_made(kind, tmp_path):
    """A worker moves its batches into shared memory: rows that were views of them would be freed."""
    files = context_run.make_files(tmp_path)
    config = context_run.write_config(files)
    if kind == "xtoken":
        train_byte_level(300).save_pretrained(files / "teacher")
        settings = json.loads(config.read_text())
        settings["teachers"][0]["xtoken"] = {}
        config.write_text(json.dumps(settings))

    def train(name, *more, processes=1):
        words = ("--num-workers", 1, "--train-iters", 20, "--log-interval", 1, "--save", files / name, *more)
        ended = run(tmp_path, context_run.argv(files, name, *words, config=config), processes)
        assert [one.code for one in ended] == [EXIT_DONE] * processes, [one.output for one in ended]
        return losses(files / name)

    assert train("apart", *STAGES, processes=3) == train("beside")


@pytest.mark.slow
def test_a_teacher_waits_longer_than_any_limit_for_records(prompts, tmp_path):
    """After two steps the agents pause, for three times the limit of a step."""
    limit_s = 15
    words = record_run.argv(prompts, "late", *STAGES, "--distributed-timeout-seconds-after-init", limit_s)
    pause_s = 2 * record_run.GROUPS, 3.0 * limit_s
    with record_run.playing(prompts, "late", pause_s=pause_s):
        ended = run(tmp_path, [*words, "--save", str(prompts / "late")], 3)
    assert [one.code for one in ended] == [EXIT_DONE] * 3, [one.output for one in ended]
    waited_ms = [one["rollout/time_ms"] for one in read_metrics(prompts / "late")]
    assert len(waited_ms) == 4 and max(waited_ms) > 2000 * limit_s


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "error"])
def test_a_student_that_fails_while_it_samples_ends_the_teacher(prompts, tmp_path, fault):
    """The teacher has waited for rows, and ends within seconds."""
    words = rollout_run.argv(
        prompts, f"{fault} in rollout", *APART, "--save", prompts / f"{fault} in rollout"
    )
    student, teacher = run(tmp_path, words, 2, fault=f"{fault}@in_rollout:0:2")
    assert student.code == (-9 if fault == "kill" else 1), student.output
    assert teacher.code not in (0, -9) and teacher.after_s < STRAGGLER_S, teacher.output
    assert "rank 0" in teacher.output or (fault == "kill" and "lost contact" in teacher.output)


@pytest.mark.slow
def test_completions_of_a_server(prompts, tmp_path):
    """They are sampled elsewhere, while the teacher waits."""

    def served(name, *more, processes):
        with small_server(prompts / "student") as server:
            source = ("--rollout-source", "server", "--rollout-server-url", server.url, "--log-interval", 1)
            words = (*source, "--max-new-tokens", 8, "--save", prompts / name, *more)
            ended = run(tmp_path, rollout_run.argv(prompts, name, *words), processes)
        assert [one.code for one in ended] == [EXIT_DONE] * processes, [one.output for one in ended]
        return losses(prompts / name)

    assert served("apart", *APART, processes=2) == served("beside", processes=1)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_death_on_one_side_ends_the_other(files, tmp_path, rank):
    """All ranks end within seconds, and the survivors name the rank that was killed."""
    argv = [*flags(files, f"death-{rank}"), *APART]
    ended = run(tmp_path, argv, 2, fault=f"kill@in_step:{rank}:2")
    survivor = ended[1 - rank]
    assert ended[rank].code == -9 and survivor.code not in (0, -9), survivor.output
    assert f"rank {rank} has ended without a report" in survivor.output or "lost contact" in survivor.output
