"""Start the converter of llama.cpp as it is called, and refuse before an export what it could not do."""

from __future__ import annotations

import pytest

from mkd.release.gguf_file import GGUFFile
from tests.reported import refused

CONVERTER = """
import argparse, pathlib, sys
parser = argparse.ArgumentParser()
parser.add_argument("model"), parser.add_argument("--outfile"), parser.add_argument("--outtype")
args = parser.parse_args()
if not (pathlib.Path(args.model) / "config.json").exists():
    sys.exit("Model Nothing is not supported")
pathlib.Path(args.outfile).write_bytes(b"GGUF" + args.outtype.encode())
"""  # with the arguments of llama.cpp's own


@pytest.fixture
def llama_cpp(tmp_path, monkeypatch):
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP", str(folder))
    return folder


def test_the_converter_gets_the_export(llama_cpp, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    file = GGUFFile(tmp_path / "student.gguf", "q8_0")
    assert file.problem(overwrite=False) is None
    file.write(tmp_path)
    assert file.path.read_bytes() == b"GGUFq8_0"
    with refused("already-exists: student.gguf exists"):
        raise file.problem(overwrite=False)
    assert file.problem(overwrite=True) is None
    shown = file.shown(tmp_path / "student")
    assert shown == "python convert_hf_to_gguf.py student --outfile student.gguf --outtype q8_0"


def test_its_message_is_in_the_error(llama_cpp, tmp_path):
    with refused("after-export-failed: Model Nothing is not supported"):
        GGUFFile(tmp_path / "a.gguf").write(tmp_path)


def test_without_a_converter_the_error_says_how_to_get_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with refused("package-missing: git clone"):
        raise GGUFFile(tmp_path / "a.gguf").problem(overwrite=False)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with refused("package-missing: has no convert_hf_to_gguf.py"):
        raise GGUFFile(tmp_path / "a.gguf").problem(overwrite=False)
    with refused("not-writable: does not exist"):
        raise GGUFFile(tmp_path / "none" / "a.gguf").problem(overwrite=False)
