"""Examine this machine and its Python environment without trusting either.

Only the standard library, and parts of mkd that need nothing else, are imported here; child processes import
everything else. Even an installation that kills its process therefore becomes a line of the report.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkd.config.packaged import packaged
from mkd.errors import MkdError
from mkd.human import counted
from mkd.import_probe import probe
from mkd.log.loggers.known_loggers import LOGGERS
from mkd.tested_versions import FP8_TRANSFORMER_ENGINE, TESTED, is_too_old_for_fp8, transformer_engine_range

GIB = 2**30
SHARED_MEMORY_GIB = 1.0  # below this, loader processes and NCCL run out of shared memory
FREE_DISK_GIB = 20.0
OPEN_FILES = 4096
LIBRARIES = "CUDA|NCCL|GLOO|NVTE|PYTORCH|TORCH|OMP|MKL|SLURM_JOB|MASTER|TRITON"
ENVIRONMENT = re.compile(rf"({LIBRARIES})_\w+|(LOCAL_)?RANK|WORLD_SIZE")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS")

_TORCH_PROBE = """
import torch
found = dict(version=torch.__version__, cuda=torch.version.cuda, devices=[], nccl=None)
if torch.cuda.is_available():
    for index in range(torch.cuda.device_count()):
        of = torch.cuda.get_device_properties(index)
        found["devices"].append([of.name, of.total_memory, f"{of.major}.{of.minor}"])
    nccl = torch.cuda.nccl.version()
    found["nccl"] = ".".join(map(str, nccl)) if isinstance(nccl, tuple) else str(nccl)
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str  # ok, note (a run can start anyway), FAIL (no run can start)
    subject: str
    text: str
    do: str = ""

    def __str__(self) -> str:
        return f"{self.level:4}  {self.subject:20}  {self.text}" + (
            f"\n      {'':20}  do: {self.do}" if self.do else ""
        )


def examine(folder: Path) -> list[Finding]:
    """Return all findings. A run would write to `folder`."""
    software = _python, _torch, _megatron, _transformer_engine, _apex, _triton, _packages
    checks = *software, _machine, _environment
    with ThreadPoolExecutor() as threads:  # most of the time goes to child processes that import something
        findings = [finding for found in threads.map(_found_by, checks) for finding in found]
    return findings + _disk(folder)


def _found_by(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """Return what a check finds. If the check itself fails, return a note."""
    findings: list[Finding] = []
    try:
        findings += check()
    except Exception as error:  # a broken machine must not break the report
        findings.append(Finding("note", check.__name__.strip("_"), f"could not be examined: {error!r}"))
    return findings


def describe(findings: list[Finding]) -> str:
    """Return one block to paste into a report."""
    failed = sum(finding.level == "FAIL" for finding in findings)
    end = f"{counted(failed, 'problem')}: no run can start" if failed else "a run can start"
    return "\n".join(["--- mkd doctor", *map(str, findings), f"--- {end}"])


def is_healthy(findings: list[Finding]) -> bool:
    """Return True if a run can start."""
    return not any(finding.level == "FAIL" for finding in findings)


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _install(package: str) -> str:
    """Return the command that installs a tested version of `package`."""
    try:
        pins = packaged("constraints.txt")
    except MkdError:  # a copy of mkd without it
        return f"pip install {package}"
    here = Path.cwd()
    place = pins.relative_to(here) if here in pins.parents else pins
    return f"pip install {package} -c {shlex.quote(str(place))}"


def _judged(name: str, version: str, do: str = "") -> Finding:
    """Return `ok` for a version that mkd is tested with, and a note for another one."""
    tested = TESTED[name]
    if tested.holds(version):
        return Finding("ok", name, version)
    age = "older" if tested.is_newer_than(version) else "newer"
    return Finding("note", name, f"{version}: {age} than what mkd is tested with ({tested})", do)


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    place = f"at {sys.executable}, {platform.platform()}"
    if TESTED["Python"].is_newer_than(version):  # the doctor itself also runs on older ones
        text = f"{version} {place}"
        yield Finding("FAIL", "Python", text, "use Python 3.10 or newer: make test PYTHON=python3.12")
    else:
        judged = _judged("Python", version)
        yield Finding(judged.level, "Python", f"{judged.text} {place}")


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("FAIL", "torch", "not installed", _install("torch"))
        return
    seen = probe(_TORCH_PROBE)
    if seen.error:
        text = f"{version_of('torch')}, but its import fails: {seen.error}"
        yield Finding("FAIL", "torch", text, "install torch again")
        return
    found = seen.found
    do = _install("torch")
    if TESTED["torch"].is_newer_than(found["version"]):
        yield Finding("FAIL", "torch", f"{found['version']}: too old ({TESTED['torch']})", do)
    else:
        yield _judged("torch", found["version"], do)
    yield from _devices(found)


def _devices(found: dict[str, Any]) -> Iterator[Finding]:
    if found["devices"]:
        for index, (name, memory, capability) in enumerate(found["devices"]):
            yield Finding(
                "ok", f"GPU {index}", f"{name}, {memory / GIB:.1f} GiB, compute capability {capability}"
            )
        yield Finding(
            "ok", "CUDA, NCCL", f"CUDA {found['cuda']}, NCCL {found['nccl']}, driver {_driver() or 'unknown'}"
        )
    elif found["cuda"]:
        driver = _driver() or "none"
        text = (
            f"torch is built for CUDA {found['cuda']} and sees no GPU: a run would use the CPU; driver "
            f"{driver}"
        )
        do = "compare the driver's CUDA version (nvidia-smi) with torch's, and look at CUDA_VISIBLE_DEVICES"
        yield Finding("note", "GPU", text, do if _driver() else "")
    else:
        yield Finding("note", "GPU", "torch is built for the CPU: runs use gloo and all available cores")


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None


def _megatron() -> Iterator[Finding]:
    version = version_of("megatron-core")
    install = _install("megatron-core")
    if version is None:
        yield Finding("FAIL", "megatron-core", "not installed", install)
        return
    seen = probe("import megatron.core, megatron.core.dist_checkpointing\nfound = {}")
    if not seen.error:
        yield _judged("megatron-core", version, install)
    elif "transformer_engine" in seen.traceback:
        text = f"{version}, but its import fails in a partly installed Transformer Engine: {seen.error}"
        yield Finding("FAIL", "megatron-core", text, _REPAIR_TE)
    else:
        yield Finding("FAIL", "megatron-core", f"{version}, but its import fails: {seen.error}", install)


_REPAIR_TE = (
    "pip install --no-build-isolation 'transformer-engine[pytorch]', or remove it: "
    "pip uninstall transformer-engine transformer-engine-torch transformer-engine-cu12 "
    "transformer-engine-cu13"
)


def _transformer_engine() -> Iterator[Finding]:
    if importlib.util.find_spec("transformer_engine") is None:
        text = (
            "not installed: on GPUs mkd's own attention is slower and needs more memory; CPUs do not need it"
        )
        yield Finding("note", "Transformer Engine", text)
        return
    version = version_of("transformer-engine") or "unknown version"
    seen = probe("import transformer_engine.pytorch\nfound = {}")
    if seen.error:
        parts = {name: version_of(name) for name in _TE_PARTS}
        present = ", ".join(f"{name} {found}" for name, found in parts.items() if found) or "no distribution"
        yield Finding(
            "FAIL", "Transformer Engine", f"installed in part ({present}): {seen.error}", _REPAIR_TE
        )
        return
    megatron = version_of("megatron-core") or "0"
    tested = transformer_engine_range(megatron)
    if tested and tested.holds(version):
        yield Finding("ok", "Transformer Engine", version)
    else:
        text = f"{version}: tested with megatron-core {megatron} is {tested or 'none so far'}"
        if is_too_old_for_fp8(version_of("transformer-engine")):
            text += f"; --teacher-precision fp8 needs {FP8_TRANSFORMER_ENGINE} or newer"
        do = f"pip install --no-build-isolation 'transformer-engine[pytorch]{tested}'" if tested else ""
        yield Finding("note", "Transformer Engine", text, do)


_TE_PARTS = (
    "transformer-engine",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
    "transformer-engine-torch",
)


def _apex() -> Iterator[Finding]:
    spec = importlib.util.find_spec("apex")
    if spec is None:
        yield Finding("note", "apex", "not installed: not needed with Transformer Engine")
    elif any((Path(folder) / "optimizers").is_dir() for folder in spec.submodule_search_locations or ()):
        seen = probe("import apex.optimizers\nfound = {}")
        yield Finding("note" if seen.error else "ok", "apex", seen.error or "NVIDIA's")
    else:
        text = "this is an unrelated package of the same name from PyPI; NVIDIA's apex is built from source"
        yield Finding("note", "apex", text, "pip uninstall apex")


def _triton() -> Iterator[Finding]:
    version = version_of("triton") or version_of("pytorch-triton")
    text = (
        version
        or "not installed: the loss on GPUs needs it (it comes with torch for CUDA); CPUs do not need it"
    )
    yield Finding("ok" if version else "note", "triton", text)


_PACKAGES_PROBE = """
import importlib
found = {{}}
for name in {names}:
    try:
        importlib.import_module(name)
    except BaseException as error:
        found[name] = repr(error)
"""
_NEEDED = {
    "numpy": "",
    "yaml": "",
    "transformers": "",
    "safetensors": "",
    "huggingface_hub": "",
    "sentencepiece": "",
    "google.protobuf": "transformers needs it to read SentencePiece models",
}
_EXTRAS = {  # distribution -> what is missing without it; an extra of setup.py has it
    "pyarrow": "no .parquet and .arrow data",
    "zstandard": "no .jsonl.zst data",
    "pillow": "no images of vision-language models",
    "fla-core": "gated delta nets (Qwen3.5, Qwen3-Next) are slower on GPUs",
    "numba": "--xtoken-alignment dp is slower",
    "tiktoken": "no .tiktoken files as tokenizers",
    **{logger.package: f"no {logger.flag()}" for logger in LOGGERS.values()},
    "matplotlib": "no `mkd report --png`",
}
_DISTRIBUTIONS = {"yaml": "PyYAML", "google.protobuf": "protobuf"}  # import name -> distribution


def _packages() -> Iterator[Finding]:
    """Import all needed packages in one process; check only the versions of the others."""
    yield from _needed_packages()
    for name, cost in _EXTRAS.items():
        text = (version := version_of(name)) or f"not installed: {cost} (pip install {name})"
        yield Finding("ok" if version else "note", name, text)


def _needed_packages() -> Iterator[Finding]:
    seen = probe(_PACKAGES_PROBE.format(names=list(_NEEDED)))
    if seen.error:
        failed = f"the imports of {', '.join(_NEEDED)} fail: {seen.error}"
        yield Finding("FAIL", "packages", failed, "install mkd again, from its wheel or its checkout")
        return
    for name, error in seen.found.items():
        package, why = _DISTRIBUTIONS.get(name, name), _NEEDED[name]
        yield Finding("FAIL", package, error[:200] + (f"; {why}" if why else ""), _install(package))
    fine = [name for name in _NEEDED if name not in seen.found]
    for name in sorted(TESTED.keys() & set(fine)):
        if (judged := _judged(name, version_of(name) or "0", _install(name))).level != "ok":
            yield judged
    named = (_DISTRIBUTIONS.get(name, name) for name in fine)
    yield Finding("ok", "packages", ", ".join(f"{one} {version_of(one.replace('_', '-'))}" for one in named))


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("ok", "machine", f"{cores} cores for this process, {memory / GIB:.1f} GiB memory")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < OPEN_FILES:
        yield Finding(
            "note",
            "open files",
            f"at most {limit}; loader processes share tensors through open files",
            "ulimit -n 65536",
        )
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free / GIB
        short = free < SHARED_MEMORY_GIB
        do = "start the container with --ipc=host or --shm-size=8g, or use --num-workers 0" if short else ""
        yield Finding("note" if short else "ok", "shared memory", f"{free:.2f} GiB free in {shared}", do)


def _environment() -> Iterator[Finding]:
    """List variables that change a run, except those that may hold a secret."""
    chosen = sorted(name for name in os.environ if ENVIRONMENT.fullmatch(name) and not SECRET.search(name))
    yield Finding(
        "ok",
        "environment",
        ", ".join(f"{name}={os.environ[name]}" for name in chosen) or "no variable that affects a run",
    )


def _disk(folder: Path) -> list[Finding]:
    """Check that the run can write to `folder`, or to its nearest existing parent."""
    folders = folder.absolute(), *folder.absolute().parents
    existing = next((path for path in folders if path.exists()), Path("/"))
    elsewhere = "choose another folder with --save and --log-dir"
    if not existing.is_dir():
        text = f"{folder} cannot be a folder: {existing} is a file"
        return [Finding("FAIL", "disk", text, elsewhere)]
    try:
        free = shutil.disk_usage(existing).free / GIB
    except OSError as error:
        return [Finding("FAIL", "disk", f"{existing} cannot be examined: {error}", elsewhere)]
    text = f"{free:.1f} GiB free for {folder}"
    if not os.access(existing, os.W_OK):
        return [Finding("FAIL", "disk", f"{existing} cannot be written to", elsewhere)]
    if not free:
        return [Finding("FAIL", "disk", f"the disk of {folder} is full", f"make room, or {elsewhere}")]
    if free < FREE_DISK_GIB:
        do = "a checkpoint takes 14 bytes per student parameter in bf16 runs, 12 in fp32"
        return [Finding("note", "disk", text, do)]
    return [Finding("ok", "disk", text)]
