"""Weights in bfloat16 beside their float32 masters: nothing is stored of them, and every bit comes back."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from derived_rig import MASTERS, capturing, masters
from derived_worker import ACKNOWLEDGED, KILLED_IN
from resume_rig import (
    TOTAL,
    Lives,
    Place,
    Training,
    assert_same,
    bits_of,
    resume,
    seed_everything,
    uninterrupted,
)

import stepwell
from stepwell.cli import app
from stepwell.errors import IntegrityError
from stepwell.pipeline.casts import DERIVED
from stepwell.pipeline.pack_format import PackRow
from stepwell.pipeline.pack_reader import PackReader

WORKER = Path(__file__).with_name("derived_worker.py")
PATIENCE_S = 60
WIDTH = 96
"""So wide that its largest tensor lies in several chunks."""


def test_killed_in_a_step_copies_and_masters_resume_bit_for_bit(memory_directory: Path) -> None:
    command = [sys.executable, "-W", "ignore", str(WORKER), str(memory_directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    for where in MASTERS:
        lives = Lives(uninterrupted(masters(where)))
        place = capturing(Place(memory_directory / where), "ordered_delta")
        seed_everything(2)
        training = masters(where)()
        with place.open(training) as well:
            restored = well.restore()
            assert restored is not None
            assert (restored.exact, restored.tier) == (True, "memory")
            assert ACKNOWLEDGED <= restored.step <= KILLED_IN, restored
            compare(training, lives, restored.step, where)
            for step in range(restored.step + 1, TOTAL):
                training.step(step)
                well.save(step)
                compare(training, lives, step, where)
        training = masters(where)()
        with place.open(training) as well:
            restored = well.restore()
            assert restored is not None
            assert (restored.step, restored.exact, restored.tier) == (TOTAL - 1, True, "directory")
            compare(training, lives, TOTAL - 1, where)
        assert any(DERIVED.encode() in pack.read_bytes() for pack in packs_of(place))


def compare(training: Training, lives: Lives, step: int, where: str) -> None:
    """Compare all but the generators, which the runs of one process share."""
    found, wanted = (
        {path: value for path, value in bits.items() if not path.startswith("rng")}
        for bits in (bits_of(training), lives.wanted[step])
    )
    assert_same(found, wanted, f"{where}, step {step}")


@pytest.mark.parametrize("delta", ["none", "ordered_delta", "predictive"])
@pytest.mark.parametrize("where", MASTERS)
def test_states_resume_bit_for_bit_under_every_difference(place: Place, where: str, delta: str) -> None:
    lives = resume(masters(where), capturing(place, delta))
    assert set(lives.kinds()) <= {"base only", "state"}


def test_gradient_capture_resumes_as_ever(place: Place) -> None:
    """Masters are replayed, copies are saved beside them."""
    assert "gradient" in resume(masters("optimizer"), place).kinds()


# What is stored.


def trained(
    place: Place, delta: str = "ordered_delta", *, width: int = WIDTH, spoiled: tuple[int, ...] = ()
) -> Place:
    """Save some steps; what is there is as a crash leaves it."""
    seed_everything(1)
    training = masters("optimizer", width, spoiled=spoiled)()
    with capturing(place, delta).open(training) as well:
        for step in range(TOTAL):
            training.step(step)
            well.save(step)
        well.wait_until_finished(PATIENCE_S)
        return place.crashed()


def rows_of(pack: Path) -> list[PackRow]:
    reader = asyncio.run(PackReader.over(pack.read_bytes(), pack.name).open())
    return list(reader.rows.values())


def packs_of(place: Place) -> list[Path]:
    return sorted(place.directory.glob("*/step/*/*.pack"))


def is_half(row: PackRow) -> bool:
    return row.dtype == "bfloat16"


@pytest.mark.parametrize("delta", ["none", "ordered_delta", "predictive"])
def test_copies_take_no_bytes(place: Place, monkeypatch: pytest.MonkeyPatch, delta: str) -> None:
    derived = packs_of(trained(Place(place.root / "with", {}), delta))
    monkeypatch.setattr("stepwell.assembly.may_derive", lambda stages: False)
    plain = packs_of(trained(Place(place.root / "without", {}), delta))
    sizes = []
    # Which saves have a pack beside a base is a matter of time: compare the same steps.
    same = {path.parent.name: path for path in plain[2:]}
    for one in derived[2:]:
        other = same.get(one.parent.name)
        if other is None:
            continue
        halves = [row for row in rows_of(one) if is_half(row)]
        assert {row.encodings[0]["id"] for row in halves} == {DERIVED}
        assert sum(row.size_bytes for row in halves) == 0
        before = sum(row.size_bytes for row in rows_of(other) if is_half(row))
        assert before > 0
        saved = other.stat().st_size - one.stat().st_size
        # The index tells of the casts instead.
        assert saved > before - 400 * len(halves)
        sizes.append((one.stat().st_size, other.stat().st_size))
    assert len(sizes) >= 2
    print(f"{delta}: packs of {sizes[-1][0]} bytes, {sizes[-1][1]} without, last of {len(sizes)}")


@pytest.mark.parametrize("spoiled", [(), (1, 2, 5)], ids=["all", "some"])
@pytest.mark.parametrize("delta", ["none", "ordered_delta", "predictive"])
def test_a_view_casts_again(place: Place, delta: str, spoiled: tuple[int, ...]) -> None:
    """Also where a copy is a cast in some saves and none in others."""
    crashed = trained(place, delta, spoiled=spoiled)
    seed_everything(1)
    training = masters("optimizer", WIDTH, spoiled=spoiled)()
    for step in range(TOTAL):
        training.step(step)
        if step < 2:
            continue  # there may be a base instead
        group = zarr.open_group(stepwell.view(crashed.config(), step), mode="r")
        for name, tensor in training.model.state_dict().items():  # type: ignore[attr-defined]
            array = group[f"model/{name}"]
            assert isinstance(array, zarr.Array)
            wanted = tensor.view(torch.uint16).numpy()
            assert np.array_equal(np.asarray(array[...]), wanted), (step, name)
            # One piece of a tensor, from a view that has read nothing before.
            alone = zarr.open_group(stepwell.view(crashed.config(), step), mode="r")[f"model/{name}"]
            assert isinstance(alone, zarr.Array)
            assert np.array_equal(np.asarray(alone[-1:]), wanted[-1:]), (step, name)


@pytest.mark.parametrize("delta", ["none", "ordered_delta", "predictive"])
def test_copies_that_are_a_cast_now_and_then_resume_bit_for_bit(place: Place, delta: str) -> None:
    resume(masters("optimizer", WIDTH, spoiled=(0, 2, 3, 5)), capturing(place, delta))


def test_verify_and_show_know_them(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    crashed = trained(place)
    assert run_cli("verify", str(crashed.directory)) == 0
    capsys.readouterr()
    assert run_cli("show", str(crashed.directory), str(TOTAL - 1), "--json") == 0
    tensors = {row["name"]: row for row in json.loads(capsys.readouterr().out)["tensors"]}
    weight = tensors["model/2.weight"]
    assert (weight["encodings"], weight["stored_bytes"]) == ([DERIVED], 0)
    assert weight["derived_from"] == ["optim/param/0.2"]
    assert tensors["model/0.bias"]["derived_from"] == ["optim/param/0.1"]
    assert tensors["optim/param/0.2"]["derived_from"] == []
    assert run_cli("show", str(crashed.directory), str(TOTAL - 1)) == 0
    assert "from" in capsys.readouterr().out


def run_cli(*words: str) -> int:
    return app.run(list(words))


# Damage.


def flip_source(pack: Path) -> None:
    """Flip a bit of the chunk that the largest tensor is a cast of."""
    rows = {row.key: row for row in rows_of(pack)}
    copy = max((row for row in rows.values() if is_half(row)), key=lambda row: row.raw_bytes)
    casts = copy.encodings[0]["casts"]
    assert isinstance(casts, list)
    source = rows[f"state/{casts[0][0]}"]
    data = bytearray(pack.read_bytes())
    data[source.offset + source.size_bytes // 2] ^= 1
    pack.write_bytes(data)


def test_a_damaged_source_is_found_by_verify_and_gone_around(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    crashed = trained(place, "none")
    shutil.rmtree(crashed.memory)
    newest = packs_of(crashed)[-1]
    flip_source(newest)
    assert run_cli("verify", str(crashed.directory)) == 1
    assert newest.name in capsys.readouterr().out
    with pytest.raises(IntegrityError):
        zarr.open_group(stepwell.view(crashed.config(), TOTAL - 1), mode="r")["model/2.weight"][...]  # type: ignore[index]
    lives = Lives(uninterrupted(masters("optimizer", WIDTH)))
    seed_everything(2)
    training = masters("optimizer", WIDTH)()
    with crashed.open(training) as well, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored = well.restore()
    assert restored is not None
    assert (restored.step, restored.exact, restored.lost_steps) == (TOTAL - 2, True, 1)
    assert any("checksum" in fault for fault in restored.faults)
    assert_same(bits_of(training), lives.wanted[TOTAL - 2], "the step before")


def test_every_bit_of_a_pack_with_casts_is_covered(place: Place) -> None:
    crashed = trained(place, "none", width=33)
    pack = packs_of(crashed)[-1]
    data = pack.read_bytes()
    for position in range(0, len(data), 37):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        assert asyncio.run(faults_of(bytes(damaged))), position


async def faults_of(data: bytes) -> list[str]:
    try:
        reader = await PackReader.over(data, "p").open()
    except IntegrityError as error:
        return [str(error)]
    return [fault async for fault in reader.verify_all()]


# Where it must not be.


def test_lossy_pipelines_store_copies_themselves(place: Place) -> None:
    place.keys["preset"] = "tiercheck"
    seed_everything(1)
    training = masters("optimizer", WIDTH)()
    with place.open(training) as well:
        for step in range(TOTAL):
            training.step(step)
            well.save(step)
        well.wait_until_finished(PATIENCE_S)
        crashed = place.crashed()
    assert packs_of(crashed)
    assert not any(DERIVED.encode() in pack.read_bytes() for pack in packs_of(crashed))
