"""Copy the launch scripts out of mkd; tests/test_install.py starts them from an installed mkd."""

from __future__ import annotations

from pathlib import Path

from mkd.commands.launch_scripts import main
from mkd.errors import EXIT_USAGE
from tests.reported import reported_codes

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return name -> (contents, mode) of the scripts of a folder, without the Dockerfile."""
    scripts = [path for path in folder.iterdir() if path.suffix in (".sh", ".sbatch", ".py")]
    return {path.name: (path.read_bytes(), path.stat().st_mode) for path in scripts}


def test_scripts_are_copied_once_and_never_over_others(tmp_path, capsys):
    assert main([str(tmp_path / "new")]) == 0
    copy = tmp_path / "new" / "launch"
    assert capsys.readouterr().out == f"{copy}\n"
    assert contents(copy) == contents(LAUNCH)
    assert len(contents(copy)) == len(list(copy.iterdir()))
    (copy / "env.sh").write_text("changed")
    assert main([str(tmp_path / "new")]) == EXIT_USAGE
    assert reported_codes(capsys.readouterr().err) == ["choose-another-folder: already exists"]
    assert (copy / "env.sh").read_text() == "changed"
    assert main([str(copy / "env.sh")]) == EXIT_USAGE
    assert reported_codes(capsys.readouterr().err) == ["not-writable: cannot write"]
