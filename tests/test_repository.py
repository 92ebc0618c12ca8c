"""Check the house rules that no linter knows: sizes, ASCII, English, torch-free config, mirrored tests."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import Counter
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from subprocess import run  # not the module: `make check` includes this file

import grimp

from mkd import errors
from tests.headless import headless_texts

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MOST_CONTEXT_PARALLEL = 23
TORCH_FREE_PACKAGES = ("config", "plan", "families")
HEAVY_MODULES = ("torch", "megatron", "transformers")
KNOWN_TWINS = {  # names of two product files: may only shrink
    "batch.py",
    "folders.py",
    "load.py",
    "models.py",
    "records.py",
    "scores.py",
}
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|root|home/\w+|tmp/venv)/")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".yaml", ".yml", ".sh", ".sbatch", ""}


@cache
def repository_files() -> list[Path]:
    """Return the files of a clean clone: no build products or runs; of hidden files only .ci and .github."""
    skipped = re.compile(
        r"(^\.(?!(ci|github|pre-commit-config\.yaml)$))|^(runs|build|dist|__pycache__)$|\.egg-info$"
    )
    found = []
    for folder, below, files in os.walk(ROOT):
        below[:] = [part for part in below if not skipped.search(part)]
        found += [Path(folder, file) for file in files if not skipped.search(file)]
    return sorted(found)


def python_files() -> list[Path]:
    files = [path for path in repository_files() if path.suffix == ".py"]
    assert ROOT / "setup.py" in files and Path(__file__).resolve() in files
    return files


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def survey() -> tuple[list[str], list[str]]:
    """Return (functions that are too long, errors without a code), read in one pass over all files."""
    classes = {
        key for key, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)
    }
    classes = classes - {"ErrorList"} | {"BadRecord"}
    too_long, without_code = [], []
    for path in python_files():
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(f"{name(path)}:{node.lineno} {node.name}: {length} lines")
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
                has_code = "code" in [word.arg for word in node.keywords]
                without_code += [] if has_code else [f"{name(path)}:{node.lineno}"]
    return too_long, without_code


def test_files_have_at_most_400_lines():
    lengths = {name(path): len(read(path).splitlines()) for path in python_files()}
    assert not {file: length for file, length in lengths.items() if length > MAX_FILE_LINES}


def test_functions_have_at_most_60_lines():
    assert not survey()[0]


def test_code_is_ascii():
    offenders = [
        f"{name(path)}:{number}"
        for path in python_files()
        for number, line in enumerate(read(path).splitlines(), 1)
        if not line.isascii()
    ]
    assert not offenders


def test_no_path_of_one_machine():
    offenders = [
        f"{name(path)}: {match.group()}"
        for path in repository_files()
        if path.suffix in TEXT_SUFFIXES
        for match in MACHINE_PATH.finditer(read(path))
    ]
    assert not offenders


def test_texts_use_the_words_of_the_field():
    """They say continue or resume, is not a multiple, bit-identical, and default: X."""
    translated = re.compile(
        r"\b(go|goes|going) on\b|\bha(ve|s) those of\b|\bsays? it, and\b|\bwith the same bits\b|\bnot given: "
        r"|(?<!there )\b(is|are) no (multiple|number|file|folder|text|token|key|image)s?\b"
    )
    offenders = [
        f"{name(path)}: {match.group()}"
        for path in repository_files()
        if name(path).startswith(("mkd/", "launch/", "README.md")) or path.parent == ROOT / "docs"
        for match in translated.finditer(read(path))
    ]
    assert not offenders


def test_texts_start_with_a_verb_or_a_noun():
    """Docstrings and help texts never open with Of, That of, Those of, Not so, What, Whether or How."""
    assert headless_texts() == []


def test_config_and_plan_start_without_torch():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in TORCH_FREE_PACKAGES
        for path in sorted((ROOT / "mkd" / package).rglob("*.py"))
    ]
    assert modules
    modules += ["mkd.kinds.known_kinds", "mkd.kinds.loss_card"]
    code = f"import sys, {', '.join(modules)}; print([m for m in {HEAVY_MODULES} if m in sys.modules])"
    result = run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stdout + result.stderr


def test_few_files_know_context_parallelism():
    """A parallel axis costs every file that names it. Lower the number when one of them needs it no more."""
    known = re.compile(r'cp_(size|rank|group)|context_parallel|sizes\.context|\.cp\b|"cp"')
    named = [path for path in (ROOT / "mkd").rglob("*.py") if known.search(read(path))]
    assert len(named) <= MOST_CONTEXT_PARALLEL, sorted(map(name, named))


def test_imports_of_mkd_exist():
    """Also inside functions and in scripts, where a module that has moved shows only when they run."""
    missing = []
    for path in python_files():
        for node in ast.walk(ast.parse(read(path))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mkd."):
                module = ROOT / node.module.replace(".", "/")
                if not module.is_dir() and not module.with_suffix(".py").is_file():
                    missing.append(f"{name(path)}:{node.lineno}: {node.module}")
    assert not missing


def test_no_import_closes_a_circle():
    """Imports for types alone count too: modules that need each other are hard to read one by one."""
    graph = grimp.build_graph("mkd", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert imports["mkd.run.main"]
    TopologicalSorter(imports).prepare()  # CycleError names the modules of a circle


def test_one_communicator_sends_all_messages_of_a_schedule():
    """Megatron's own frees messages that are still being sent."""
    named = [path for path in (ROOT / "mkd").rglob("*.py") if "P2PCommunicator" in read(path)]
    assert [name(path) for path in named] == ["mkd/parallel/pipeline.py"]


def test_tests_mirror_the_package():
    """Check that tests/X/.../test_*.py belongs to mkd/X/... or a top-level folder; names are unique."""
    tests = [
        path.relative_to(ROOT / "tests") for path in python_files() if path.is_relative_to(ROOT / "tests")
    ]
    test_files = [path for path in tests if path.name.startswith("test_")]
    folders = {path.parent for path in test_files}
    assert not [
        str(folder) for folder in folders if not any((top / folder).is_dir() for top in (ROOT / "mkd", ROOT))
    ]
    assert not [str(path) for path in tests if path.name == "__init__.py"]
    assert not [file for file, count in Counter(path.name for path in test_files).items() if count > 1]


def test_names_of_product_files_are_unique():
    """Check that an editor's quick-open finds a file by its name alone.

    The files of mkd/commands and the scripts in tools/ are left out: they have the public names of commands.
    """
    doors = (ROOT / "mkd" / "commands", ROOT / "tools")
    names = Counter(
        path.name
        for path in python_files()
        if path.relative_to(ROOT).parts[0] in ("mkd", "tools")
        and path.parent not in doors
        and path.name != "__init__.py"
    )
    assert {file for file, count in names.items() if count > 1} <= KNOWN_TWINS


def test_every_package_is_found_by_setup():
    """Check that no folder of modules lacks __init__.py: an installed mkd would miss it."""
    folders = {path.parent for path in python_files() if path.is_relative_to(ROOT / "mkd")}
    assert not [name(folder) for folder in folders if not (folder / "__init__.py").is_file()]


def test_every_package_lists_its_files():
    """Check that the text of a package names each of its modules and folders, and none that has gone."""
    listed = re.compile(r"^ *((?:\w+(?:\.py|/)(?:, |(?= )))+) ", re.M)
    for package in sorted((ROOT / "mkd").rglob("__init__.py")):
        text, folder = read(package), package.parent
        files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
        files |= {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
        named = {one for line in listed.findall(text) for one in line.split(", ")}
        named.discard("__init__.py")
        assert named == files, f"{name(package)}: {sorted(named ^ files)}"


def test_readme_commands_exist():
    readme, makefile = read(ROOT / "README.md"), read(ROOT / "Makefile")
    targets = set(re.findall(r"^([\w-]+):", makefile, re.M))
    commands = set(re.findall(r"(?:^|`)make ([\w-]+)", readme, re.M))
    assert {"quickstart", "test"} <= commands <= targets
    scripts = re.findall(r"(?:python|torchrun[^\n]*?) ([\w/]+\.py)", readme) + re.findall(
        r"[\w/]+\.py", makefile
    )
    assert not [script for script in scripts if not (ROOT / script).is_file()]


def test_readme_map_points_at_real_places():
    places = re.findall(r"`((?:mkd|tools|configs|tests|launch|docs)/[\w/.-]*)`", read(ROOT / "README.md"))
    assert places
    assert not [place for place in places if not (ROOT / place).exists()]


def test_every_error_has_a_code():
    """Check that every error passes `code=`: the user would get a TypeError instead of the error."""
    missing = survey()[1]
    assert {place.partition(":")[0] for place in missing} == {"tests/test_error_codes.py"}  # which tries it
