import math
from datetime import datetime

from mkd.log.progress import evaluation_line, progress_line

NOW = datetime(2030, 1, 2, 3, 4, 5)
RECORD = {
    "iteration": 5,
    "consumed_samples": 40,
    "consumed_tokens": 20480,
    "loss": 3.0,
    "ce_loss": 2.123456,
    "kd_loss": 4.0,
    "teacher_ce": 1.5,
    "teacher_entropy": 1.2,
    "top1_agreement": 0.5125,
    "grad_norm": 1.2341,
    "learning_rate": 5e-4,
    "num_loss_tokens": 3900,
    "step_time_ms": 812.34,
    "teacher_share": 0.25,
    "tokens_per_s_per_gpu": 2521.1,
    "tflops_per_gpu": 1.26,
    "skipped_iterations": 0,
}


def test_progress_line_is_megatrons_with_our_fields():
    assert progress_line(RECORD, train_iters=30, global_batch_size=8, now=NOW) == (
        " [2030-01-02 03:04:05] iteration        5/      30 | consumed samples:           40 | elapsed time "
        "per iteration (ms): 812.3 | throughput per GPU (TFLOP/s/GPU): 1.3 | learning rate: 5.000000E-04 | "
        "global batch size:     8 | loss: 3.000000E+00 | lm loss: 2.123456E+00 | ce loss: 2.123456E+00 | "
        "kd loss: 4.000000E+00 | teacher ce: 1.500000E+00 | top-1 agreement: 0.5125 | grad norm: 1.234 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 | teacher share: 0.250 | tokens "
        "per second per GPU: 2521.1 | ETA: 0:00:20 |"
    )


def test_progress_line_shows_zero_negative_and_non_finite_losses():
    record = RECORD | {"loss": -0.5, "kd_loss": 0.0, "ce_loss": math.nan}
    line = progress_line(record, train_iters=30, global_batch_size=8)
    assert (
        "| loss: -5.000000E-01 |" in line
        and "| kd loss: 0.000000E+00 |" in line
        and "| lm loss: NAN |" in line
    )


def test_progress_line_without_a_teacher_has_no_teacher_fields():
    absent = ("kd_loss", "teacher_ce", "teacher_share", "top1_agreement", "tflops_per_gpu")
    record = {key: value for key, value in RECORD.items() if key not in absent}
    line = progress_line(record, train_iters=30, global_batch_size=8)
    assert "lm loss: " in line
    assert not any(label in line for label in ("kd loss", "teacher", "top-1", "throughput"))


def test_progress_line_names_each_of_several_teachers():
    record = RECORD | {"kd_loss/small_one": 1.0, "kd_loss/big": 3.0}
    line = progress_line(record, train_iters=30, global_batch_size=8)
    assert "| kd loss/small_one: 1.000000E+00 | kd loss/big: 3.000000E+00 |" in line


def test_memory_is_shown_where_it_is_known():
    line = progress_line(RECORD | {"peak_memory_gib": 65.43}, train_iters=30, global_batch_size=8)
    assert "| peak memory per GPU (GiB): 65.4 | ETA" in line


def test_eta_counts_the_steps_that_remain():
    assert "| ETA: 1:23:20 |" in progress_line(
        RECORD | {"step_time_ms": 5e4}, train_iters=105, global_batch_size=8
    )
    assert "| ETA: 0:00:00 |" in progress_line(RECORD, train_iters=5, global_batch_size=8)


def test_evaluation_line_has_a_perplexity_of_the_cross_entropy_only():
    record = {
        "iteration": 10,
        "split": "valid",
        "loss": 1.0,
        "ce_loss": 0.0,
        "kd_loss": 2.0,
        "top1_agreement": 0.25,
    }
    assert evaluation_line(record) == (
        " validation loss at iteration 10 | loss value: 1.000000E+00 |"
        " lm loss value: 0.000000E+00 | lm loss PPL: 1.000000E+00 |"
        " ce loss value: 0.000000E+00 | ce loss PPL: 1.000000E+00 |"
        " kd loss value: 2.000000E+00 | top-1 agreement value: 0.2500 |"
    )


def test_perplexity_of_a_diverged_model_is_infinite():
    assert "ce loss PPL: INF |" in evaluation_line({"iteration": 1, "ce_loss": 1e4})


def test_an_eta_beyond_all_calendars():
    assert "ETA: 999999999 days, 0:00:00 |" in progress_line(RECORD, train_iters=10**15, global_batch_size=8)
