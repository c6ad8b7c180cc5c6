"""Tensors as bytes and back, for every dtype of ``ITEM_BYTES``, with every bit kept.

Values move as integers: torch's own copies of a type are bitwise for most types but not for all (a
bool byte other than 0 and 1 is normalised as soon as a tensor is not contiguous).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from stepwell.errors import IntegrityError, StateMismatchError, UnsupportedValueError
from stepwell.pipeline.base import Bytes
from stepwell.pipeline.layout import ITEM_BYTES

__all__ = [
    "as_integers",
    "bit_equal",
    "bytes_to_tensor",
    "check_tensor",
    "copy_exact",
    "dense",
    "dtype_name",
    "overlaps_itself",
    "own_copy",
    "tensor_bytes",
    "torch_dtype",
]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Older torch lacks some of the names; what is missing can then neither be saved nor loaded.
_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name) for name in ITEM_BYTES if isinstance(getattr(torch, name, None), torch.dtype)
}
_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without the prefix, e.g. ``"bfloat16"``.

    Raises
    ------
    UnsupportedValueError
        The dtype has no whole number of bytes per element, or is a quantized one.
    """
    name = _NAMES.get(dtype)
    if name is None:
        raise UnsupportedValueError(f"tensors of dtype {dtype} cannot be saved bit for bit")
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Dtype of a stored name.

    Raises
    ------
    UnsupportedValueError
        This torch has no such dtype, or stepwell does not save it.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise UnsupportedValueError(f"dtype {name!r} is not known to torch {torch.__version__} and stepwell")
    return dtype


def check_tensor(name: str, tensor: torch.Tensor, *, in_place: bool = False) -> None:
    """Refuse a tensor that cannot be saved bit for bit.

    Parameters
    ----------
    name : str
        Its place in the state, for the message.
    tensor : Tensor
    in_place : bool
        True where loading writes into the live tensor, so that a subclass keeps its type; False
        where a plain tensor would come back in its stead.

    Raises
    ------
    UnsupportedValueError
        Sparse, quantized, nested, meta or lazy tensors, wrapper subclasses (DTensor and the like)
        and dtypes below one byte; the message names tensor and reason.
    """
    kind = type(tensor)
    strided = kind in _PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested
    if strided and tensor.dtype in _NAMES and tensor.device.type != "meta":
        return
    reason = _refusal(tensor, in_place)
    if reason is not None:
        raise UnsupportedValueError(f"{name}: {reason}")


def _refusal(tensor: torch.Tensor, in_place: bool) -> str | None:
    """Why a tensor cannot be saved, or None."""
    kind = type(tensor)
    if torch.nn.parameter.is_lazy(tensor):
        return "a lazy parameter without values; run one forward pass before opening the checkpoint"
    if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a tensor of the wrapper class {kind.__qualname__} cannot be saved; save its local tensor"
    if tensor.is_nested:
        return "a nested tensor cannot be saved; save its values and offsets"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout} cannot be saved; save its parts, or to_dense()"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype}) cannot be saved; save int_repr(), scale and zero point"
    if tensor.device.type == "meta":
        return "a tensor on the meta device has no values"
    if tensor.dtype not in _NAMES:
        return f"tensors of dtype {tensor.dtype} cannot be saved bit for bit"
    if not in_place and kind not in _PLAIN_TYPES and kind is not _buffer_type():
        return f"a tensor of the subclass {kind.__qualname__} would come back as a plain one; convert it"
    return None


def _buffer_type() -> type | None:
    """``torch.nn.Buffer`` where this torch has it.

    isinstance with it is true for other tensors too, so types are compared.
    """
    return getattr(torch.nn, "Buffer", None)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View of the same memory as integers, for copies and comparisons that keep every bit.

    Works for any strides. Complex tensors get a last dimension of two; a tensor whose conjugate or
    negative bit is set is materialised first, so the result is then a copy.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        if tensor.is_conj():
            tensor = tensor.resolve_conj()
        tensor = torch.view_as_real(tensor)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.view(_INTEGERS[tensor.element_size()])


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, detached, or a contiguous copy of it where it is not contiguous.

    The result may alias `tensor`. Conjugate and negative bits are resolved: the values are kept,
    not how they were represented.
    """
    tensor = tensor.detach()
    lazy = tensor.is_neg() or (tensor.is_complex() and tensor.is_conj())
    if tensor.is_contiguous() and not lazy:
        return tensor
    return _from_integers(as_integers(tensor).contiguous(), tensor.dtype)


def _from_integers(integers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo ``as_integers`` for a contiguous tensor."""
    if not dtype.is_complex:
        return integers.view(dtype)
    halves = {2: torch.float16, 4: torch.float32, 8: torch.float64}[integers.element_size()]
    return torch.view_as_complex(integers.view(halves))


def own_copy(tensor: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    """Contiguous copy with memory of its own, on `device` or where the tensor is."""
    flat = dense(tensor)
    if flat.data_ptr() != tensor.data_ptr() and (device is None or flat.device == torch.device(device)):
        return flat
    # As integers even here: cloning a bool tensor normalises its bytes.
    copied = as_integers(flat)
    copied = copied.clone() if device is None else copied.to(device, copy=True)
    return _from_integers(copied, flat.dtype)


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Bytes of a tensor in C order.

    Returns
    -------
    ndarray, (size_bytes,), uint8
        A view of the tensor's own memory if it is contiguous and on the CPU, else of a copy.
    """
    flat = dense(tensor)
    if flat.device.type != "cpu":
        flat = flat.cpu()  # not tested: needs an accelerator
    array: Bytes = flat.reshape(-1).view(torch.uint8).numpy()
    return array


def bytes_to_tensor(
    buffer: Bytes | memoryview | bytes | bytearray, dtype: str, shape: Sequence[int]
) -> torch.Tensor:
    """Tensor over bytes in C order, without a copy.

    Parameters
    ----------
    buffer : C-contiguous buffer
        Exactly the tensor's bytes. The tensor keeps it alive. It may be read-only; then nobody may
        write into the tensor.
    dtype : str
        Key of ``ITEM_BYTES``.
    shape : sequence of int

    Raises
    ------
    IntegrityError
        The length is not that of the dtype and shape.
    """
    wanted = torch_dtype(dtype)
    flat = np.frombuffer(buffer, dtype=np.uint8)
    size_bytes = prod(shape) * ITEM_BYTES[dtype]
    if flat.nbytes != size_bytes or any(extent < 0 for extent in shape):
        raise IntegrityError(
            f"a {dtype} tensor of shape {tuple(shape)} needs {size_bytes} bytes, there are {flat.nbytes}"
        )
    if size_bytes == 0:
        return torch.empty(0, dtype=torch.uint8).view(wanted).view(tuple(shape))
    if flat.flags.writeable:
        return torch.from_numpy(flat).view(wanted).view(tuple(shape))
    # torch warns about read-only buffers, and silencing a warning is not safe across threads: hand
    # it a raw view of the address instead, which keeps the owner alive through an attribute.
    window = (ctypes.c_char * size_bytes).from_address(flat.__array_interface__["data"][0])
    window.stepwell_owner = flat  # type: ignore[attr-defined]
    return torch.frombuffer(window, dtype=torch.uint8).view(wanted).view(tuple(shape))


def bit_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if dtype, shape and every bit agree (NaN payloads and the sign of zero count)."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    return torch.equal(as_integers(first), as_integers(second))


def copy_exact(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values in place with every bit kept.

    Parameters
    ----------
    destination : Tensor
        Any strides, expanded ones too; may require grad.
    source : Tensor
        Same dtype and shape; any device.

    Raises
    ------
    StateMismatchError
        Shape or dtype differ, or the destination has several elements in one place (an expanded
        tensor) for which the source has different values.
    """
    if destination.dtype != source.dtype or destination.shape != source.shape:
        raise StateMismatchError(
            f"cannot copy {source.dtype} {tuple(source.shape)}"
            f" into {destination.dtype} {tuple(destination.shape)}"
        )
    if destination.is_neg() or (destination.is_complex() and destination.is_conj()):
        # The memory holds the conjugate or the negative; only torch's own copy knows to undo that.
        with torch.no_grad():
            destination.copy_(source)
        return
    target, values = as_integers(destination), as_integers(source)
    if not overlaps_itself(target):
        target.copy_(values)
        return
    narrow, narrow_values = target, values
    for axis, (extent, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and extent > 1:
            narrow, narrow_values = narrow.narrow(axis, 0, 1), narrow_values.narrow(axis, 0, 1)
    narrow.copy_(narrow_values)
    if not torch.equal(target.cpu(), values.cpu()):
        raise StateMismatchError(
            f"the live tensor of shape {tuple(destination.shape)} keeps several elements in one place"
            f" (strides {destination.stride()}), the saved one has different values there"
        )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True if two elements may share memory (expanded tensors, overlapping windows)."""
    if tensor.is_contiguous():
        return False
    span = 1
    for extent, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if extent == 0:
            return False
        if extent == 1:
            continue
        if stride < span:
            return True
        span = stride * (extent - 1) + span
    return False
