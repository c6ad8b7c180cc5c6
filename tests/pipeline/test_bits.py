"""Every dtype torch has either keeps every bit or is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stepwell.errors import IntegrityError, StateMismatchError, UnsupportedValueError
from stepwell.pipeline.bits import (
    as_integers,
    bit_equal,
    bytes_to_tensor,
    check_tensor,
    copy_exact,
    dense,
    dtype_name,
    overlaps_itself,
    own_copy,
    tensor_bytes,
    torch_dtype,
)
from stepwell.pipeline.layout import ITEM_BYTES

SHAPES = [(), (0,), (0, 3), (1, 1, 1), (5, 4), (64,)]


def raw_tensor(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits, so NaN payloads, denormals and odd bools are among the values."""
    count = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return bytes_to_tensor(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8), dtype, shape)


def all_dtypes() -> list[torch.dtype]:
    found = {value for name in dir(torch) if isinstance(value := getattr(torch, name), torch.dtype)}
    return sorted(found, key=str)


@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_dtype_of_torch_round_trips_or_is_refused_by_name(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name not in ITEM_BYTES:
        with pytest.raises(UnsupportedValueError, match=name):
            dtype_name(dtype)
        return
    assert torch_dtype(dtype_name(dtype)) is dtype
    for shape in SHAPES:
        tensor = raw_tensor(name, shape)
        check_tensor("x", tensor)
        data = tensor_bytes(tensor)
        assert data.nbytes == tensor.numel() * ITEM_BYTES[name]
        assert bit_equal(bytes_to_tensor(bytes(data.data), name, shape), tensor)
        copied = own_copy(tensor)
        assert bit_equal(copied, tensor)
        assert tensor.numel() == 0 or copied.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_copies_keep_bits_for_any_strides(name: str) -> None:
    source = raw_tensor(name, (6, 8))
    # numpy moves opaque items, so it is a witness of its own.
    items = tensor_bytes(source).view(f"V{ITEM_BYTES[name]}").reshape(6, 8)
    views = [
        (source, items),
        (source.t(), items.T),
        (source[::2, 1::3], items[::2, 1::3]),
        (source[1:2].expand(4, 8), np.broadcast_to(items[1:2], (4, 8))),
        (source[:, 3], items[:, 3]),
    ]
    for view, witness in views:
        assert bytes(tensor_bytes(view).data) == np.ascontiguousarray(witness).tobytes()
        assert bit_equal(dense(view), view)
        target = raw_tensor(name, tuple(view.shape), seed=1)
        copy_exact(target, view)
        assert bit_equal(target, view)
        spread = raw_tensor(name, (*view.shape, 2), seed=2)[..., 0]
        copy_exact(spread, view)
        assert bit_equal(spread, view)


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", *(n for n in sorted(ITEM_BYTES) if n.startswith("float8"))]
)
def test_small_floats_keep_all_bit_patterns(name: str) -> None:
    width = ITEM_BYTES[name]
    patterns = np.arange(1 << (8 * width), dtype=np.dtype(f"<u{width}"))
    tensor = bytes_to_tensor(patterns.view(np.uint8), name, (patterns.size,))
    back = np.frombuffer(tensor_bytes(own_copy(tensor.view(16, -1).t())).data, dtype=patterns.dtype)
    assert (back.reshape(-1, 16).T.reshape(-1) == patterns).all()


def test_float32_specials_keep_sign_and_payload() -> None:
    bits = np.array([0x80000000, 0x7FC00001, 0x7F800001, 0xFFC12345, 0x7F800000, 1], dtype=np.uint32)
    tensor = bytes_to_tensor(bits.view(np.uint8), "float32", (3, 2))
    target = torch.zeros(2, 3).t()
    copy_exact(target, tensor)
    assert (np.frombuffer(tensor_bytes(target).data, np.uint32) == bits).all()
    assert not bit_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_conjugate_and_negative_views_keep_their_values() -> None:
    values = torch.tensor([1 + 2j, -3 - 0.5j])
    for view in (values.conj(), values.conj().imag):
        assert view.is_conj() or view.is_neg()
        saved = own_copy(view)
        assert torch.equal(saved, view.resolve_conj().resolve_neg())
        target = torch.zeros(2, dtype=view.dtype)
        copy_exact(target, view)
        assert torch.equal(target, saved)
    live = torch.zeros(2, dtype=torch.complex64).conj()
    copy_exact(live, values)
    assert torch.equal(live.resolve_conj(), values)


def test_expanded_target_takes_equal_values_and_refuses_others() -> None:
    base = torch.zeros(1, 4)
    copy_exact(base.expand(3, 4), torch.arange(4.0).expand(3, 4).contiguous())
    assert torch.equal(base[0], torch.arange(4.0))
    with pytest.raises(StateMismatchError, match="several elements in one place"):
        copy_exact(base.expand(3, 4), torch.arange(12.0).view(3, 4))
    window = torch.zeros(5)
    copy_exact(window.unfold(0, 3, 1), torch.arange(5.0).unfold(0, 3, 1).contiguous())
    assert torch.equal(window, torch.arange(5.0))


def test_overlap_is_seen_only_where_it_is() -> None:
    plain = torch.zeros(4, 6)
    assert not any(map(overlaps_itself, (plain, plain.t(), plain[::2, ::3], plain[:, :0], torch.zeros(()))))
    assert overlaps_itself(torch.zeros(1).expand(2))
    assert overlaps_itself(torch.zeros(5).unfold(0, 3, 1))


def test_copy_between_different_shapes_or_dtypes_is_refused() -> None:
    with pytest.raises(StateMismatchError):
        copy_exact(torch.zeros(2), torch.zeros(3))
    with pytest.raises(StateMismatchError):
        copy_exact(torch.zeros(2), torch.zeros(2, dtype=torch.float64))


def test_length_that_does_not_fit_is_refused() -> None:
    for shape in ((3,), (1,), (-2,)):
        with pytest.raises(IntegrityError):
            bytes_to_tensor(bytes(8), "float32", shape)


def test_read_only_bytes_become_a_tensor_without_copy_and_stay_alive() -> None:
    array = np.arange(16, dtype=np.uint8)
    array.flags.writeable = False
    tensor = bytes_to_tensor(array, "int16", (8,))
    assert tensor.data_ptr() == array.__array_interface__["data"][0]
    expected = array.copy()
    del array
    assert (tensor_bytes(tensor) == expected).all()


def test_bytes_of_a_contiguous_tensor_are_a_view() -> None:
    tensor = torch.nn.Parameter(torch.zeros(3))
    tensor_bytes(tensor)[:] = 255
    assert (as_integers(tensor) == -1).all()


def refused_tensors() -> dict[str, torch.Tensor]:
    nested = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
    return {
        "torch.sparse_coo": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "quantized": torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8),
        "nested|NestedTensor": nested,
        "lazy": torch.nn.parameter.UninitializedParameter(),
    }


@pytest.mark.parametrize("reason", ["torch.sparse_coo", "meta", "quantized", "nested|NestedTensor", "lazy"])
@pytest.mark.filterwarnings("ignore:.*quantiz.*", "ignore:.*deprecat.*", "ignore:.*nested.*")
def test_tensors_that_cannot_be_saved_are_refused_by_name_and_reason(reason: str) -> None:
    for in_place in (False, True):
        with pytest.raises(UnsupportedValueError, match=f"(?i)a/b: .*({reason})"):
            check_tensor("a/b", refused_tensors()[reason], in_place=in_place)


def test_subclass_is_refused_only_where_it_would_lose_its_type() -> None:
    class Marked(torch.Tensor):
        pass

    marked = torch.zeros(2).as_subclass(Marked)
    check_tensor("x", marked, in_place=True)
    with pytest.raises(UnsupportedValueError, match="Marked"):
        check_tensor("x", marked)
