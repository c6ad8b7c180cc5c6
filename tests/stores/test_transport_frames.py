from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.stores.transport.frames import (
    HEAD_BYTES,
    SEAL_BYTES,
    Flag,
    Frame,
    FrameError,
    Kind,
    Sealer,
    Status,
    decode,
    fresh_operation,
    key_bytes_of,
    parse_incarnation,
)

U64 = st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    Frame,
    kind=st.sampled_from(Kind),
    key=st.text(max_size=200),
    operation=U64,
    offset=U64,
    length=U64,
    total=U64,
    generation=U64,
    flags=st.integers(0, sum(Flag)).map(Flag),
    status=st.sampled_from(Status),
    incarnation=st.tuples(U64, U64),
    session=U64,
)


@given(FRAMES)
def test_a_frame_comes_back(frame: Frame) -> None:
    raw = frame.encode()
    assert key_bytes_of(raw[:HEAD_BYTES]) == len(frame.key.encode())
    assert decode(raw[:HEAD_BYTES], raw[HEAD_BYTES:]) == frame


def test_what_lies_where() -> None:
    frame = Frame(Kind.PART, "é", 3, 4, 5, 6, 7, Flag.LAST, Status.OK, (1, 2), 9)
    numbers = b"".join(value.to_bytes(8, "little") for value in (1, 2, 9, 3, 4, 5, 6, 7))
    assert frame.encode() == (
        b"SWPF" + b"\x01\x00" + b"\x03" + b"\x02" + numbers + b"\x02\x00" + bytes(6) + "é".encode()
    )


@given(FRAMES, st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_garbage_is_an_error_never_a_crash(frame: Frame, noise: bytes) -> None:
    for head in (noise, frame.encode()[:6] + noise[6:]):
        try:
            key_bytes_of(head)
            decode(head, b"key")
        except FrameError:
            continue


@pytest.mark.parametrize(
    "raw",
    [
        b"XXXX" + Frame(Kind.PUT).encode()[4:],
        Frame(Kind.PUT).encode()[:4] + b"\x02\x00" + Frame(Kind.PUT).encode()[6:],
        Frame(Kind.PUT, "k" * 2000).encode()[:HEAD_BYTES],
    ],
)
def test_foreign_heads_are_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        key_bytes_of(raw)


@pytest.mark.parametrize(("at", "value"), [(6, 99), (7, 64), (74, 99)])
def test_unknown_kinds_flags_and_states_are_refused(at: int, value: int) -> None:
    raw = bytearray(Frame(Kind.PUT).encode())
    raw[at] = value
    with pytest.raises(FrameError, match="means nothing"):
        decode(bytes(raw), b"")


def test_every_changed_byte_breaks_the_seal() -> None:
    covered = Frame(Kind.PUT, "key", length=4).encode()
    sealed = covered + Sealer(bytes(32)).seal(covered)
    for at in range(len(sealed)):
        changed = bytearray(sealed)
        changed[at] ^= 1
        with pytest.raises(FrameError, match="seal"):
            Sealer(bytes(32)).check(bytes(changed[:-SEAL_BYTES]), bytes(changed[-SEAL_BYTES:]))
    Sealer(bytes(32)).check(covered, sealed[-SEAL_BYTES:])


def test_a_seal_holds_for_one_place_in_one_direction() -> None:
    covered = Frame(Kind.DELETE, "key").encode()
    sealer = Sealer(bytes(32))
    first, second = sealer.seal(covered), sealer.seal(covered)
    assert first != second
    receiver = Sealer(bytes(32))
    receiver.check(covered, first)
    with pytest.raises(FrameError):
        receiver.check(covered, first)  # repeated
    with pytest.raises(FrameError):
        Sealer(b"\x01" * 32).check(covered, first)  # another key


def test_a_trailer_belongs_to_its_frame() -> None:
    sealer = Sealer(bytes(32))
    trailer = sealer.trailer(b"s" * SEAL_BYTES, 12345)
    assert sealer.checksum_of(b"s" * SEAL_BYTES, trailer) == 12345
    for seal, changed in ((b"t" * SEAL_BYTES, trailer), (b"s" * SEAL_BYTES, b"\0" + trailer[1:])):
        with pytest.raises(FrameError, match="seal"):
            sealer.checksum_of(seal, changed)


def test_incarnations() -> None:
    assert parse_incarnation("000002-0123456789abcdef") == (2, 0x0123456789ABCDEF)
    assert parse_incarnation("") == (0, 0)
    for text in (
        "2-0123456789abcdef",
        "000002",
        "000002-xyz",
        "000002-0123456789ABCDEF",
        " 000002-" + "0" * 16,
    ):
        with pytest.raises(ConfigError, match="incarnation"):
            parse_incarnation(text)


def test_operations_differ_and_are_never_nothing() -> None:
    made = {fresh_operation() for _ in range(1000)}
    assert len(made) == 1000
    assert 0 not in made
