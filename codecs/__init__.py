"""Pure transforms of arrays: bytes in, fewer or checked bytes out. No I/O.

Each codec has a numcodecs form (``byteplane``, ``ordered_delta``, ``xxh3``) and a zarr v3 face
(``zarr_*``); both are found through entry points, so plain zarr decodes them without importing
stepwell. ``registry`` makes a codec from the configuration a manifest carries.
"""
