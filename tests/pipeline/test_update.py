"""Update records: by value, small, and equal after a way through JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import FormatError, UnsupportedValueError
from stepwell.pipeline.update import (
    GroupEncoder,
    UpdateRecord,
    class_name_of,
    environment_of,
    index_runs,
    runs_to_indices,
)


def group(**values):
    return {"params": [object()], "lr": 0.1, "betas": (0.9, 0.999), "foreach": None, **values}


def record_of(*groups, missing=(), grad_scale=None):
    encoder = GroupEncoder("optim", [[n] for n in range(len(groups))])
    return UpdateRecord(
        optimizer=0,
        class_name=class_name_of(torch.optim.AdamW),
        groups=encoder.encode(groups),
        missing=missing,
        grad_scale=grad_scale,
        found_inf=None,
        environment=environment_of("cpu"),
    )


@given(st.lists(st.integers(0, 40), max_size=30))
def test_runs_keep_any_order_of_indices(indices):
    runs = index_runs(indices)
    assert runs_to_indices([list(run) for run in runs]) == tuple(indices)


def test_record_comes_back_equal_by_type_and_value():
    record = record_of(
        group(lr=torch.tensor([0.1], dtype=torch.float64), weight_decay=0, name="a", flags=[True, 1, 1.0]),
        group(lr=-0.0, eps=math.inf, param_names=["not saved"]),
        missing=(0,),
    )
    again = UpdateRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert again == record
    first, second = again.decoded_groups()
    assert torch.equal(first["lr"], torch.tensor([0.1], dtype=torch.float64))
    assert first["betas"] == (0.9, 0.999)
    assert list(map(type, first["flags"])) == [bool, int, float]
    assert math.copysign(1, second["lr"]) == -1
    assert second["eps"] == math.inf
    assert "param_names" not in second
    assert again.missing == (0,)
    assert again.decoded_grad_scale() is None
    assert list(first) == ["params", "lr", "betas", "foreach", "weight_decay", "name", "flags"]


def test_unchanged_groups_are_the_same_object_and_changed_ones_are_not():
    encoder = GroupEncoder("optim", [[0], [1]])
    groups = [group(), group()]
    first = encoder.encode(groups)
    assert encoder.encode(groups) is first
    groups[0]["lr"] = float("0.1")
    assert encoder.encode(groups) is first, "another object with the same value changes nothing"
    groups[1]["lr"] = 0.2
    second = encoder.encode(groups)
    assert second is not first
    assert second[0] is first[0]
    assert first[1]["lr"] == 0.1, "earlier records keep their values"


@pytest.mark.parametrize(("old", "new"), [(1, True), (1, 1.0), (0.0, -0.0), (None, False), ("1", 1)])
def test_values_that_only_compare_equal_are_recorded_anew(old, new):
    encoder = GroupEncoder("optim", [[0]])
    values = group(flag=old)
    encoder.encode([values])
    values["flag"] = new
    found = record_of(values).decoded_groups()[0]["flag"]
    encoded = encoder.encode([values])[0]
    assert encoded == GroupEncoder("optim", [[0]]).encode([values])[0]
    assert type(found) is type(new)


def test_mutable_values_are_recorded_by_value_even_if_the_object_stays():
    encoder = GroupEncoder("optim", [[0]])
    lr, schedule = torch.tensor(0.1), [1]
    values = group(lr=lr, schedule=schedule)
    first = encoder.encode([values])
    lr.mul_(2)
    schedule.append(2)
    second = encoder.encode([values])
    assert second is not first
    assert second[0]["lr"] != first[0]["lr"]
    assert second[0]["schedule"] != first[0]["schedule"]


def test_vanished_and_new_keys_count():
    encoder = GroupEncoder("optim", [[0]])
    values = group(swap=1)
    encoder.encode([values])
    del values["swap"]
    values["initial_lr"] = 0.1
    assert list(encoder.encode([values])[0]) == ["params", "lr", "betas", "foreach", "initial_lr"]


def test_values_that_cannot_be_saved_are_named():
    with pytest.raises(UnsupportedValueError, match="optim/groups/0/hook"):
        record_of(group(hook=print))
    with pytest.raises(UnsupportedValueError, match="group 0 has the key 3"):
        record_of({**group(), 3: 1})


@pytest.mark.parametrize("index", [[[0, 1 << 40]], [[2, 1]], [[-1, 2]], "ab", [[0]], [[0.0, 1]], [[True, 2]]])
def test_damaged_runs_are_refused_before_a_huge_list_is_made(index):
    document = record_of(group()).to_json()
    document["missing"] = index
    with pytest.raises(FormatError):
        UpdateRecord.from_json(document)


@pytest.mark.parametrize("what", ["optimizer", "class", "groups", "missing", "environment"])
def test_incomplete_or_foreign_documents_are_refused(what):
    document = record_of(group()).to_json()
    del document[what]
    with pytest.raises(FormatError, match="update record"):
        UpdateRecord.from_json(document)
    document[what] = 1.5
    with pytest.raises(FormatError, match="update record"):
        UpdateRecord.from_json(document)
    with pytest.raises(FormatError):
        UpdateRecord.from_json([])


def test_environment_says_what_rounds():
    torch.set_flush_denormal(True)
    try:
        flushing = environment_of("cpu")
    finally:
        torch.set_flush_denormal(False)
    plain = environment_of("cpu")
    assert plain["torch"] == str(torch.__version__)
    assert plain["flush_denormal"] is False
    assert flushing["flush_denormal"] is True
    assert plain["default_dtype"] == "float32"


def test_record_of_many_parameters_is_small():
    encoder = GroupEncoder("optim", [range(10_000), range(10_000, 20_000)])
    record = UpdateRecord(0, "a:B", encoder.encode([group(), group()]), (), None, None, {})
    assert len(json.dumps(record.to_json())) < 1000
