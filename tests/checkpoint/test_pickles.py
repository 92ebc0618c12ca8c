"""Check that a foreign checkpoint runs no code: whatever a pickle in it asks for is refused by name."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

from mkd.checkpoint.manifest import MANIFEST_FILE, manifest_text, seal
from mkd.checkpoint.pickles import read_metadata, refuse_code
from mkd.errors import CheckpointError
from tests.checkpoint.tiny_saves import choose, copy, run_forked, save
from tests.reported import Reported


class Crafted:
    """Pickle as a call of `function(*arguments)`, which unpickling would make."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    run_forked(1, save, folder, 1)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """Return a private copy of the one checkpoint."""
    return copy(saved, tmp_path / "save") / "iter_0000001"


def attacks(trace):
    """Return objects that would write the file `trace` if run, by the name that the refusal must contain."""
    touch = f"open({str(trace)!r}, 'w').close()"
    return {
        "posix.system": Crafted(os.system, f"touch {trace}"),
        "exec": Crafted(exec, touch),
        "eval": Crafted(eval, touch),
        "__import__": Crafted(getattr, Crafted(__import__, "os"), "system"),
        "open": Crafted(open, str(trace), "w"),
        "torch.serialization.load": Crafted(torch.load, str(trace)),
        "torch.hub.load": Crafted(torch.hub.load, "a/b", "c"),
    }


NAMES = tuple(attacks("trace"))


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fault(30)
def test_metadata_may_not_call(name, protocol, folder, tmp_path):
    """Row 30: a call as the whole file, or in an attribute of a real one (impossible in protocol 0)."""
    trace = tmp_path / "trace"
    metadata = read_metadata(folder)
    metadata.planner_data = attacks(trace)[name]
    for content in (attacks(trace)[name], metadata)[: 1 if protocol == 0 else 2]:
        (folder / ".metadata").write_bytes(pickle.dumps(content, protocol=protocol))
        refused = refusal(folder)
        assert refused.code == "untrusted-files" and str(folder / ".metadata") in refused.what
        assert f"{name}," in refused.what or "getattr," in refused.what
    assert not trace.exists()


def test_members_of_an_enum_as_older_pythons_write_them(folder):
    """Python 3.11.0 to 3.11.3 pickles them as calls of getattr. No other attribute may be asked for."""
    metadata = read_metadata(folder)
    metadata.planner_data = Crafted(getattr, WriteItemType, "TENSOR")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    refuse_code(folder)
    assert read_metadata(folder).planner_data is WriteItemType.TENSOR
    for of, name in ((WriteItemType, "__class__"), (Metadata, "__init__"), (WriteItemType.TENSOR, "value")):
        metadata.planner_data = Crafted(getattr, of, name)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        assert "getattr," in refusal(folder).what


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.fault(30)
def test_torch_files_may_not_call(is_zip, name, folder, tmp_path):
    """Row 30: a call in the common file and in the byte entry of a shard, both formats of `torch.save`."""
    trace = tmp_path / "trace"
    content = io.BytesIO()
    torch.save({"step": attacks(trace)[name]}, content, _use_new_zipfile_serialization=is_zip)
    good = (folder / "common.pt").read_bytes()
    (folder / "common.pt").write_bytes(content.getvalue())
    refused = refusal(folder)
    assert refused.code == "untrusted-files" and str(folder / "common.pt") in refused.what
    assert name in refused.what or "getattr" in refused.what
    (folder / "common.pt").write_bytes(good)
    file = put_in_place_of_rng(folder, content.getvalue())
    refused = refusal(folder)
    assert refused.code == "untrusted-files" and str(folder / file) in refused.what
    assert not trace.exists()


def put_in_place_of_rng(folder, content, file="crafted.distcp"):
    """Let `.metadata` send the byte entries to a file that holds `content`."""
    metadata = read_metadata(folder)
    (folder / os.path.basename(file)).write_bytes(content)
    for index in metadata.storage_data:
        if index.fqn != "w":
            metadata.storage_data[index] = _StorageInfo(file, 0, len(content))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return file


def refusal(folder):
    with pytest.raises(CheckpointError) as caught:
        refuse_code(folder)
    return caught.value


@pytest.mark.parametrize("file", ["../crafted.distcp", "/etc/passwd"])
def test_entries_stay_in_the_folder(file, folder):
    put_in_place_of_rng(folder, b"", file)
    assert Reported.of(refusal(folder)) == "untrusted-files: sends"


@pytest.mark.parametrize("name", [".metadata", "common.pt"])
def test_damaged_pickles_are_errors_and_no_more(name, folder):
    content = (folder / name).read_bytes()
    for damaged in (b"", content[:-5], b"\x80\x05" + b"\xff" * 50, b"(" * 1000, b"garbage"):
        (folder / name).write_bytes(damaged)
        assert Reported.of(error := refusal(folder)) == "checkpoint-damaged: cannot be read"
        assert str(folder / name) in error.what
    (folder / name).unlink()
    assert Reported.of(refusal(folder)) == "checkpoint-damaged: cannot be read"


@pytest.mark.parametrize("content", [1, {}, [], "text", {"state_dict_metadata": {}}])
def test_metadata_of_another_kind(content, folder):
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    assert Reported.of(refusal(folder)) == "checkpoint-damaged: is damaged"


@pytest.mark.fault(30)
def test_a_crafted_checkpoint_with_a_fitting_manifest(folder, tmp_path):
    """Row 30: a manifest proves that nothing changed since it was written, not who wrote it."""
    trace = tmp_path / "trace"
    (folder / ".metadata").write_bytes(pickle.dumps(attacks(trace)["posix.system"]))
    entries = seal(folder, [path.name for path in folder.iterdir() if path.name != MANIFEST_FILE])
    (folder / MANIFEST_FILE).write_text(manifest_text(entries))
    outcomes = run_forked(2, choose, folder.parent, 1)
    texts = [text for _, (text, _) in outcomes]
    assert texts[0] == texts[1] and ".metadata holds posix.system" in texts[0] and not trace.exists()


def test_absurd_sizes_in_a_torch_file(folder):
    """A zip file claims to be larger than it is."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, protocol=2))
        archive.writestr("archive/version", "3")
    raw = bytearray(content.getvalue())
    directory = raw.index(b"PK\x01\x02")
    raw[directory + 20 : directory + 28] = struct.pack("<II", 0xFFFFFFF0, 0xFFFFFFF0)
    (folder / "common.pt").write_bytes(raw)
    assert Reported.of(refusal(folder)) == "checkpoint-damaged: cannot be read"
