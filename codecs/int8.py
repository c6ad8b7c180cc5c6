"""Values as 8-bit multiples of one scale per block, for what may lose something."""

from __future__ import annotations

from typing import ClassVar

from stepwell.codecs.linear import LinearCodec

__all__ = ["Int8"]


class Int8(LinearCodec):
    """Keep every value as a multiple, from -127 to 127, of its block's scale. Lossy.

    With s = max(abs(x)) / 127 over the block and x' what comes back::

        abs(x' - x) <= s / 2 * (1 + 2**-13)                            float32
        abs(x' - x) <= s / 2 * (1 + 2**-13) + 127 * s * 2**-8 * (1 + 2**-13)     bfloat16

    The first term is half a step and the rounding of the arithmetic, the second is the rounding of
    x' to bfloat16. ``bound`` gives the largest of all blocks, in the unit of the values.

    Signs stay, also those of values that become zero. Zeros, -0.0 too, come back bit for bit. A
    block that holds a NaN, an infinity, a denormal, or whose largest magnitude is above 2**127 or
    below 2**-118 is stored as it is.

    Use it in a closed loop only (the residual carried, or the difference taken against what the
    reader will have): open, its errors add up. Never for second moments: see ``log_quant``.

    Parameters
    ----------
    dtype : str
        ``float32`` or ``bfloat16``.
    block : int
        Elements that share a scale, a power of two from 16 to 4096.
    level : int
        zstd level of codes that repeat.

    Notes
    -----
    The frame is described in ``stepwell.codecs.blocks``, the arithmetic in
    ``stepwell.codecs.linear``. The u32 of a block is its scale, as bits of a float32.

    Examples
    --------
    >>> import numpy as np
    >>> values = np.linspace(-1, 1, 1000, dtype=np.float32)
    >>> codec = Int8()
    >>> found = codec.decode(codec.encode(values)).view(np.float32)
    >>> bool(np.abs(found - values).max() <= codec.bound(values))
    True
    """

    codec_id: ClassVar[str] = "stepwell.int8"
    bits: ClassVar[int] = 8
