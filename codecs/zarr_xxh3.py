"""``xxh3`` for zarr v3: the last codec of a chain, so that it is verified first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from stepwell.codecs.xxh3 import DIGEST_BYTES, Xxh3
from stepwell.codecs.zarr_face import ZarrFace, configuration_of
from stepwell.errors import ConfigError

if TYPE_CHECKING:
    from zarr.core.array_spec import ArraySpec
    from zarr.core.common import JSON

__all__ = ["Xxh3Codec"]


@dataclass(frozen=True)
class Xxh3Codec(ZarrFace):
    """An xxh3-64 behind every chunk; see ``stepwell.codecs.xxh3.Xxh3``."""

    is_fixed_size = True
    codec_name: ClassVar[str] = "stepwell.xxh3"

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Make the codec from its entry in zarr.json; ConfigError if that is wrong."""
        configuration = configuration_of(data, cls.codec_name)
        if configuration:
            raise ConfigError(f"{cls.codec_name} takes no configuration, not {configuration!r}")
        return cls()

    def to_dict(self) -> dict[str, JSON]:
        """Return the entry for zarr.json."""
        return {"name": self.codec_name}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Return the size with the digest."""
        return input_byte_length + DIGEST_BYTES

    def plain(self) -> Xxh3:
        """Make the numcodecs codec."""
        return Xxh3()
