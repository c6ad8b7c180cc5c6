"""Damaged and missing objects: another tier, an older base, an older step, and it is said."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from failure_rig import PATIENCE_S, Job, Run, flip, uninterrupted

from stepwell.errors import FormatError, IntegrityError, UsageError
from stepwell.pipeline.sealed import seal, unseal

pytestmark = pytest.mark.usefixtures("one_torch_thread")

TOTAL = 7
BASES = (0, 4)
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Steps 0 to 6 in both tiers, bases at 0 and 4, as a kill leaves them."""
    run = Run(tmp_path_factory.mktemp("trained"))
    run.train(range(TOTAL), base_at=BASES)
    return run


@pytest.fixture
def run(trained: Run, memory_directory: Path) -> Run:
    """A copy to damage."""
    copy = Run(memory_directory)
    shutil.copytree(trained.memory, copy.memory)
    shutil.copytree(trained.directory, copy.directory)
    return copy


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGES = {"flipped": flip, "truncated": truncate, "missing": Path.unlink}


def in_arena(run: Run, key: str) -> Path:
    """File of an object of the memory tier."""
    from stepwell.stores.arena import Arena

    with Arena.inspect(run.memory) as arena:
        names = arena.keys()
        (found,) = [name for name in names if name.endswith(key)]
        region = arena.find(found)
        assert region is not None
        return Path(region.path)


def in_directory(run: Run, key: str) -> Path:
    (found,) = [path for path in run.objects("directory", "*") if str(path).endswith(key)]
    return found


def restored_quietly(run: Run) -> tuple[int, int, tuple[str, ...]]:
    """Restore; check bits; return step, lost steps and faults."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        restored, bits = run.restored()
    assert restored is not None
    assert restored.exact
    assert bits == uninterrupted(TOTAL)[restored.step]
    return restored.step, restored.lost_steps, restored.faults


@pytest.mark.parametrize("what", [f"step/{6:012d}/rank-00000{end}" for end in (".pack", ".manifest.json")])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("tier", ["memory", "directory"])
def test_damage_in_one_tier_costs_nothing(run: Run, tier: str, damage: Damage, what: str) -> None:
    path = in_arena(run, what) if tier == "memory" else in_directory(run, what)
    if tier == "memory":
        flip_payload(path) if damage is flip else path.unlink()
    else:
        damage(path)
    step, lost, faults = restored_quietly(run)
    assert (step, lost) == (6, 0)
    if tier == "memory" and damage is flip:
        assert any("memory" in fault for fault in faults)


def flip_payload(path: Path) -> None:
    """Flip a bit of an arena object behind its header page."""
    with path.open("r+b") as file:
        file.seek(4096 + 100)
        byte = file.read(1)[0] ^ 1
        file.seek(4096 + 100)
        file.write(bytes([byte]))


def flip_gradient(path: Path) -> None:
    """Flip a bit of the first chunk: that of an older step is replayed, while its aux part is not read."""
    flip(path, 0.02)


@pytest.mark.parametrize("damage", [flip_gradient, truncate, Path.unlink], ids=DAMAGES)
def test_damage_in_all_tiers_goes_back_to_an_older_step_and_says_so(run: Run, damage: Damage) -> None:
    shutil.rmtree(run.memory)
    damage(in_directory(run, f"step/{5:012d}/rank-00000.pack"))
    job = Job(seed=99)
    with run.open(job) as well:
        with pytest.warns(UserWarning, match="step 4 was restored, 2 steps before the newest"):
            restored = well.restore()
        assert restored is not None
        assert (restored.step, restored.lost_steps, restored.exact) == (4, 2, True)
        assert any(f"{5:012d}" in fault for fault in restored.faults)
        assert job.bits() == uninterrupted(TOTAL)[4]
        for _ in well.steps(TOTAL):
            job.step()
        well.wait_until_finished(PATIENCE_S)
        assert well.all_steps() == [0, 1, 2, 3, 4, 5, 6]
    assert job.bits() == uninterrupted(TOTAL)[-1]
    assert restored_quietly(run)[:2] == (6, 0)


def test_on_lost_steps_raise_refuses_and_begins_nothing(run: Run) -> None:
    shutil.rmtree(run.memory)
    in_directory(run, f"step/{6:012d}/rank-00000.pack").unlink()
    before = sorted(run.objects("directory", "*.json"))
    job = Job()
    with run.open(job, on_lost_steps="raise") as well:
        with pytest.raises(IntegrityError, match="step 5 was restored, 1 steps before"):
            well.restore()
        with pytest.raises(UsageError, match=r"call restore\(\) first"):
            well.save(7)
    assert sorted(run.objects("directory", "*.json")) == before
    assert restored_quietly(run)[:2] == (5, 1)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_base_is_gone_around_by_the_base_before_it(run: Run, damage: Damage) -> None:
    """The log was never cut by the newer base, so the older one leads to every step."""
    shutil.rmtree(run.memory)
    weights = f"base/{4:012d}/state/model"
    damage(next(path for path in run.objects("directory", "c/0*/0") if weights in str(path)))
    step, lost, faults = restored_quietly(run)
    assert (step, lost) == (6, 0)
    assert any(f"{4:012d}" in fault or "base 4" in fault for fault in faults)


def test_damaged_base_in_memory_is_read_from_the_directory(run: Run) -> None:
    flip_payload(in_arena(run, f"base/{4:012d}/rank-00000.pack"))
    assert restored_quietly(run)[:2] == (6, 0)


def test_every_base_damaged_is_an_error_that_lists_it(run: Run) -> None:
    shutil.rmtree(run.memory)
    for step in BASES:
        in_directory(run, f"base/{step:012d}/commit.json").unlink()
    with run.open(Job()) as well, pytest.raises(IntegrityError, match="none can be restored whole"):
        well.restore()


def test_manifest_deleted_alone(run: Run) -> None:
    """training-gym 506: shards without their evidence are no checkpoint."""
    shutil.rmtree(run.memory)
    in_directory(run, f"step/{6:012d}/commit.json").unlink()
    with run.open(Job()) as well:
        assert well.latest_step() == 5
    assert restored_quietly(run)[:2] == (5, 0)
    assert not run.objects("directory", f"{6:012d}"), "what has no evidence is swept"


def test_commit_that_vanished_after_an_orderly_end_counts_as_lost(run: Run) -> None:
    """The end of a life is written down, so the loss of what it ended with is known."""
    job = Job(seed=99)
    with run.open(job) as well:
        for _ in well.steps(TOTAL + 1):
            job.step()
    assert not run.memory.exists()
    in_directory(run, f"step/{7:012d}/commit.json").unlink()
    for _ in range(2):
        assert restored_quietly(run)[:2] == (6, 1)


def test_run_that_vanished_after_an_orderly_end_is_not_a_new_one(run: Run) -> None:
    job = Job(seed=99)
    with run.open(job) as well:
        for _ in well.steps(TOTAL + 1):
            job.step()
    for incarnation in run.objects("directory", "0*-*"):
        if incarnation.is_dir():
            shutil.rmtree(incarnation)
    with run.open(Job(), on_lost_steps="raise") as well, pytest.raises(IntegrityError, match="nothing was"):
        well.restore()
    with run.open(Job()) as well, pytest.warns(UserWarning, match="ended at step 7, which is gone"):
        assert well.restore() is None


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_layout_is_read_from_the_other_tier(run: Run, damage: Damage) -> None:
    for path in run.objects("directory", "layouts/*.json"):
        damage(path)
    assert restored_quietly(run)[:2] == (6, 0)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("memory", [True, False], ids=["with memory", "without"])
def test_damaged_record_of_the_run_locked_everybody_out(run: Run, damage: Damage, memory: bool) -> None:
    if not memory:
        shutil.rmtree(run.memory)
    damage(run.directory / "stepwell.json")
    assert restored_quietly(run)[:2] == (6, 0)
    assert restored_quietly(run)[:2] == (6, 0)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_record_of_an_incarnation(run: Run, damage: Damage) -> None:
    shutil.rmtree(run.memory)
    (path,) = run.objects("directory", "incarnations/*.json")
    damage(path)
    assert restored_quietly(run)[:2] == (6, 0)


def rewritten(path: Path, kind: str, **changes: object) -> None:
    """Change a sealed document and seal it again."""
    document = unseal(path.read_bytes(), str(path), kind)
    path.write_bytes(seal({**document, **changes}))


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        (f"step/{6:012d}/commit.json", "commit"),
        ("incarnations/*.json", "incarnation"),
        ("stepwell.json", "run"),
    ],
)
def test_newer_format_is_refused_and_costs_no_step(run: Run, pattern: str, kind: str) -> None:
    """Falling back to older steps would throw away what the newer version saved."""
    shutil.rmtree(run.memory)
    (path,) = [p for p in run.directory.rglob("*.json") if p.match(pattern)]
    rewritten(path, kind, format=2)
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}
    job = Job(seed=99)
    untouched = job.bits()

    def life() -> None:
        with run.open(job) as well:
            well.restore()

    with pytest.raises(FormatError, match=r"format 2.*reads up to format 1") as raised:
        life()
    assert raised.value.newer
    assert job.bits() == untouched
    after = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}
    assert {p: t for p, t in after.items() if p.is_file() and "lock" not in p.name} == {
        p: t for p, t in before.items() if p.is_file() and "lock" not in p.name
    }


def test_copied_run_lacked_its_success_mark(run: Run, memory_directory: Path) -> None:
    """orbax 394: cp -r is a checkpoint; only temporary names of our own are swept."""
    copy = Run(memory_directory / "elsewhere")
    copy.root.mkdir()
    shutil.copytree(run.directory, copy.directory)
    note = copy.directory / "notes.txt"
    note.write_text("mine")
    ours = copy.directory / f"{next(iter(os.listdir(copy.directory / 'incarnations')))[:-5]}" / "step"
    temp = ours / ".stepwell-tmp-1-2-3"
    temp.write_text("half")
    assert restored_quietly(copy)[:2] == (6, 0)
    assert note.read_text() == "mine"


def test_temporary_of_a_newer_step_was_picked_as_newest(run: Run) -> None:
    """flax 1200: a temp of step 9 beside committed step 6."""
    shutil.rmtree(run.memory)
    (step,) = [path for path in run.objects("directory", f"{6:012d}") if path.parent.name == "step"]
    newer = step.with_name(f"{9:012d}")
    newer.mkdir()
    (newer / ".stepwell-tmp-rank-00000.pack").write_text("half")
    with run.open(Job()) as well:
        assert well.latest_step() == 6
    assert restored_quietly(run)[:2] == (6, 0)
    assert not newer.exists()


def test_pickle_planted_in_place_of_metadata_is_never_loaded(run: Run) -> None:
    """torch 189308: nothing of ours is unpickled."""
    import pickle

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (run.root / "exploded",))

    shutil.rmtree(run.memory)
    for path in [*run.objects("directory", f"step/{6:012d}/*"), *run.objects("directory", "layouts/*")][:3]:
        path.write_bytes(pickle.dumps(Bomb()))
    restored_quietly(run)
    assert not (run.root / "exploded").exists()
