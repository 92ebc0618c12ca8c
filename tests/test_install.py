"""Install the wheel into an empty environment outside the checkout, and use it as a stranger would.

Needs a package index; the environments take minutes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from mkd.errors import EXIT_USAGE
from tests.reported import reported_codes
from tests.test_repository import repository_files
from tests.train.command import flags, make_files, read_metrics

ROOT = Path(__file__).resolve().parent.parent
NOT_PACKED = (".ci/",)
EXTRAS = ("pyarrow", "matplotlib", "tiktoken", "numba", "tensorboard", "wandb")

pytestmark = pytest.mark.slow


def run(command: list, cwd: Path, timeout_s: int = 600, **environment) -> subprocess.CompletedProcess:
    """Run a command that knows nothing of this checkout."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHON", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def checked(command: list, cwd: Path, **environment) -> str:
    """Run a command that must succeed, and return its stdout."""
    done = run(command, cwd, 1800, **environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Return a folder with the sdist, the wheel made of it, and in `direct` the wheel made of the tree."""
    folder = tmp_path_factory.mktemp("dist")
    tree = folder / "tree"
    for path in repository_files():
        (tree / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, tree / path.relative_to(ROOT))
    checked([sys.executable, "-m", "venv", folder / "builder"], folder)
    python = folder / "builder/bin/python"
    checked([python, "-m", "pip", "install", "--quiet", "build"], folder)
    checked([python, "-m", "build", "--outdir", folder, tree], folder)
    checked([python, "-m", "build", "--wheel", "--outdir", folder / "direct", tree], folder)
    return folder


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (path,) = dist.glob("megatron_kd-*.whl")
    return path


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory) -> Path:
    """Return the folder of programs of an environment with the wheel and no extra."""
    folder = tmp_path_factory.mktemp("env")
    checked([sys.executable, "-m", "venv", folder / "env"], folder)
    pip = [folder / "env/bin/python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt"]
    checked([*pip, "torch"], folder)
    checked([*pip, wheel], folder)
    return folder / "env/bin"


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Return a folder outside the checkout with two random models and a text."""
    return make_files(tmp_path_factory.mktemp("outside"))


def test_the_sdist_is_the_repository(dist):
    (path,) = dist.glob("megatron?kd-*.tar.gz")
    with tarfile.open(path) as archive:
        packed = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    kept = {path.relative_to(ROOT).as_posix() for path in repository_files()}
    assert {name for name in kept - packed if not name.startswith(NOT_PACKED)} == set()


def test_both_wheels_are_the_same(dist, wheel):
    """A file that only the tree has would be missing in what is built from the sdist."""
    (direct,) = (dist / "direct").glob("*.whl")
    contents = []
    for path in (wheel, direct):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
            contents.append({name: archive.read(name) for name in names})
    assert contents[0] == contents[1]
    patterns = ("constraints.txt", "configs/*.yaml", "launch/*.s*", "launch/*.py")
    packaged = {path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)}
    assert {f"mkd/packaged/{name}" for name in packaged} == {n for n in contents[0] if "/packaged/" in n}
    package = {
        path.relative_to(ROOT).as_posix() for path in repository_files() if path.is_relative_to(ROOT / "mkd")
    }
    assert package - contents[0].keys() == set()
    assert not [name for name in contents[0] if name.startswith(("tests/", "tools/", "configs/", "launch/"))]


def test_the_environment_is_empty_and_healthy(programs, files):
    """The doctor finds everything that a run needs, and says how to add every extra."""
    python = programs / "python"
    where = checked([python, "-c", "import mkd; print(mkd.__file__)"], files).strip()
    assert Path(where).is_relative_to(programs.parent)
    installed = {
        one["name"] for one in json.loads(checked([python, "-m", "pip", "list", "--format=json"], files))
    }
    assert "megatron-kd" in installed and not installed & {"mkd", *EXTRAS}
    report = checked([programs / "mkd", "doctor"], files)
    assert report.endswith("a run can start\n")
    assert not [name for name in EXTRAS if f"pip install {name})" not in report]
    repair = checked([python, "-c", "from mkd import doctor; print(doctor._install('torch'))"], files)
    pins = Path(repair.split(" -c ")[1].strip())
    assert pins.is_file() and pins.is_relative_to(programs.parent)


def test_a_run_from_plan_to_export(programs, files):
    """Plan, train, evaluate and export with the commands, in a folder without a checkout."""
    mkd = programs / "mkd"
    usage = checked([mkd, "train", "--help"], files)
    assert "--teacher-hf" in usage
    first = [
        files / "teacher",
        files / "student",
        files / "text.jsonl",
        "--gpus",
        0,
        "--out",
        files / "first",
    ]
    assert "steps" in checked([mkd, "init", *first], files)
    assert "tokens a step" in checked([mkd, "plan", "--config", files / "first/run.yaml"], files)
    argv = flags(files, "run", "--save", files / "run", "--export-hf", files / "run hf")
    assert "128 tokens a step" in checked([mkd, "plan", *argv], files)
    checked([mkd, "train", *argv], files)
    assert [record["iteration"] for record in read_metrics(files / "run")] == [1, 2]
    checked([mkd, "export", "--load", files / "run", "--hf-out", files / "exported"], files)
    weights = [files / folder / "model.safetensors" for folder in ("run hf", "exported")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert "nothing differs" not in checked([mkd, "compare", files / "run", files / "run"], files)


def test_torchrun_starts_the_package(programs, files):
    argv = flags(files, "two", "--tensor-model-parallel-size", 2)
    command = [programs / "torchrun", "--standalone", "--nproc-per-node", "2", "-m", "mkd", "train", *argv]
    assert "iteration        2/       2" in checked(command, files, OMP_NUM_THREADS="1")


def test_launch_scripts_start_the_package(programs, files):
    """A copy of the scripts runs the mkd of the Python on the path, and keeps the exit code."""
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    checked([programs / "mkd", "launch-scripts", "cluster"], files)
    local = files / "cluster/launch/local.sh"
    argv = flags(files, "local", "--tensor-model-parallel-size", 2)
    assert "iteration        2/       2" in checked([local, *argv], files, PATH=path, NPROC="2")
    missing = run([local, *flags(files, "refused", data_path="none.jsonl")], files, PATH=path, NPROC="1")
    assert missing.returncode == 65 and set(reported_codes(missing.stderr)) == {"data-path-not-found"}
    submit = [programs / "python", "cluster/launch/submit.py", "--dry-run", "--gpus-per-node", "2"]
    script = checked([*submit, *flags(files, "job", "--save", "s", "--load", "s")], files)
    assert "#SBATCH --gpus-per-node=2" in script


def test_a_packaged_configuration_by_its_name(programs, files):
    refused = run([programs / "mkd", "train", "--config", "quickstart", "--dry-run"], files)
    assert refused.returncode == EXIT_USAGE and "runs/quickstart" in refused.stderr  # nothing of it is here
    refused = run([programs / "mkd", "train", "--config", "quick"], files)
    assert reported_codes(refused.stderr) == ["path-not-found: does not exist"]
    examples = {path.stem for path in (ROOT / "configs").glob("*.yaml")}
    assert not [name for name in examples if name not in refused.stderr]


def test_an_extra_that_is_missing_is_named_by_its_package(programs, files):
    """Every `pip install X` in an error names a package, never an extra of a project with our name."""
    (files / "data.parquet").write_bytes(b"")
    (files / "cl100k_base.tiktoken").write_text("IQ== 0\n")
    commands = {
        "pyarrow": ["train", *flags(files, "parquet", data_path="data.parquet")],
        "matplotlib": ["report", files / "run", "--png", files / "run.png"],
        "tiktoken": ["preprocess", "--input", files / "text.jsonl", "--output-prefix", files / "p"],
        "tensorboard": ["train", *flags(files, "board", "--tensorboard-dir", files / "board")],
        "wandb": ["train", *flags(files, "wandb", "--wandb-project", "p")],
    }
    commands["tiktoken"] += [
        "--tokenizer-type",
        "TiktokenTokenizer",
        "--tokenizer-model",
        files / "cl100k_base.tiktoken",
    ]
    for package, argv in commands.items():
        done = run([programs / "mkd", *argv], files)
        assert 64 <= done.returncode <= 66 and "Traceback" not in done.stderr, done.stderr
        assert re.findall(r"pip install ([^\s,]+)", done.stderr) == [package], done.stderr


def test_a_system_torch_is_kept(dist, tmp_path):
    """Resolve the dependencies beside a torch that no index has, as in NVIDIA's images.

    The packages of the system are those of PYTHONUSERBASE, which a venv with system packages also sees.
    """
    system = tmp_path / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    versions = {"torch": "2.13.0a0+image", "transformer_engine": "2.11.0+image", "triton": "3.9.0+image"}
    for name, version in versions.items():
        (system / f"{name}-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (system / f"{name}-{version}.dist-info/METADATA").write_text(metadata)
    user = {"PYTHONUSERBASE": str(tmp_path)}
    checked([sys.executable, "-m", "venv", "--system-site-packages", tmp_path / "env"], tmp_path)
    python = tmp_path / "env/bin/python"
    keep = tmp_path / "keep.txt"
    keep.write_text(checked([python, dist / "tree/tools/system_constraints.py"], tmp_path, **user))
    assert {"torch==2.13.0a0+image", "transformer-engine==2.11.0+image"} <= set(keep.read_text().split())
    (wheel,) = dist.glob("*.whl")
    report = tmp_path / "report.json"
    options = ["--quiet", "--dry-run", "--report", report, f"{wheel}[data,tiktoken]"]
    checked([python, "-m", "pip", "install", *options], tmp_path, PIP_CONSTRAINT=str(keep), **user)
    would = {one["metadata"]["name"].lower() for one in json.loads(report.read_text())["install"]}
    assert {"megatron-kd", "megatron-core", "transformers"} <= would
    assert not would & {"torch", "triton", "transformer-engine", "transformer_engine"}
    check = [python, dist / "tree/tools/system_constraints.py", "--check", keep]
    assert run(check, tmp_path, **user).returncode == 0
    shutil.rmtree(next(system.glob("torch-*")))
    assert run(check, tmp_path, **user).returncode == 1
