"""From the configuration in a manifest to a codec; nothing but our own codecs is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from stepwell.codecs.base import PlainCodec
from stepwell.codecs.byteplane import BytePlane
from stepwell.codecs.codebook import Codebook
from stepwell.codecs.int4 import Int4
from stepwell.codecs.int8 import Int8
from stepwell.codecs.log_quant import LogQuant
from stepwell.codecs.ordered_delta import OrderedDelta
from stepwell.codecs.scaled_bf16 import ScaledBf16
from stepwell.codecs.threshold_sparse import ThresholdSparse
from stepwell.codecs.xor_delta import XorDelta
from stepwell.codecs.xxh3 import Xxh3
from stepwell.errors import ConfigError, IntegrityError

__all__ = ["CODECS", "codec_from"]

CODECS: Mapping[str, Callable[..., PlainCodec]] = MappingProxyType(
    {
        codec.codec_id: codec
        for codec in (
            BytePlane,
            Codebook,
            Int4,
            Int8,
            LogQuant,
            OrderedDelta,
            ScaledBf16,
            ThresholdSparse,
            XorDelta,
            Xxh3,
        )
    }
)


def codec_from(config: Mapping[str, object]) -> PlainCodec:
    """Make the codec that a configuration read from a checkpoint describes.

    Unlike ``numcodecs.get_codec`` it takes only ids of ours: what is written in a file never
    decides which code is imported, and codecs that damage floats silently stay out.

    Parameters
    ----------
    config : mapping
        ``{"id": "stepwell.byteplane", "itemsize": 4, ...}``.

    Raises
    ------
    IntegrityError
        An id that is not ours, or parameters the codec does not take.
    """
    if not isinstance(config, Mapping):
        raise IntegrityError(f"a codec is described by a mapping, not by {config!r}")
    parameters = dict(config)
    codec_id = parameters.pop("id", None)
    make = CODECS.get(codec_id) if isinstance(codec_id, str) else None
    if make is None:
        raise IntegrityError(f"unknown codec {codec_id!r}; known are {', '.join(CODECS)}")
    try:
        return make(**parameters)
    except (ConfigError, TypeError) as error:
        raise IntegrityError(f"codec {codec_id!r} does not take {parameters!r}: {error}") from error
