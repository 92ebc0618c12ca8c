"""At its end a run cleans up in order, and its last message tells correctly what was saved."""

from __future__ import annotations

import signal

import pytest

from mkd.checkpoint.hf.hf_folder import NEW
from mkd.operations.cleanup import Cleanup
from tests.train.command import flags, make_files, run_main


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("cleanup"))


def begin(cleanup: Cleanup, failing=()) -> list:
    """Add actions 1, 2 and 3, which record their argument; those in `failing` then fail."""
    told = []

    def action(number):
        def act(error):
            told.append((number, str(error)))
            if number in failing:
                raise OSError(f"action {number}")

        return act

    for number in (1, 2, 3):
        cleanup.add(action(number))
    return told


def test_the_last_begun_is_ended_first():
    with Cleanup() as cleanup:
        told = begin(cleanup)
    assert told == [(3, "None"), (2, "None"), (1, "None")]


def test_nothing_hides_why_the_run_failed(capsys):
    with pytest.raises(ValueError, match="the run"), Cleanup() as cleanup:
        told = begin(cleanup, failing=(3, 2))
        raise ValueError("the run")
    assert told == [(3, "the run"), (2, "the run"), (1, "the run")]
    shown = capsys.readouterr().err
    assert "OSError: action 3" in shown and "OSError: action 2" in shown


def test_what_fails_at_the_end_of_a_good_run_is_its_error(capsys):
    with pytest.raises(OSError, match="action 3"), Cleanup() as cleanup:
        told = begin(cleanup, failing=(3, 1))
    assert told == [(3, "None"), (2, "action 3"), (1, "action 3")]
    assert "OSError: action 1" in capsys.readouterr().err


def stopped(argv, in_step):
    """Send SIGTERM to a run before its first step, or in it.

    Return (text of the lock after training, text after everything, the error with which the run ended).
    """
    from pathlib import Path

    from mkd.config.load import load_config
    from mkd.errors import Preempted
    from mkd.operations.signals import Signals
    from mkd.platform import detect
    from mkd.run.loop import train
    from mkd.run.main import end
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    config, signals = load_config(argv).config, Signals()
    lock = Path(config.checkpoint.save or "nowhere") / "writer.lock"
    texts, caught = [], None

    def look():
        texts.append(lock.read_text() if lock.exists() else None)

    try:
        with Cleanup() as cleanup:
            run = build_run(plan_run(config, 1), detect(), signals, cleanup=cleanup)
            signals.received, next_step = 0 if in_step else signal.SIGTERM, run.data.train.next_step

            def with_signal():
                signals.received = signal.SIGTERM
                return next_step()

            run.data.train.next_step = with_signal
            stop = train(run)
            look()
            end(run, stop)
    except Preempted as error:
        caught = error.why, error.do
    look()
    return *texts, caught


def test_what_is_said_of_what_was_saved(files, ranks):
    """The run also keeps its lock on the folder until it has ended."""

    def end_of(run, in_step, *more):
        ((held, released, said),) = ranks.run(stopped, 1, flags(files, run, *more), in_step)
        assert (held is None) == (released is None) == ("--save" not in more)
        assert held is None or ('"pid"' in held and released == "")
        return said

    save, other = files / "save", files / "other"
    again, go_on = "start the same command again", ("--save", save, "--load", save)
    nothing = "no step was done: there is nothing to save"
    assert end_of("none", False) == (nothing, again)
    lost = ("with --no-save the steps of this run are lost", f"{again}, without --no-save")
    assert end_of("none", True) == lost
    assert end_of("save", False, *go_on) == (nothing, again)
    assert not list(save.glob("iter_*"))
    saved = (f"iteration 1 is saved in {save / 'iter_0000001'}", again)
    assert end_of("save", True, *go_on) == saved and (save / "iter_0000001").is_dir()
    assert end_of("save", False, *go_on) == saved
    back = end_of("save", False, *go_on, "--ckpt-step", 1)  # one rewind is enough
    assert back == (saved[0], f"{again}, without --ckpt-step")
    for step in ((), ("--ckpt-step", 1)):  # a start from another folder still needs --ckpt-step
        assert end_of("other", False, "--save", other, "--load", save, *step) == (saved[0], again)
    assert not list(other.glob("iter_*")) and (other / "PREEMPTED").exists()


def test_a_run_whose_export_failed_is_not_done(files, ranks):
    """After a restart it exports and is done."""
    save, exported = files / "export", files / "export hf"
    exported.mkdir()
    (exported / NEW).touch()  # where the export wants a folder
    argv = flags(files, "export", "--save", save, "--load", save, "--export-hf", exported)
    (result,) = run_main(ranks, argv)
    assert result.exit_code != 0 and NEW in result.stderr, result.stderr
    assert (save / "iter_0000002").is_dir() and not (save / "DONE").exists()
    (exported / NEW).unlink()
    (result,) = run_main(ranks, argv)
    assert result.exit_code == 0 and (save / "DONE").exists() and (exported / "config.json").is_file(), (
        result.stderr
    )


def phases_of_publishing(argv):
    """Return the watchdog's phase at each question whether a background save can be published."""
    from mkd.config.load import load_config
    from mkd.operations.watchdog import Watchdog
    from mkd.platform import detect
    from mkd.run.loop import train
    from mkd.run.plan_run import plan_run
    from mkd.run.setup import build_run

    with Cleanup() as cleanup:
        watchdog = Watchdog.idle(0, 1)
        run = build_run(plan_run(load_config(argv).config, 1), detect(), None, watchdog, cleanup)
        phases, poll = [], run.saver.poll

        def noted():
            phases.extend([watchdog.phase] if run.saver.pending else [])
            return poll()

        run.saver.poll = noted
        train(run)
    return phases


def test_publishing_a_background_save_has_the_time_of_a_save(files, ranks):
    more = ("--save", files / "background", "--async-save", "--save-interval", 2, "--train-iters", 9)
    (phases,) = ranks.run(phases_of_publishing, 1, flags(files, "background", *more))
    assert len(phases) == 3 and set(phases) == {"save"}  # in steps 3, 5 and 7
