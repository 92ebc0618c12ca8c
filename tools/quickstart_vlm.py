"""Distil a real small model with images on this machine's CPU, from nothing to a Hugging Face folder.

Make a teacher of layers of SmolLM2-135M-Instruct and a new vision tower, and train it to name emoji as
Twitter draws them. Cut layers out of both, distil the rest, and ask teacher and student about the same
things as Google draws them: with the right pictures, and with swapped ones.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from transformers.utils.logging import disable_progress_bar  # noqa: E402

from mkd.config.flags import FlagParser  # noqa: E402
from mkd.errors import returns_exit_code  # noqa: E402
from mkd.log.records import read_records  # noqa: E402
from mkd.quickstart.fetch_smollm2 import fetch_smollm2  # noqa: E402
from mkd.report.curves import draw, new_figure, save_figure  # noqa: E402
from tools.vlm import emoji_pictures, vlm_training  # noqa: E402
from tools.vlm.emoji_pictures import QUESTIONS, STYLES, Named  # noqa: E402
from tools.vlm.picture_answers import Examiner, ExamResult, PictureExam  # noqa: E402
from tools.vlm.picture_pretraining import pretrain  # noqa: E402
from tools.vlm.small_vlm import VLMSizes, cut_vlm, make_vlm, num_parameters  # noqa: E402

GROUPS = ("animals & nature", "food & drink", "activities")
COPIES = 8  # varied pictures of each name
MATCHED, CAPTIONS = 16_000, 9_600  # pictures of the teacher's pretraining
TEACHER_STEPS, STUDENT_STEPS = 100, 80
STUDENT_LAYERS = 3, 2  # of 4 in the text model, of 4 in the tower
NUM_EXAMINED, NUM_SAMPLES, MAX_CHARACTERS = 200, 12, 28
TRAINING = dict(micro_batch_size=2, global_batch_size=4, lr=6e-4, processes=2)
NAMES = ("teacher", "student before", "student after")
ROWS = (
    ("kl", "KL to the teacher"), ("top1", "top-1 agreement"), ("ce", "cross entropy"),
    ("name_of_4", "right name of 4"), ("group", "right group"), ("exact_name", "exact name, written"),
)  # fmt: skip
RIGHT, SWAPPED = "right pictures", "swapped pictures"
Results = Mapping[str, Mapping[str, ExamResult]]  # model -> RIGHT or SWAPPED -> results


def prepare(folder: Path, copies: int, groups: Sequence[str]) -> tuple[vlm_training.Corpus, list[Named]]:
    """Write pictures and conversations; return them and what the pictures show."""
    corpus = vlm_training.Corpus(
        folder / "pictures", folder / "train.jsonl", folder / "held_out.jsonl", folder / "cache"
    )
    named = emoji_pictures.fetch_pictures(corpus.image_root, groups)
    emoji_pictures.write_training(corpus.image_root, corpus.train, named, copies, seed=1)
    emoji_pictures.write_held_out(corpus.held_out, named)
    return corpus, named


def make_teacher(args: argparse.Namespace, corpus: vlm_training.Corpus, named: Sequence[Named]) -> Path:
    """Make the teacher and train it, first on names, then on conversations. Return its folder."""
    folder, steps = args.folder, args.teacher_steps
    begin, out = folder / "teacher-pretrained", folder / "teacher"
    print(f"\n--- the teacher learns {len(named)} names", flush=True)
    make_vlm(folder / "smollm2", begin, VLMSizes(), seed=1)
    pixels = emoji_pictures.read_pixels(corpus.image_root, STYLES[0], named)
    pretrain(begin, pixels, named, args.matched, args.captions, seed=1)
    print("\n--- the teacher learns to answer", flush=True)
    flags = TRAINING | dict(student=begin, export=out, train_iters=steps, eval_iters=8, log_interval=20)
    log_dir = folder / "teacher-training"
    flags |= dict(eval_interval=steps, lr_warmup_iters=steps // 10)
    vlm_training.run(vlm_training.command(corpus, log_dir, **flags), log_dir)
    return out


def distil(folder: Path, corpus: vlm_training.Corpus, steps: int) -> Path:
    """Distil the student from the beginning and return the exported one."""
    out, checkpoints = folder / "distilled", folder / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    flags = TRAINING | dict(student=folder / "student", teacher=folder / "teacher", export=out)
    flags |= dict(train_iters=steps, kd_ratio=0.9, eval_interval=max(1, steps // 4), eval_iters=8)
    flags |= dict(log_interval=10, lr_warmup_iters=steps // 10, save=checkpoints)
    vlm_training.run(vlm_training.command(corpus, folder, **flags), folder)
    return out


def examine(folders: Mapping[str, Path], exam: PictureExam) -> Results:
    """Return the results of the models, whose first one is the teacher."""
    found: dict[str, dict[str, ExamResult]] = {}
    of_teacher: list = []
    for name, folder in folders.items():
        examiner = Examiner(folder)
        right, logps = examiner.examine(exam, teacher=of_teacher)
        of_teacher = of_teacher or logps
        swapped, _ = examiner.examine(exam, is_swapped=True, teacher=of_teacher)
        found[name] = {RIGHT: right, SWAPPED: swapped}
    return found


def table_lines(results: Results) -> list[str]:
    """Return the results as lines, a model with right and with swapped pictures a pair of columns."""
    lines = [" " * 20 + "".join(f"{name:>22}" for name in results)]
    lines.append(" " * 20 + "".join(f"{'right':>14}{'swapped':>8}" for _ in results))
    for key, label in ROWS:
        cells = (
            f"{getattr(one[RIGHT], key):14.3f}{getattr(one[SWAPPED], key):8.3f}" for one in results.values()
        )
        lines.append(f"{label:20}" + "".join(cells))
    return lines


def draw_picture(
    folder: Path, results: Results, exam: PictureExam, answers: Mapping[str, Sequence[str]]
) -> None:
    """Write `quickstart_vlm.png`: curves of the run, right names, and pictures with answers."""
    picture = folder / "quickstart_vlm.png"
    figure = new_figure(picture, "--folder")
    figure.set_size_inches(13, 8.5)
    upper, lower = figure.subfigures(2, 1, height_ratios=(1, 1.25))
    curves, agreement, bars = upper.subplots(1, 3)
    records = {"distillation": read_records(folder)}
    for axis, key, title in (
        (curves, "kd_loss", "KL to the teacher, nats per token"),
        (agreement, "top1_agreement", "top-1 agreement with the teacher"),
    ):
        draw(axis, key, records)
        axis.set_title(title)
    for number, part in enumerate((RIGHT, SWAPPED)):
        heights = [one[part].name_of_4 for one in results.values()]
        places = [place + 0.4 * number for place in range(len(results))]
        drawn = bars.bar(places, heights, width=0.38, label=part, color=("C0", "C7")[number])
        bars.bar_label(drawn, [f"{height:.2f}" for height in heights], padding=2, fontsize="small")
    bars.axhline(0.25, color="black", linestyle=":", label="chance")
    bars.set_xticks([place + 0.2 for place in range(len(results))], list(results))
    bars.set(title="right name of 4, in the other drawing style", ylim=(0, 1))
    bars.legend(fontsize="small")
    shown = exam.shown(False)
    for number, axis in enumerate(lower.subplots(2, NUM_SAMPLES // 2).flat):
        axis.imshow(((shown[number] + 1) / 2).permute(1, 2, 0).numpy())
        axis.axis("off")
        right, after = exam.named[number].name, answers[NAMES[2]][number]
        lines = [right, *(f"{name}: {answers[name][number]}" for name in NAMES)]
        axis.set_title("\n".join(lines), fontsize=7, color="C2" if right == after else "black")
    save_figure(figure, picture, "--folder")


def report(
    folder: Path, folders: Mapping[str, Path], corpus: vlm_training.Corpus, named: Sequence[Named]
) -> None:
    """Print results and answers, draw the picture, and say what to do next."""
    pixels = emoji_pictures.read_pixels(corpus.image_root, STYLES[1], named)
    exam = PictureExam.of(pixels, named).part(NUM_EXAMINED)
    results = examine(folders, exam)
    print(f"\n--- {len(exam.named)} pictures of the other drawing style\n" + "\n".join(table_lines(results)))
    shown = exam.shown(False)[:NUM_SAMPLES]
    written = {name: Examiner(one).answers(shown, QUESTIONS[0]) for name, one in folders.items()}
    answers = {name: [text[:MAX_CHARACTERS] for text in texts] for name, texts in written.items()}
    print(f"\n--- {QUESTIONS[0].text}")
    print(f"{'':32}" + "".join(f"{name:32}" for name in folders))
    for number, one in enumerate(exam.named[:NUM_SAMPLES]):
        print(f"{one.name:32}" + "".join(f"{answers[name][number]:32}" for name in folders))
    draw_picture(folder, results, exam, answers)
    print(f"\npicture: {folder / 'quickstart_vlm.png'}\nexported student: {folders[NAMES[2]]}")


@returns_exit_code
def main() -> None:
    parser = FlagParser(description=__doc__)
    out = ROOT / "runs" / "quickstart-vlm"
    help_text = "folder to write everything to (default: runs/quickstart-vlm)"
    parser.add_argument("--folder", type=Path, default=out, help=help_text)
    parser.add_argument(
        "--groups", nargs="*", default=GROUPS, help="groups of emoji, at least two (default: three)"
    )
    for name, value, text in (
        ("copies", COPIES, "varied pictures of each name"),
        ("matched", MATCHED, "pictures that the teacher's tower matches with names"),
        ("captions", CAPTIONS, "pictures that the teacher names before it reads conversations"),
        ("teacher-steps", TEACHER_STEPS, "steps of the teacher"),
        ("steps", STUDENT_STEPS, "steps of the distillation"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    args = parser.parse_args()
    folder, start = args.folder, time.perf_counter()
    disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    fetch_smollm2(folder / "smollm2")
    corpus, named = prepare(folder, args.copies, args.groups)
    teacher = make_teacher(args, corpus, named)
    cut_vlm(teacher, folder / "student", *STUDENT_LAYERS)
    for name in ("teacher", "student"):
        parts = ", ".join(f"{part} {count:,}" for part, count in num_parameters(folder / name).items())
        print(f"{name}: parameters: {parts}")
    print("\n--- distillation", flush=True)
    exported = distil(folder, corpus, args.steps)
    report(folder, dict(zip(NAMES, (teacher, folder / "student", exported), strict=True)), corpus, named)
    print(f"\nquickstart-vlm took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
