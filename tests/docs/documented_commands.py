"""The commands that README and docs show, and who runs each of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs/questions").glob("*.md"))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
SHELLS = ("", "bash", "sh", "console")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PROGRAM = re.compile(
    r"(mkd|torchrun|python3?|make|pip3?|lm_eval|sbatch|srun|source|docker|git|launch/\S+|\S+\.sh)\b"
)
FOLDER = re.compile(r"[\w./-]*\bbin/(?=[a-z])")  # of an environment
GPU, NETWORK, INSTALLS, SLURM = "a GPU", "a network", "a fresh environment", "Slurm"
NEEDS = (GPU, NETWORK, INSTALLS, SLURM)

RUN_BY = {  # start of a command -> the test that runs it, or what it needs
    "mkd --help": "tests/commands/test_command_line.py",
    "mkd COMMAND --help": "tests/commands/test_command_line.py",
    "make install": "tests/test_install.py",  # the same packages, from wheels
    "make SYSTEM_SITE=1 install": "tests/test_install.py",
    "make test": "tests/test_workflows.py",  # targets exist; CI runs them
    "make check": "tests/test_workflows.py",
    "make docs": "tests/docs/test_site.py",
    "make quickstart": NETWORK,
    "make invariance": "tests/train/test_invariance.py",
    "make faults": "tests/test_faults.py",
    "make help": "tests/test_workflows.py",
    "make clean": "tests/test_workflows.py",
    "pip install": NETWORK,
    "pip uninstall": INSTALLS,
    "python -m pip": NETWORK,
    "lm_eval": NETWORK,
    "python3.12 -m venv": INSTALLS,
    "source": INSTALLS,
    "docker": GPU,
    "git clone": NETWORK,
    "git worktree": NETWORK,  # a commit that a shallow clone does not have
    "python -m mkd.lm_eval": NETWORK,  # a task of the harness; tests/evaluation/test_harness_model.py scores
    "sbatch": SLURM,
    "DIR/launch/local.sh": "tests/test_launch.py",
    "python launch/submit.py": "tests/test_submit.py",
    "python pretrain_kd.py": "tests/run/test_main.py",
    "torchrun --nproc-per-node N pretrain_kd.py": "tests/test_install.py",
    "python tools/make_docs.py": "tests/tools/test_docs.py",
    "python tools/check_types.py": "tests/tools/test_check_types.py",
    "python tools/fetch_smollm2.py": NETWORK,
    "python tools/benchmark": GPU,  # their arithmetic is tested by tests/tools/benchmarks
    "torchrun --nproc-per-node N tools/benchmark.py": GPU,
    "torchrun --nproc-per-node N -m tests.": GPU,
    "python -m tests.": GPU,
    "python -m tests.checkpoint.save_cost": "tests/checkpoint/test_save_cost.py",
    "python -m tests.fixed_runs": "tests/test_fixed_runs.py",
    "python -m vllm": GPU,
    "python -m pytest": "tests/docs/test_extending.py",
    "python -c": "tests/docs/test_extending.py",
    "python -": "tests/docs/test_extending.py",
    "python tools/convert_hf_to_mcore.py": "tests/docs/test_extending.py",
    "python tools/check_parity.py": "tests/docs/test_extending.py",
    "python tools/convert_mcore_to_hf.py": "tests/docs/test_extending.py",
}
"""`mkd COMMAND` needs no entry: the tests that call its `main` are found. `N` stands for a number."""
STUDIES = "python tools/benchmarks/"  # made once: docs/performance.md names the commit that has them
FREE_WORDS = {"quickstart": NETWORK, "launch-scripts": "tests/commands/test_launch_scripts.py"}


@dataclass(frozen=True)
class Shown:
    """One command that a page shows."""

    page: str
    text: str

    @property
    def command(self) -> str | None:
        """The command of mkd, with torchrun in front of it or not; None for another program."""
        found = re.match(r"(?:torchrun .*?-m )?mkd ([a-z][a-z-]*)", self.text)
        if found is None and re.search(r"\bpretrain_kd\.py\b", self.text):
            return "train"
        return found[1] if found else None

    @property
    def flags(self) -> list[str]:
        """Flags that are mkd's: of what stands behind torchrun's own."""
        own = re.split(r"(?:-m mkd|\bpretrain_kd\.py|^mkd)\s", self.text, maxsplit=1)[-1]
        return re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", own.split(" | ")[0])


def shown_commands() -> Iterator[Shown]:
    """Yield every command: in fenced or indented blocks, and with its arguments in sentences and tables."""
    for page in PAGES:
        yield from _in_sentences(page)
        text = page.read_text(encoding="utf-8")
        blocks = [block for language, block in FENCE.findall(text) if language in SHELLS]
        rest = FENCE.sub("", text)
        blocks += re.findall(r"(?:^ {4}\S.*\n?)+", rest, re.M)
        for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
            line = re.split(r"\s+#", line.strip().removeprefix("$ "))[0].strip()
            line = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line)
            for part in (FOLDER.sub("", part, count=1) for part in line.split(" && ")):
                if PROGRAM.match(part) and not re.match(r"\w+(?:: |\.$|,)", part):
                    yield Shown(page.relative_to(ROOT).as_posix(), re.sub(r"\s+", " ", part))


def _in_sentences(page: Path) -> Iterator[Shown]:
    """Yield the commands of inline code; a name alone, such as `mkd train`, stands for the command."""
    for code in CODE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        text = re.sub(r"^(?:[A-Z_]+=\S+ )+", "", re.sub(r"\s+", " ", code))
        if PROGRAM.match(text) and text.startswith(("mkd ", "make ", "pip ", "git ", "python ", "lm_eval ")):
            yield Shown(page.relative_to(ROOT).as_posix(), text)


@cache
def _tests() -> dict[str, str]:
    files = [*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tests").rglob("*command*.py")]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


@cache
def tests_of(command: str) -> list[str]:
    """Return the test files that call a command of mkd: by `mkd COMMAND`, or its module's `main`."""
    module = command.replace("-", "_")
    calls = (
        rf"mkd\.commands\.{module} import [^\n]*\bmain\b|mkd\.commands import [^\n]*\b{module}\b|"
        rf"\[\s*\"{command}\"|\"mkd\",\s*\"{command}\"|\"{command} -|\"mkd\.commands\.{module}\""
    )
    return [file for file, text in _tests().items() if re.search(calls, text)]


def runs(shown: Shown) -> str | None:
    """Return the test that runs a command, or what it needs; None: nobody."""
    text = re.sub(r"(--nproc-per-node) \d+", r"\1 N", shown.text)
    if shown.command is not None:
        if shown.command in FREE_WORDS:
            return FREE_WORDS[shown.command]
        return next(iter(tests_of(shown.command)), None)
    known = [start for start in RUN_BY if text.startswith(start)]
    return RUN_BY[max(known, key=len)] if known else None
