"""Take single definitions out of another project's installed source."""

from __future__ import annotations

import pytest

from tools.benchmarks.peers import PeerMissing, find, installed_file, load_source

SOURCE = """
from __future__ import annotations
from .heavy import never_there
FACTOR = 2
def scale(x: NotImported) -> AlsoNot:
    return given_factor * x
class Trainer(never_there):
    @staticmethod
    def loss(x):
        return scale(x) + 1
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "peerpackage").mkdir()
    (tmp_path / "peerpackage" / "__init__.py").write_text(
        "raise ImportError('the package around it is not wanted')"
    )
    (tmp_path / "peerpackage" / "loss.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    return "peerpackage"


def test_definitions_run_without_their_package(package):
    module = load_source(installed_file(package, "loss.py"), ("scale", "Trainer.loss"), dict(given_factor=3))
    assert module.loss(2) == 7
    assert not hasattr(module, "FACTOR")


def test_a_whole_file_runs_without_its_relative_imports(package):
    module = load_source(installed_file(package, "loss.py"), given=dict(given_factor=3, never_there=object))
    assert module.FACTOR == 2 and module.Trainer.loss(1) == 4


def test_what_is_missing_is_named(package):
    with pytest.raises(PeerMissing, match="no_such_package: not installed, skipped"):
        installed_file("no_such_package", "loss.py")
    with pytest.raises(PeerMissing, match="peerpackage: this version has no other.py"):
        installed_file(package, "other.py")
    with pytest.raises(PeerMissing, match="loss.py: this version has no Trainer.other"):
        load_source(installed_file(package, "loss.py"), ("Trainer.other",))


def test_found_and_missing_are_told_apart():
    def missing():
        raise PeerMissing("x: not installed, skipped")

    assert find({"a": lambda: 1, "b": missing, "c": missing}) == ({"a": 1}, ["x: not installed, skipped"])
