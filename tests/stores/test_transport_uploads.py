from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stepwell.stores.transport.uploads import Upload

SIZE = 30


class _Nowhere:
    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(SIZE))

    async def publish(self, key: str, *, replace: bool) -> None:
        raise AssertionError

    def discard(self) -> None:
        raise AssertionError


RANGES = st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=12)


@given(RANGES, st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted))
def test_ranges_are_kept_as_a_set_of_bytes_is(ranges: list[list[int]], asked: list[int]) -> None:
    upload = Upload("k", SIZE, _Nowhere())
    have: set[int] = set()
    for start, end in ranges:
        if start < end:
            upload.add(start, end)
            have |= set(range(start, end))
    assert upload.has(*asked) == (set(range(*asked)) <= have)
    gap = upload.missing()
    if gap is None:
        assert have == set(range(SIZE))
    else:
        absent = sorted(set(range(SIZE)) - have)
        assert gap[0] == absent[0]
        assert set(range(*gap)) <= set(absent)
        assert gap[1] == SIZE or gap[1] in have


def test_an_empty_object_misses_nothing() -> None:
    assert Upload("k", 0, _Nowhere()).missing() is None
