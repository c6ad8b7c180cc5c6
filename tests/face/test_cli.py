"""The command line over a small run written by hand: what it tells, and with which exit code."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from stepwell.cli import app, demo, output
from stepwell.cli.output import bytes_text, ranges_text
from stepwell.config import load_config
from stepwell.pipeline.base import Chunk, Kind
from stepwell.pipeline.commit import Commit
from stepwell.pipeline.keys import Series, pack_key
from stepwell.pipeline.layout import Layout, TensorSpec
from stepwell.pipeline.manifest import Manifest, ObjectEntry
from stepwell.pipeline.pack import PackIdentity, PackKind, pack_parts
from stepwell.pipeline.plan import gradient_layout, plan_layout
from stepwell.pipeline.records import IncarnationRecord, Link, RunRecord
from stepwell.pipeline.replicate import Replicate
from stepwell.pipeline.tier import Tier
from stepwell.pipeline.zarr_base import GroupPlan, export_base
from stepwell.stores.arena import Arena
from stepwell.stores.base import ObjectStore
from stepwell.stores.file import FileStore
from stepwell.stores.memory import MemoryStore

RUN = "0123456789abcdef"
FIRST, SECOND = "000001-00000000000000aa", "000002-00000000000000bb"
WEIGHTS = (
    TensorSpec("model/weight", (8, 6), "float32", Kind.WEIGHT, "optim:0"),
    TensorSpec("model/[b]", (6,), "float32", Kind.WEIGHT, "optim:0"),
)
STATE = plan_layout(WEIGHTS)
GRADIENT = gradient_layout(WEIGHTS)


async def write_step(tier: Tier, incarnation: str, step: int, previous: Link | None) -> None:
    """Commit one gradient differential with a chunk of ones."""
    buffer = np.ones(GRADIENT.size_bytes, np.uint8)
    chunks = [
        Chunk(
            step, f"update/0/{part}", Kind.GRADIENT, 0, part, GRADIENT.hash, chunk.dtype, chunk.size_bytes,
            buffer[chunk.offset_bytes : chunk.offset_bytes + chunk.size_bytes],
        )
        for part, chunk in enumerate(GRADIENT.chunks)
    ]  # fmt: skip
    identity = PackIdentity(PackKind.GRADIENT, RUN, incarnation, step)
    packed = pack_parts(identity, {"tree": {"lr": 0.5}}, chunks)
    key = pack_key(Series.STEP, incarnation, step, 0)
    await tier.store.put(key, packed.parts)
    entry = ObjectEntry(key, packed.size_bytes, packed.xxh3)
    await commit_save(tier, incarnation, step, "gradient", previous, (entry,), GRADIENT)


async def write_base(tier: Tier, incarnation: str, step: int) -> None:
    """Commit one base of zeros."""
    identity = PackIdentity(PackKind.BASE, RUN, incarnation, step)
    run = memoryview(np.zeros(STATE.size_bytes, np.uint8))
    objects = list(export_base(GroupPlan(STATE), identity, {"tree": {}}, run))
    await tier.store.put_batch([item for item, _ in objects])
    await commit_save(tier, incarnation, step, "base", None, tuple(entry for _, entry in objects), STATE)


async def commit_save(
    tier: Tier,
    incarnation: str,
    step: int,
    kind: str,
    previous: Link | None,
    objects: tuple[ObjectEntry, ...],
    layout: Layout,
) -> None:
    commit = Commit(Replicate())
    await commit.save_layout(tier, layout)
    manifest = Manifest(RUN, incarnation, step, 0, 1, kind, previous, kind == "base", objects, (layout.hash,))
    await commit.save(tier, manifest)


async def write_run(store: ObjectStore) -> None:
    """Two lives: a base at 0 and steps 1 to 3; then, from step 2, steps 3 and 4."""
    tier, commit = Tier("written", store), Commit(Replicate())
    await commit.save_run(tier, RunRecord(RUN, "night", 1.0e9))
    await commit.save_incarnation(tier, IncarnationRecord(RUN, FIRST, None, created_unix_s=1.0e9))
    await write_base(tier, FIRST, 0)
    for step in (1, 2, 3):
        await write_step(tier, FIRST, step, Link(FIRST, step - 1))
    await commit.save_incarnation(tier, IncarnationRecord(RUN, SECOND, Link(FIRST, 2)))
    await write_step(tier, SECOND, 3, Link(FIRST, 2))
    await write_step(tier, SECOND, 4, Link(SECOND, 3))
    # An orderly end: from here on a save without its evidence cannot come from a crash.
    await commit.end_incarnation(tier, IncarnationRecord(RUN, SECOND, Link(FIRST, 2), ended=Link(SECOND, 4)))


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    asyncio.run(write_run(FileStore(directory)))
    return directory


@pytest.fixture
def arena(run_directory: Path) -> Iterator[Path]:
    """The arena that the run's own configuration would use, with its newest step."""
    config = load_config(run_directory, {"run": "night"})
    assert config.memory is not None
    place = config.arena_directory(config.memory)
    with Arena.open(place, run=RUN) as opened:
        asyncio.run(write_step(Tier("memory", MemoryStore(opened)), SECOND, 4, Link(SECOND, 3)))
    yield place
    with Arena.open(place, run=RUN) as opened:
        opened.remove()


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, object]]:
    """Run a command with --json; return its exit code and its one object."""
    code = app.run([*arguments, "--json"])
    (line,) = capsys.readouterr().out.splitlines()
    return code, cast("dict[str, object]", json.loads(line))


def files_of(directory: Path) -> dict[str, tuple[int, int]]:
    """Everything in a directory, with size and time of change."""
    found = {}
    for path in directory.rglob("*"):
        info = path.lstat()
        found[str(path)] = (info.st_size, info.st_mtime_ns)
    return found


def test_ls_names_lives_steps_and_bases(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = told(capsys, "ls", str(run_directory))
    assert code == 0
    assert (document["run"], document["name"]) == (RUN, "night")
    assert document["newest"] == {"incarnation": SECOND, "step": 4, "tiers": ["directory"]}
    first, second = cast("list[dict[str, dict[str, dict[str, object]]]]", document["incarnations"])
    assert first["tiers"]["directory"]["steps"] == [1, 2, 3]
    assert first["tiers"]["directory"]["bases"] == [0]
    assert second["parent"] == {"incarnation": FIRST, "step": 2}
    assert second["tiers"]["directory"]["steps"] == [3, 4]
    written = sum(
        path.stat().st_size for path in (run_directory / FIRST / "step").rglob("*") if path.is_file()
    )
    assert first["tiers"]["directory"]["step_bytes"] == written


def test_ls_for_people(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["ls", str(run_directory)]) == 0
    out = capsys.readouterr().out
    assert "run night" in out
    assert "1-3" in out
    assert f"newest: step 4 of {SECOND}" in out


def test_ls_reads_the_memory_tier_of_a_run_by_its_directory_alone(
    run_directory: Path, arena: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(arena)
    _, document = told(capsys, "ls", str(run_directory))
    newest = cast("dict[str, object]", document["newest"])
    assert newest["tiers"] == ["directory", "memory"]
    _, without = told(capsys, "ls", str(run_directory), "--no-memory")
    assert cast("dict[str, object]", without["newest"])["tiers"] == ["directory"]
    assert files_of(arena) == before


def test_memory_that_is_asked_for_must_be_there(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = told(capsys, "verify", str(run_directory), "--memory")
    assert code == 3
    assert "there is no arena" in str(document["error"])


def test_show_names_tensors_bytes_and_encodings(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, document = told(capsys, "show", str(run_directory))
    assert code == 0
    assert (document["step"], document["kind"], document["previous"]) == (4, "gradient", [SECOND, 3])
    weight, bias = cast("list[dict[str, object]]", document["tensors"])
    assert (weight["name"], weight["shape"], weight["dtype"], weight["kind"]) == (
        "model/weight", [8, 6], "float32", "gradient",
    )  # fmt: skip
    assert (weight["size_bytes"], bias["size_bytes"]) == (192, 24)
    assert weight["encodings"] == []
    assert document["header"] == {"tree": {"lr": 0.5}}


def test_show_a_base(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, document = told(capsys, "show", str(run_directory), "0")
    assert code == 0
    assert (document["kind"], document["self_contained"]) == ("base", True)
    weight = cast("list[dict[str, object]]", document["tensors"])[0]
    assert (weight["size_bytes"], weight["stored_bytes"]) == (192, 196), "the crc32c takes four"


def test_show_for_people_takes_names_as_they_are(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.run(["show", str(run_directory), "3", "--incarnation", "000001", "--tree"]) == 0
    out = capsys.readouterr().out
    assert "model/[b]" in out
    assert f"step 3 of {FIRST}" in out
    assert '"lr": 0.5' in out


def test_show_the_configuration(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["show", str(run_directory), "--config"]) == 0
    assert "capture: gradient" in capsys.readouterr().out
    code, document = told(capsys, "show", str(run_directory), "--config")
    assert (code, document["save_every"]) == (0, 1)


@pytest.mark.parametrize("arguments", [["9"], ["3", "--base"], ["4", "--incarnation", "000001"]])
def test_show_what_is_not_there(
    run_directory: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    code, document = told(capsys, "show", str(run_directory), *arguments)
    assert code == 3
    assert document["kind"] == "NotCommittedError"
    assert "is not committed" in str(document["error"])


def test_verify_a_whole_run_and_write_nothing(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(run_directory)
    code, document = told(capsys, "verify", str(run_directory))
    assert (code, document["ok"], document["faults"]) == (0, True, [])
    for command in ("ls", "show"):
        told(capsys, command, str(run_directory))
    assert files_of(run_directory) == before


def objects_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_verify_names_every_damaged_object(
    run_directory: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    for path in objects_of(run_directory):
        data = path.read_bytes()
        if damage == "flip":
            path.write_bytes(bytes([*data[:20], data[20] ^ 1, *data[21:]]))
        elif damage == "cut":
            path.write_bytes(data[:-1])
        else:
            path.unlink()
        code, document = told(capsys, "verify", str(run_directory))
        key = path.relative_to(run_directory).as_posix()
        assert code == 1, key
        named = [str(fault["key"]) for fault in cast("list[dict[str, object]]", document["faults"])]
        assert any(name == key for name in named), (key, named)
        path.write_bytes(data)
    assert app.run(["verify", str(run_directory)]) == 0


def test_verify_the_memory_tier(run_directory: Path, arena: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, document = told(capsys, "verify", str(run_directory), "--memory")
    tiers = cast("list[dict[str, str]]", document["tiers"])
    assert [tier["name"] for tier in tiers] == ["memory", "directory"]


def test_verify_for_people_names_the_object(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    victim = run_directory / pack_key(Series.STEP, SECOND, 4, 0)
    victim.write_bytes(victim.read_bytes()[:-70])
    assert app.run(["verify", str(run_directory)]) == 1
    assert pack_key(Series.STEP, SECOND, 4, 0) in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, document = told(capsys, command, str(tmp_path / "absent"))
    assert code == 3
    assert "no run of stepwell" in str(document["error"])
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_wrong_configuration_is_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("tires: []\n")
    code, document = told(capsys, command, str(path))
    assert code == 2
    assert 'did you mean "tiers"?' in str(document["error"])


def test_a_configuration_file_names_the_run(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("tiers: [{kind: directory, path: run, name: disk}]\n")
    _, document = told(capsys, "ls", str(tmp_path / "run.yaml"))
    assert cast("dict[str, object]", document["newest"])["tiers"] == ["disk"]


def test_unknown_commands_and_options_are_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["lss"]) == 2
    assert app.run(["ls"]) == 2
    assert app.run(["demo", "--kills", "-1"]) == 2
    assert "Error" in capsys.readouterr().err


def test_help_states_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["ls", "--help"], ["verify", "--help"], ["demo", "--help"]):
        assert app.run(arguments) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "3 nothing there" in out


def test_the_console_script_and_the_module_are_the_same(run_directory: Path) -> None:
    arguments = ["ls", str(run_directory), "--json"]
    script = Path(sys.executable).parent / "stepwell"
    outs = [
        subprocess.run([*start, *arguments], capture_output=True, text=True, check=True, timeout=60).stdout
        for start in ([str(script)], [sys.executable, "-m", "stepwell"])
    ]
    assert outs[0] == outs[1]
    assert json.loads(outs[0])["run"] == RUN


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser reads everything")
def test_a_directory_that_may_not_be_read(run_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_directory.chmod(0)
    try:
        assert app.run(["ls", str(run_directory)]) == 2
    finally:
        run_directory.chmod(0o700)


def test_the_demo_refuses_a_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    assert app.run(["demo", "--dir", str(tmp_path)]) == 2
    assert (tmp_path / "mine").read_text() == "x"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("quiet", "after_s", "shown"), [(False, 0.0, True), (False, 9.0, False), (True, 0.0, False)]
)
def test_progress_shows_only_on_a_terminal_and_only_when_it_lasts(
    monkeypatch: pytest.MonkeyPatch, quiet: bool, after_s: float, shown: bool
) -> None:
    monkeypatch.setattr(output, "QUIET_S", after_s)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with output.Meter("verifying", quiet=quiet) as meter:
        meter(1, 2)
    assert isinstance(sys.stderr, Terminal)
    assert ("verifying" in sys.stderr.getvalue()) is shown


def test_the_demo_draws_bars_on_a_terminal_and_speaks_in_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stderr, quiet in ((Terminal(), False), (io.StringIO(), False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stderr)
        screen = demo.Screen(quiet=quiet)
        screen.phase("training [quickly]", 4)
        screen.step(1, 2.5)
        screen.note("killed [hard]")
        screen.close()
        told = stderr.getvalue()
        assert ("killed [hard]" in told) is not quiet
        assert ("2/4" in told) is (isinstance(stderr, Terminal) and not quiet)


def test_sizes_and_ranges_for_people() -> None:
    assert [bytes_text(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 TiB",
    ]  # fmt: skip
    assert ranges_text([]) == "none"
    assert ranges_text([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
