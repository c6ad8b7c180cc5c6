from __future__ import annotations

import pytest

from stepwell.errors import FormatError, UsageError
from stepwell.pipeline import keys
from stepwell.pipeline.keys import Area, ParsedKey, Series

INC = "000003-00000000deadbeef"


def test_names_are_as_the_format_says() -> None:
    assert keys.incarnation_name(3, 0xDEADBEEF) == INC
    assert keys.incarnation_counter(INC) == 3
    assert keys.incarnation_key(INC) == f"incarnations/{INC}.json"
    assert keys.layout_key("ab" * 16) == f"layouts/{'ab' * 16}.json"
    assert keys.pack_key(Series.STEP, INC, 7, 0) == f"{INC}/step/000000000007/rank-00000.pack"
    assert keys.manifest_key(Series.BASE, INC, 7, 12) == f"{INC}/base/000000000007/rank-00012.manifest.json"
    assert keys.commit_key(Series.STEP, INC, 7) == f"{INC}/step/000000000007/commit.json"
    assert keys.state_prefix(INC, 7) == f"{INC}/base/000000000007/state"
    assert keys.references_key(INC, 7, 12) == f"{INC}/base/000000000007/rank-00012.refs.json"
    assert keys.data_key(INC, 7, 12, 3) == f"{INC}/base/000000000007/rank-00012.data-00003"


@pytest.mark.parametrize(
    ("key", "parsed"),
    [
        ("stepwell.json", ParsedKey(Area.RUN)),
        (f"incarnations/{INC}.json", ParsedKey(Area.INCARNATION, INC)),
        (f"layouts/{'0f' * 16}.json", ParsedKey(Area.LAYOUT, rest="0f" * 16)),
        (keys.pack_key(Series.STEP, INC, 9, 1), ParsedKey(Area.PACK, INC, Series.STEP, 9, 1)),
        (keys.manifest_key(Series.BASE, INC, 9, 1), ParsedKey(Area.MANIFEST, INC, Series.BASE, 9, 1)),
        (keys.commit_key(Series.BASE, INC, 9), ParsedKey(Area.COMMIT, INC, Series.BASE, 9)),
        (keys.references_key(INC, 9, 1), ParsedKey(Area.REFERENCES, INC, Series.BASE, 9, 1)),
        (keys.data_key(INC, 9, 1, 2), ParsedKey(Area.DATA, INC, Series.BASE, 9, 1, "00002")),
        (
            keys.state_prefix(INC, 9) + "/model/w/c/0",
            ParsedKey(Area.STATE, INC, Series.BASE, 9, rest="model/w/c/0"),
        ),
    ],
)
def test_every_key_is_read_back(key: str, parsed: ParsedKey) -> None:
    assert keys.parse_key(key) == parsed


@pytest.mark.parametrize(
    "key",
    [
        "",
        "lock",
        "stepwell.json/x",
        "../stepwell.json",
        f"/{INC}/step/000000000007/commit.json",
        f"{INC}/step/7/commit.json",
        f"{INC}/step/000000000007/commit.json\n",
        f"{INC}/step/00000000000７/commit.json",  # noqa: RUF001 - a wide digit is no digit of ours
        f"{INC}/step/000000000007/rank-0.pack",
        f"{INC}/step/000000000007/state/zarr.json",
        f"{INC}/step/000000000007/rank-00000.refs.json",
        f"{INC}/step/000000000007/rank-00000.data-00000",
        f"{INC}/base/000000000007/rank-00000.data",
        f"{INC}/base/000000000007/rank-00000.data-0",
        f"{INC}/base/000000000007/rank-00000.data-00000/x",
        f"{INC}/base/000000000007/state/../../../../etc/passwd",
        f"{INC}/base/000000000007/state//x",
        f"{INC}/base/000000000007/state/.",
        f"{INC}/base/000000000007/state/a\\b",
        f"{INC}/base/000000000007/state/a\0b",
        "layouts/ABCDEF.json",
        "incarnations/1-2.json",
    ],
)
def test_foreign_and_escaping_keys_are_not_ours(key: str) -> None:
    assert keys.parse_key(key) is None


def test_order_of_names_is_order_of_numbers() -> None:
    steps = [keys.commit_key(Series.STEP, INC, step) for step in (0, 9, 10, 99, 100, 10**11)]
    assert steps == sorted(steps)


@pytest.mark.parametrize("step", [-1, 10**12])
def test_a_step_out_of_range_is_refused(step: int) -> None:
    with pytest.raises(UsageError, match=str(step)):
        keys.pack_key(Series.STEP, INC, step, 0)


def test_bad_parts_are_refused() -> None:
    with pytest.raises(UsageError):
        keys.manifest_key(Series.STEP, INC, 1, 10**5)
    with pytest.raises(UsageError):
        keys.incarnation_name(1, 2**64)
    with pytest.raises(FormatError):
        keys.save_prefix(Series.STEP, "../x", 1)
    with pytest.raises(FormatError):
        keys.layout_key("../x")
