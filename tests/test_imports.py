"""The house stands: imports point down, the public names are these, and `import stepwell` is light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepwell
from stepwell import errors

ROOT = Path(__file__).resolve().parent.parent
FLOORS = {"errors": 0, "codecs": 1, "stores": 1, "pipeline": 2}
FACADE = 3
TREES = {
    "stepwell.codecs": ROOT / "codecs",
    "stepwell.stores": ROOT / "stores",
    "stepwell.pipeline": ROOT / "pipeline",
    "stepwell": ROOT / "src" / "stepwell",
}
LINES_MAX = 600
NEVER_IMPORTED = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "pipeline", "stores"}
PUBLIC = [
    "AsyncHandle",
    "Config",
    "Handle",
    "Metrics",
    "Restored",
    "SaveRecord",
    "SyncWell",
    "Well",
    "load_config",
    "open",
    "open_sync",
    "view",
    "ConfigError",
    "DeadlineError",
    "FormatError",
    "IntegrityError",
    "LockedError",
    "MissingObjectError",
    "NoSpaceError",
    "NotCommittedError",
    "ObjectExistsError",
    "PermanentStoreError",
    "StateMismatchError",
    "StepwellError",
    "StoreError",
    "TransientStoreError",
    "UnsupportedValueError",
    "UsageError",
]
"""Names people may use; everything else may change. A new one is justified in its commit."""


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the import name and the file of every module of the package, each once."""
    for prefix, tree in TREES.items():
        for path in sorted(tree.rglob("*.py")):
            if prefix == "stepwell" and path.relative_to(tree).parts[0] in ("codecs", "stores", "pipeline"):
                continue
            parts = path.relative_to(tree).with_suffix("").parts
            name = ".".join((prefix, *(part for part in parts if part != "__init__")))
            yield name, path


MODULES = dict(modules())


def room(name: str) -> str:
    """Return the second part of a module name, where the floor is decided."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor(name: str) -> int:
    """Return the floor a module stands on."""
    return FLOORS.get(room(name), FACADE)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and full name of everything a module imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            module = node.module or ""
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else module


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    path = MODULES[name]
    for line, target in imported(ast.parse(path.read_text(), str(path))):
        top = target.split(".")[0]
        assert top not in NEVER_IMPORTED, f"{path}:{line}: imports {target}"
        if top != "stepwell":
            continue
        here, there = floor(name), floor(target)
        assert there <= here, f"{path}:{line}: floor {here} imports {target} of floor {there}"
        if here == 1 and there == 1:
            assert room(name) == room(target), f"{path}:{line}: codecs and stores never import each other"


@pytest.mark.parametrize("name", [name for name in MODULES if room(name) == "codecs"])
def test_codecs_are_pure(name: str) -> None:
    targets = {target.split(".")[0] for _, target in imported(ast.parse(MODULES[name].read_text()))}
    assert not targets & {"torch", "socket", "aiofiles", "fsspec", "tensorstore"}


@pytest.mark.parametrize("name", MODULES)
def test_files_stay_readable(name: str) -> None:
    text = MODULES[name].read_text()
    assert len(text.splitlines()) <= LINES_MAX
    # The line below is the first statement of a module that has any.
    if len(ast.parse(text).body) > 1:
        assert "from __future__ import annotations" in text


@pytest.mark.parametrize("room_name", ["codecs", "stores", "pipeline"])
def test_the_rooms_are_real_directories_at_the_root_and_links_in_the_package(room_name: str) -> None:
    link = ROOT / "src" / "stepwell" / room_name
    assert (ROOT / room_name).is_dir()
    assert not (ROOT / room_name).is_symlink()
    assert link.is_symlink()
    assert link.resolve() == ROOT / room_name


def run_fresh(code: str) -> str:
    """Run code in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_these() -> None:
    assert sorted(stepwell.__all__) == sorted(PUBLIC) == dir(stepwell)
    with pytest.raises(AttributeError, match="no attribute 'sav'"):
        stepwell.sav  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(stepwell, name)
    assert value.__doc__


def test_every_error_class_is_public() -> None:
    assert set(errors.__all__) <= set(PUBLIC)


def test_import_stepwell_is_light() -> None:
    heavy = ("torch", "zarr", "pydantic", "numpy", "tensorstore", "yaml", "rich", "typer")
    code = f"import sys, stepwell, stepwell.errors; print(sorted(set(sys.modules) & set({heavy!r})))"
    assert run_fresh(code).strip() == "[]"


def test_import_starts_nothing() -> None:
    code = (
        "import threading, multiprocessing, stepwell.config, stepwell.cli\n"
        "print(threading.active_count(), len(multiprocessing.active_children()))"
    )
    assert run_fresh(code).split() == ["1", "0"]


def test_no_module_shadows_a_public_name() -> None:
    """A module ``stepwell.view`` would stand where the function belongs as soon as anybody imports it."""
    modules = {name.removeprefix("stepwell.") for name in MODULES}
    assert not modules & set(PUBLIC)
