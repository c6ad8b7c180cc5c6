from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zarr
from failure_rig import idle
from zarr.core.buffer.core import default_buffer_prototype
from zarr.core.sync import sync

import stepwell
from stepwell.errors import IntegrityError, NotCommittedError, PermanentStoreError
from stepwell.stores.keys import encode_name
from stepwell.viewing import View, view

Snapshot = Mapping[str, torch.Tensor]


def settings(path: Path, **more: object) -> dict[str, object]:
    return {
        "tiers": [{"kind": "directory", "path": str(path)}],
        "base_every": 5,
        "log_budget": 100.0,
        "chunk_bytes": 4096,
        **more,
    }


class Trained:
    """A small run, with a snapshot of every tensor at every step."""

    def __init__(
        self,
        path: Path,
        make: Callable[[torch.nn.Module], object],
        *,
        steps: int = 9,
        update: Callable[[int], bool] = lambda step: True,
        dtype: torch.dtype = torch.float32,
        **more: object,
    ) -> None:
        torch.manual_seed(0)
        self.path = path
        self.model = torch.nn.Sequential(
            torch.nn.Linear(40, 96), torch.nn.BatchNorm1d(96), torch.nn.Linear(96, 3)
        ).to(dtype)
        self.unused = self.model.register_parameter("unused", torch.nn.Parameter(torch.randn(7, dtype=dtype)))
        made = make(self.model)
        self.optimizers = list(made) if isinstance(made, list) else [made]
        self.snapshots: dict[int, Snapshot] = {}
        with stepwell.open_sync(settings(path, **more), model=self.model, optimizer=made) as well:
            well.restore()
            for step in range(steps):
                if update(step):
                    self._update(dtype)
                well.save(step)
                self.snapshots[step] = self._snapshot()
                if step % 5 == 0:
                    idle(well)  # else the next base may come later, when this one is through

    def _update(self, dtype: torch.dtype) -> None:
        x = torch.randn(8, 40, dtype=dtype)

        def closure() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = self.model(x).square().mean()
            loss.backward()
            return loss

        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()

    def _snapshot(self) -> Snapshot:
        found = {f"model/{name}": tensor.clone() for name, tensor in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            prefix = "optim" if len(self.optimizers) == 1 else f"optim.{number}"
            for name, parameter in self.model.named_parameters():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"{prefix}/state/{name}/{key}"] = value.clone()
        return found

    def view(self, step: int) -> View:
        return view(settings(self.path), step)

    def check(self, step: int) -> View:
        opened = self.view(step)
        group = zarr.open_group(opened, mode="r")
        for name, tensor in self.snapshots[step].items():
            array = group[encode_name(name)]
            assert isinstance(array, zarr.Array)
            assert array.shape == tuple(tensor.shape)
            expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert np.ascontiguousarray(array[...]).tobytes() == expected, f"step {step}, {name}"
        return opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = tmp_path_factory.mktemp("run")
    return Trained(path, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))


def committed(run: Trained) -> list[int]:
    with pytest.raises(NotCommittedError, match="committed are") as raised:
        run.view(10**6)
    return [int(step) for step in str(raised.value).rpartition(": ")[2].split(", ")]


def test_every_committed_step_is_the_state_it_was(run: Trained) -> None:
    steps = committed(run)
    assert {5, 6, 7, 8} <= set(steps)
    for step in steps:
        assert run.check(step).whole is None


def test_the_newest_step_is_the_default(run: Trained) -> None:
    assert view(settings(run.path)).step == 8


def test_reading_one_slice_decodes_only_the_chunks_it_needs(run: Trained) -> None:
    opened = run.view(7)
    updates = opened._state.updates
    assert updates > 0
    array = zarr.open_group(opened, mode="r")["model/0.weight"]
    assert isinstance(array, zarr.Array)
    assert array.nchunks == 4
    assert opened.decoded_chunks == 0
    rows = array.chunks[0]
    expected = run.snapshots[7]["model/0.weight"][:rows].numpy()
    assert np.array_equal(np.asarray(array[:rows]), expected)
    # Weight, both moments and the step counter of the base; one gradient chunk per update.
    assert opened.decoded_chunks == 4 + updates
    moment = zarr.open_group(opened, mode="r")["optim/state/0.weight/exp_avg"]
    assert isinstance(moment, zarr.Array)
    assert np.asarray(moment[:rows]).any()
    assert opened.decoded_chunks == 4 + updates, "the same replay gave the moments too"
    assert np.asarray(array[rows:]).any()
    # Three more of each but the shared chunk of step counters.
    assert opened.decoded_chunks == 4 + updates + 3 * (3 + updates)


def test_metadata_and_sizes_decode_nothing(run: Trained) -> None:
    opened = run.view(7)
    group = zarr.open_group(opened, mode="r")
    assert group.attrs["stepwell"]["step"] == 7
    assert "optimizers" in group.attrs["stepwell"]["header"]["tree"]
    names = [name for name, node in group.members(max_depth=None) if isinstance(node, zarr.Array)]
    assert "model/2.bias" in names
    assert sync(opened.getsize("model/2.bias/c/0")) == 3 * 4 + 4
    assert sync(opened.exists("model/2.bias/c/0"))
    assert not sync(opened.exists("model/2.bias/c/1"))
    assert opened.decoded_chunks == 0


def test_listing_is_that_of_the_keys(run: Trained) -> None:
    opened = run.view(6)

    async def listed() -> tuple[set[str], set[str], set[str]]:
        return (
            {key async for key in opened.list()},
            {key async for key in opened.list_prefix("model/")},
            {name async for name in opened.list_dir("model")},
        )

    keys, below, names = sync(listed())
    assert below == {key for key in keys if key.startswith("model/")}
    assert names == {key.split("/")[1] for key in below}
    assert all(sync(opened.exists(key)) for key in keys)


def test_a_view_writes_nothing_and_cannot_be_written(run: Trained) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    opened = run.check(6)
    value = default_buffer_prototype().buffer.from_bytes(b"x")
    for attempt in (opened.set("a", value), opened.delete("zarr.json"), opened.put("a", [b"x"])):
        with pytest.raises(PermanentStoreError, match="read-only"):
            sync(attempt)
    with pytest.raises(ValueError, match="read-only"):
        zarr.open_group(opened, mode="a")
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == before


async def test_it_opens_inside_a_running_loop(run: Trained) -> None:
    opened = run.view(6)
    buffer = await opened.get("model/2.bias/c/0", default_buffer_prototype())
    assert buffer is not None
    assert buffer.to_bytes()[:12] == run.snapshots[6]["model/2.bias"].numpy().tobytes()


def test_a_pickled_view_opens_again(run: Trained) -> None:
    opened = pickle.loads(pickle.dumps(run.view(6)))
    assert (opened.step, opened.read_only) == (6, True)


def test_there_is_no_view_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(NotCommittedError, match="no run"):
        view(settings(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_gradient_is_an_error_and_leaves_the_rest_readable(run: Trained, tmp_path: Path) -> None:
    copy = Trained(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
    opened = copy.view(7)
    row = max(opened._state._entry.follow[-1].rows.values(), key=lambda row: row.size_bytes)
    pack = next(path for path in tmp_path.rglob("*.pack") if path.parent.name.endswith("07"))
    data = bytearray(pack.read_bytes())
    data[row.offset] ^= 1
    pack.write_bytes(data)
    group = zarr.open_group(copy.view(7), mode="r")
    refused = 0
    for name, tensor in copy.snapshots[7].items():
        try:
            value = np.asarray(group[name][...])  # type: ignore[index]
        except IntegrityError:
            refused += 1
        else:
            assert value.tobytes() == tensor.numpy().tobytes(), name
    assert refused > 0


def test_rebuilt_weights_that_miss_their_digest_are_refused(run: Trained) -> None:
    opened = run.view(7)
    state = opened._state
    assert state._digest is not None
    assert state._digest.complete
    wrong = tuple("0" * 16 for _ in state._digest.values)
    state._digest = replace(state._digest, values=wrong)
    with pytest.raises(IntegrityError, match="not those that were saved"):
        zarr.open_group(opened, mode="r")["model/0.weight"][:]  # type: ignore[index]
    state.environments_differ = True
    with pytest.warns(UserWarning, match="round differently"):
        state._mismatch(0)


def sgd(model: torch.nn.Module, **flags: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, **flags)


@pytest.mark.parametrize(
    ("make", "piecewise"),
    [
        (lambda model: sgd(model), True),
        (lambda model: sgd(model, momentum=0.9, nesterov=True), True),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True, fused=False), True),
        (lambda model: torch.optim.AdamW(model.parameters(), fused=True), True),
        (lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.5), True),
        (lambda model: torch.optim.NAdam(model.parameters()), True),
        (lambda model: torch.optim.Adafactor(model.parameters()), False),
        (lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2), True),
        (
            lambda model: [
                torch.optim.AdamW(
                    [{"params": model[0].parameters(), "lr": 0.1}, {"params": [model[1].weight]}]
                ),
                sgd(model[2], momentum=0.9),
            ],
            True,
        ),
    ],
    ids=["sgd", "nesterov", "amsgrad", "fused", "rmsprop", "nadam", "adafactor", "lbfgs", "two"],
)
def test_optimizers(make: Callable[[torch.nn.Module], object], piecewise: bool, tmp_path: Path) -> None:
    # Not the newest step: closing may have made a base of that.
    opened = Trained(tmp_path, make, steps=8).check(6)
    assert (opened.whole is None) is piecewise, opened.whole


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_state_that_the_log_creates_is_there(momentum: float, tmp_path: Path) -> None:
    """The base is older than the first update."""
    run = Trained(
        tmp_path, lambda model: sgd(model, momentum=momentum), steps=5, update=lambda step: step > 0
    )
    opened = run.check(3)
    assert (opened.whole is None) is (momentum == 0.0)


def test_types_that_zarr_lacks_are_bits(tmp_path: Path) -> None:
    run = Trained(tmp_path, sgd, steps=8, dtype=torch.bfloat16)
    group = zarr.open_group(run.check(6), mode="r")
    array = group["model/0.weight"]
    assert isinstance(array, zarr.Array)
    assert (str(array.dtype), array.attrs["stepwell_dtype"]) == ("uint16", "bfloat16")


@pytest.mark.parametrize("delta", ["ordered_delta", "predictive"])
def test_captured_states_told_as_differences_are_undone(tmp_path: Path, delta: str) -> None:
    pipeline: list[object] = [
        {"capture": "state"},
        {"delta": delta},
        "shard",
        "replicate",
        "commit",
    ]
    run = Trained(tmp_path, lambda model: torch.optim.Adam(model.parameters()), steps=9, pipeline=pipeline)
    for step in (5, 6, 7):
        assert run.check(step).whole is None
