"""Choose first runs of real tiny models and of released shapes; what is written must load and plan."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml

from mkd.commands.init import _ask, main
from mkd.commands.plan import main as plan
from mkd.config.flags import whole_number
from mkd.config.load import load_config
from mkd.errors import EXIT_DATA, EXIT_USAGE, UsageError
from mkd.plan.times.hardware import USABLE
from mkd.pruning.sizes import Sizes
from mkd.recipe.choose import num_evaluations
from mkd.recipe.choose_layout import fullest_rank
from mkd.recipe.distill_stages import Stage, State
from mkd.recipe.first_request import Request, parse_size
from mkd.recipe.first_run import choose_first_run
from mkd.recipe.folder_in_use import make_folder
from tests.reported import refused, reported_codes
from tests.train.command import write_records

ROOT = Path(__file__).resolve().parents[2]


def llama(folder: Path, layers: int, hidden: int, ffn: int, heads: int) -> str:
    """Write config.json of a Llama 3 of these sizes."""
    config = dict(model_type="llama", num_hidden_layers=layers, hidden_size=hidden, intermediate_size=ffn)
    config |= dict(num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | dict(max_position_embeddings=8192)))
    return str(folder)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("0.5B", Sizes(target_params=500_000_000)),
        ("113m", Sizes(target_params=113_000_000)),
        ("layers:12", Sizes(num_layers=12)),
        ("layers:12,ffn:1024", Sizes(num_layers=12, ffn_hidden_size=1024)),
        ("Qwen/Qwen2.5-0.5B", None),
        ("12", None),
    ],
)
def test_a_student_is_a_model_or_a_size(text, sizes):
    assert parse_size(text) == sizes


@pytest.mark.parametrize(
    "text", ["layers:0", "layers:2.5", "layers:", "layers:3,foo:12", "layers:3,layers:2"]
)
def test_parts_that_are_no_size(text):
    with refused("value-unknown", UsageError):
        parse_size(text)


def test_answers_are_asked_for_again(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n-1\n2\n"))
    assert _ask("GPUs", "0", partial(whole_number, least=0)) == 2
    assert capsys.readouterr().out.count("is not a whole number of 0 or more") == 2
    with refused("add-flag", UsageError):
        _ask("teacher")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with refused("not-writable", UsageError):
            make_folder(out)


def test_a_stage_is_done_while_what_it_leaves_is_there(tmp_path):
    stage = Stage("train", "train", ("train",), leaves=str(tmp_path / "hf"))
    state = State(tmp_path / "distill.json", {}, {})
    state.done(stage, 0.0)
    assert not state.is_done(stage)
    (tmp_path / "hf").mkdir()
    assert not state.is_done(stage)
    (tmp_path / "hf/model.safetensors").touch()
    assert state.is_done(stage)


@pytest.mark.parametrize(
    ("steps", "has_gpu", "number"),
    [(1, False, 1), (15, False, 1), (16, False, 2), (1000, False, 4), (100, True, 5), (1000, True, 10)],
)
def test_evaluations_take_a_quarter_of_the_run_at_most(steps, has_gpu, number):
    batches = 10 if has_gpu else 4
    assert num_evaluations(steps, batches, has_gpu) == number
    assert number == 1 or number * batches / 2 <= steps / 4


def test_the_file_of_two_models_loads_and_plans(files, tmp_path, capsys):
    """Given flags stay, every choice has its reason, and torch is never imported."""
    words = [
        files / "teacher",
        files / "student",
        files / "text.jsonl",
        "--gpus",
        0,
        "--out",
        tmp_path / "run",
    ]
    words += ["--lr", "3e-4", "--seq-length", 64, "--train-iters", 6]
    code = "import sys; from mkd.commands.init import main; code = main(sys.argv[1:]); "
    code += "sys.exit(code or 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, words)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    path = tmp_path / "run/run.yaml"
    config = load_config(["--config", str(path)]).config
    assert (config.optimizer.lr, config.training.seq_length) == (3e-4, 64)
    assert config.training.eval_interval == 6  # four batches take as long as two steps
    assert config.optimizer.lr_warmup_iters == 0  # a step of warm-up has rate 0
    assert (config.student.hf, config.teachers[0].hf) == (str(files / "student"), str(files / "teacher"))
    assert config.checkpoint.save == config.checkpoint.load == str(tmp_path / "run/run")
    text = path.read_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= 300 and "# as given" in text
    for number, line in enumerate(lines):
        is_setting = line.startswith("  ") and ":" in line and not line.strip().startswith("#")
        if is_setting and not any(name in line for name in ("xtoken", "name:", "train_iters", "global_")):
            assert "#" in line or lines[number - 1].strip().startswith("#"), line
    preview = f"data preview {files / 'text.jsonl'} --student {files / 'student'} --seq-length 64 "
    assert preview in done.stdout and "mkd plan" not in done.stdout  # that plans runs on GPUs
    assert plan(["--config", str(path)]) == 0 and "tokens a step" in capsys.readouterr().out
    assert main(list(map(str, words))) == EXIT_USAGE
    assert reported_codes(capsys.readouterr().err) == ["already-exists"]


def test_a_student_that_is_still_to_be_cut_can_be_planned(files, tmp_path, capsys):
    words = [files / "teacher", "layers:2", files / "text.jsonl", "--gpus", 0, "--out", tmp_path]
    assert main(list(map(str, words))) == 0
    out = capsys.readouterr().out
    assert f"make-student --hf {files / 'teacher'} --out {tmp_path / 'student'} --num-layers 2" in out
    assert plan(["--config", str(tmp_path / "run.yaml")]) == 0
    described = json.loads((tmp_path / "student/config.json").read_text())
    assert described["num_hidden_layers"] == 2 and described["mkd_planned"]
    written = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert written["optimizer"]["lr"] == 1e-4  # a cut; a finished model would have 1e-5


def test_a_folder_is_used_again_only_where_its_files_fit(files, tmp_path, capsys):
    """Another size replaces a student that is only planned. One that has been cut, and checkpoints, stay."""

    def init(size: str) -> list[str]:
        text = files / "text.jsonl"
        words = [files / "teacher", size, "0.7", text, "0.3", text, "--gpus", 0, "--out", tmp_path]
        code = main([*map(str, words), "--overwrite"])
        assert code in (0, EXIT_USAGE)
        found = capsys.readouterr()
        return [one.partition(":")[0] for one in reported_codes(found.err)] if code else found.out.split()

    out = init("layers:2")
    assert out[out.index("--data-path") + 1 :][:2] == [str(files / "text.jsonl")] * 2
    init("layers:1")
    config = tmp_path / "student/config.json"
    described = json.loads(config.read_text())
    assert described["num_hidden_layers"] == 1
    config.write_text(json.dumps(described | {"mkd_planned": False}))  # as after a cut
    before = (tmp_path / "run.yaml").read_bytes()
    assert init("layers:2") == ["choose-another-folder"]
    assert (tmp_path / "run.yaml").read_bytes() == before
    init("layers:1")
    (tmp_path / "run/iter_0000001").mkdir(parents=True)
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("1")
    assert init("layers:1") == ["choose-another-folder"]


@pytest.mark.parametrize(("gpus", "gib", "is_split"), [(8, 79.1, True), (1, 79.1, None)])
def test_what_is_chosen_for_gpus_fits_their_memory(gpus, gib, is_split, tmp_path):
    """A Llama of 70B teaches one of 8B. None: it cannot, and says what could."""
    teacher = llama(tmp_path / "70b", 80, 8192, 28672, 64)
    student = llama(tmp_path / "8b", 32, 4096, 14336, 32)
    text = write_records(tmp_path / "text.jsonl", *({"text": "some words " * 500} for _ in range(200)))
    request = Request(teacher, student, (str(text),), tmp_path / "out", gpus, gib)
    if is_split is None:
        with pytest.raises(Exception, match="does not fit") as caught:
            choose_first_run(request)
        assert caught.value.code == "numbers-contradict" and "mkd topk" in caught.value.do
        return
    run = choose_first_run(request)
    run.write()
    _, need = fullest_rank(run.forecast)
    assert need <= USABLE * gib
    config = load_config(["--config", str(run.path)]).config
    parallel = config.parallel
    is_whole = parallel.tensor_model_parallel_size == parallel.pipeline_model_parallel_size == 1
    assert not is_whole or config.teachers[0].residency != "device"
    assert plan(["--world-size", str(gpus), "--config", str(run.path)]) == 0
    assert ("the fastest place" if is_whole else "the run needs") in run.path.read_text()


def test_all_problems_at_once(files, tmp_path, capsys):
    words = ["none/teacher", "none/student", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]
    assert main(words) == EXIT_USAGE
    found = reported_codes(capsys.readouterr().err)
    assert sorted(one.partition(":")[0] for one in found) == [
        "data-path-not-found",
        "hf-model-not-found",
        "hf-model-not-found",
    ]
    assert main([str(files / "teacher"), str(files / "student"), str(tmp_path / "none.jsonl")]) == EXIT_DATA
    assert main([]) == EXIT_USAGE
    assert "TEACHER and STUDENT and DATA are not given" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_terminal_is_asked(files, tmp_path):
    """Answers of a person, the defaults taken for GPUs and the folder."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mkd", "init"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    answers = [files / "teacher", files / "student", files / "text.jsonl", "", ""]
    os.write(ours, "".join(f"{answer}\n" for answer in answers).encode())
    out = process.communicate(timeout=100)[0]
    assert process.returncode == 0, out
    assert load_config(["--config", str(tmp_path / "runs/student-from-teacher/run.yaml")])
    os.close(ours), os.close(theirs)
