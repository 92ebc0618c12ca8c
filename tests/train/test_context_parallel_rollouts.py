"""Check own text under context parallelism beside other features: as one process, and resumed bitwise."""

from __future__ import annotations

import pytest

from tests.train.command import read_metrics, run_main, write_records
from tests.train.context_rollout_run import argv, knowing, make_rollout_files, prompt_of, write_teachers
from tests.train.ema_run import RATE, SMOOTH, average_updates
from tests.train.invariance import worst_relative_error
from tests.train.processes import run_processes
from tests.train.rollout_run import Case, one_step, require_equal_steps

SLOW = pytest.mark.slow
CP2, TP2 = ("--context-parallel-size", 2), ("--tensor-model-parallel-size", 2, "--sequence-parallel")
DISTRIBUTED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
CASES = (
    pytest.param(Case("CP2", 2, (*CP2, *DISTRIBUTED)), id="CP2"),
    pytest.param(Case("TP2 CP2", 4, (*CP2, *TP2)), id="TP2 CP2", marks=SLOW),
)
MODELS = {
    "initial": {"hf": "student-initial"},
    "live": {"weights": "live"},
    "ema": {"weights": "ema", "ema": {"rate": RATE}},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_rollout_files(tmp_path_factory.mktemp("context_parallel_rollouts"))


def config_of(files, kind: str):
    return write_teachers(files / f"{kind}.yaml", knowing(MODELS[kind]))


def of_averages(arguments, out_dir):
    """Make updates as the average follows; return the next step's sums and the errors of the average."""
    found = average_updates(arguments, out_dir)
    return found["sums"], found["error"], found["moved"] / found["of"]


@SLOW
@pytest.mark.parametrize("case", CASES)
def test_an_average_judges_completions_after_three_updates(case, files, ranks):
    words = argv(files, "average", config_of(files, "ema"), *SMOOTH)
    ((expected, *_),) = ranks.run(of_averages, 1, words, files / "one")
    words += map(str, case.flags)
    for sums, error, moved in ranks.run(of_averages, case.ranks, words, files / "both"):
        assert sums == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert error <= 1.2e-7 and moved > 0.5
    error, where = worst_relative_error(files / "both" / "gradients", files / "one" / "gradients")
    assert error <= 1e-5, where


@SLOW
@pytest.mark.parametrize("case", CASES)
def test_the_student_as_it_was_at_first_judges_completions(case, files, ranks):
    words = argv(files, "initial", config_of(files, "initial"))
    (single,) = ranks.run(one_step, 1, words, files / "initial gradients")
    assert single["sums"]["kd"] > 1e-3
    results = ranks.run(one_step, case.ranks, [*words, *map(str, case.flags)], files / "layout gradients")
    require_equal_steps(results, single, files, gradients="initial gradients")


@SLOW
@pytest.mark.parametrize("case", CASES)
def test_tags_choose_teachers(case, files, ranks):
    """A teacher with a context beside one that reads the student's tokens, each for its own tag."""
    prompts = [prompt_of(i) | {"kind": "ab"[i % 2]} for i in range(5)]
    write_records(files / "tagged.jsonl", *prompts)
    others = {"hf": str(files / "teacher"), "name": "plain", "tags": ["b"]}
    kd = {"teacher_combination": "route", "tag_key": "kind"}
    config = write_teachers(files / "tags.yaml", knowing(MODELS["live"]) | {"tags": ["a"]}, others, kd=kd)
    words = argv(files, "tags", config, "--prompt-data-path", files / "tagged.jsonl")
    (single,) = ranks.run(one_step, 1, words, files / "tags gradients")
    results = ranks.run(one_step, case.ranks, [*words, *map(str, case.flags)], files / "layout gradients")
    require_equal_steps(results, single, files, gradients="tags gradients")


@SLOW
def test_a_teacher_on_processes_of_its_own_judges_completions(files, tmp_path):
    """Two processes sample and learn, two others run the teacher's layers."""
    plain = write_records(files / "plain.jsonl", *({"prompt": f"{i} the fox"} for i in range(3)))
    lines = []
    for name, flags, processes in (("apart", (*CP2, "--teacher-processes", 2), 4), ("here", (), 1)):
        config = write_teachers(files / f"{name}.yaml", {"hf": str(files / "teacher")})
        words = argv(files, name, config, "--prompt-data-path", plain, "--seq-length", 64, *flags)
        (tmp_path / name).mkdir()
        ended = run_processes(tmp_path / name, [*words, "--no-save", "--log-interval", "1"], processes)
        assert [one.code for one in ended] == [0] * processes, ended[0].output
        lines.append(read_metrics(files / name))
    assert len(lines[0]) == len(lines[1]) == 4
    for ours, theirs in zip(*lines, strict=True):
        for key in ("loss", "grad_norm", "rollout/length", "rollout/teacher_nll", "rollout/logp_gap"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key


@pytest.mark.parametrize("kind", ["live", *(pytest.param(one, marks=SLOW) for one in ("initial", "ema"))])
def test_a_run_resumes_bitwise(kind, files, ranks):
    def run(folder, *more):
        flags = (*CP2, *DISTRIBUTED, "--save", files / folder, "--log-interval", 1, *more)
        results = run_main(ranks, argv(files, folder, config_of(files, kind), *flags), 2)
        assert results[0].exit_code == 0, results[0].stderr
        names = ("loss", "num_aligned/knows", "rollout/coverage", "rollout/teacher_nll", "grad_norm")
        return [[line[name] for name in names] for line in read_metrics(files / folder)]

    straight = run(f"straight {kind}")
    run(f"halves {kind}", "--exit-interval", 2)
    assert run(f"halves {kind}", "--load", files / f"halves {kind}") == straight
    assert len(straight) == 4
