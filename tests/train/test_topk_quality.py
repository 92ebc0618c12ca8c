"""Measure the top-k of a real model on real text.

SmolLM2-135M-Instruct, an 8-layer student, Python sources.
"""

from __future__ import annotations

import pytest
import torch

from mkd.pruning.cut import Cut, evenly_spaced
from mkd.pruning.student_files import write_student
from mkd.quickstart.demo_text import write_text
from tests.train.command import run_main

pytestmark = pytest.mark.download
pytest.importorskip("pyarrow")
PACKS = 2


@pytest.fixture(scope="module")
def files(smollm2, tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    (folder / "teacher").symlink_to(smollm2)
    for layers in (8, 27):
        write_student(smollm2, folder / f"student {layers}", Cut(evenly_spaced(30, layers)))
    train, _ = write_text(folder)
    lines = train.read_text(encoding="utf-8").splitlines()[:2]
    train.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def run_flags(files, layers, *more) -> list[str]:
    argv = ["--student-hf", files / f"student {layers}", "--data-path", files / "train.jsonl"]
    argv += ["--data-cache-path", files / "cache", "--log-dir", files / "log"]
    argv += ["--seq-length", 256, "--train-iters", 1, "--kd-ratio", 1]
    return [str(word) for word in (*argv, "--global-batch-size", PACKS, *more)]


def gradient(argv, out) -> dict[str, float]:
    """Return sums of the first step through a run's engine; save its gradient to the file `out`.

    The gradient is with respect to all student parameters.
    """
    from mkd.config.load import load_config
    from mkd.data.loader import TrainStream
    from mkd.parallel.context import ParallelContext
    from mkd.platform import detect
    from mkd.run.build_data import build_data
    from mkd.run.build_engine import build_engine
    from mkd.run.plan_run import plan_run
    from mkd.train.step import training_objective

    plan = plan_run(load_config(argv).config, 1)
    context = ParallelContext.create(detect())
    dataset, _ = build_data(plan, context)
    engine, _ = build_engine(plan, context)
    batches = TrainStream(dataset, micro_batch_size=1, global_batch_size=PACKS, seed=1).next_step()
    engine.optimizer.zero_grad()
    objective = training_objective(engine, batches)
    sums = engine.schedule.run(engine.stages, batches, objective, forward_only=False)
    torch.save(torch.cat([p.main_grad.flatten() for chunk in engine.stages for p in chunk.parameters()]), out)
    return objective.sums(sums).token_sums()


def compared(found: tuple[dict, torch.Tensor], wanted: tuple[dict, torch.Tensor]) -> dict[str, float]:
    """Return cosine and size of a gradient vs. the full one, divergences, relative errors of metrics."""
    (sums, ours), (full, theirs) = found, wanted
    for name in ("num_loss_tokens", "top1_agreement"):
        assert sums[name] == full[name]
    cosine = torch.nn.functional.cosine_similarity(ours.double(), theirs.double(), dim=0).item()
    result = {"cosine": cosine, "size": (ours.norm() / theirs.norm()).item()}
    result |= {name: of["kd"] / of["num_loss_tokens"] for name, of in (("kd", sums), ("full kd", full))}
    return result | {name: abs(sums[name] / full[name] - 1) for name in ("teacher_ce", "teacher_entropy")}


@pytest.mark.slow
def test_the_gradient_of_128_ids_is_that_of_the_vocabulary(files, ranks):
    """Use a student far from the teacher (8 of its 30 layers) and one close to it (27 of them)."""

    def run(layers, *more):
        (sums,) = ranks.run(gradient, 1, run_flags(files, layers, *more), files / "gradient.pt")
        return sums, torch.load(files / "gradient.pt")

    teacher, wanted = ("--teacher-hf", files / "teacher"), {}
    for layers, k, dtype in ((8, 128, "float16"), (27, 128, "float16")):
        out = files / f"{k} {dtype}"
        if layers not in wanted:
            wanted[layers] = run(layers, *teacher)
        if not out.exists():
            argv = [
                "--out",
                str(out),
                "--k",
                str(k),
                "--logprob-dtype",
                dtype,
                *run_flags(files, layers, *teacher),
            ]
            (result,) = run_main(ranks, argv, command="mkd.commands.topk")
            assert result.exit_code == 0, result.stderr
        values = compared(run(layers, "--teacher-topk", out), wanted[layers])
        size = sum(path.stat().st_size for path in out.glob("*.parquet"))
        print(
            f"\n{layers} layers, k = {k} {dtype}, {size} bytes: "
            + ", ".join(f"{n} {v:.6f}" for n, v in values.items())
        )
        assert 0 <= values["kd"] <= values["full kd"]
        assert values["teacher_ce"] <= 1e-5 and values["teacher_entropy"] <= 1e-5
        assert values["cosine"] >= 0.99
