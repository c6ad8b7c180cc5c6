"""Faults that people reported of neighbouring projects, tried here: what is read is never run.

Each test is named for its symptom. ``docs/reports.md`` lists them all, also those that other files hold.
"""

from __future__ import annotations

import ast
import pickle
import shutil
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
from failure_rig import Run
from report_rig import read, told

import stepwell
from stepwell.cli import app
from stepwell.errors import StepwellError

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture
def run(memory_directory: Path) -> Run:
    return Run(memory_directory)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.target,))


def test_checkpoint_metadata_was_read_with_pickle(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """torch 189308: a pickle in place of each kind of object in turn, read by everything that reads."""
    run.train(range(2), base_at=[1])
    shutil.rmtree(run.memory)
    proof = run.root / "exploded"
    bomb = pickle.dumps(Bomb(proof))
    kinds: dict[str, Path] = {}
    for path in run.objects("directory", "*"):
        if path.is_file() and "lock" not in path.name:
            series = next((part for part in path.parts if part in ("step", "base", "layouts")), "")
            named = path.suffix == ".json" and path.parent.name not in ("layouts", "incarnations")
            kinds[f"{series}/{path.parent.name if not named else path.name}"] = path
    assert len(kinds) >= 9, kinds
    for path in kinds.values():
        original = path.read_bytes()
        path.write_bytes(bomb)
        copy = run.copied("copy", memory=False)
        path.write_bytes(original)
        code, report = told(capsys, "verify", str(copy.directory))
        assert code == 1, (path, report)
        app.run(["ls" if path.parent == run.directory else "show", str(copy.directory)])
        capsys.readouterr()
        with suppress(StepwellError), stepwell.view(str(copy.directory)) as state:
            read(state, "model/0.weight/c/0/0")
        with warnings.catch_warnings(), suppress(StepwellError):
            warnings.simplefilter("ignore")
            copy.restored()
        assert not proof.exists(), path
        shutil.rmtree(copy.root)


def test_something_in_the_package_could_unpickle(repository: Path) -> None:
    """torch 189308: a gate on names; what reads a checkpoint reads JSON and bytes."""
    modules = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    calls = {"eval", "exec", "compile", "__import__", "torch.load", "yaml.load", "yaml.unsafe_load"}
    for room in ("src/stepwell", "codecs", "stores", "pipeline"):
        for path in sorted((repository / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                where = f"{path}:{getattr(node, 'lineno', 0)}"
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                    assert not {name.partition(".")[0] for name in names} & modules, where
                    assert not (names[0] == "torch" and "load" in names), where
                elif isinstance(node, ast.keyword):
                    # numpy.load refuses pickles as long as nobody asks for them.
                    assert node.arg not in ("allow_pickle", "weights_only"), where
                elif isinstance(node, ast.Call):
                    assert ast.unparse(node.func) not in calls, where
