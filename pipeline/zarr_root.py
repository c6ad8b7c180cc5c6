"""What the root of a base says beside its arrays: whose it is, and the header with the tree."""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.errors import FormatError, IntegrityError
from stepwell.pipeline.manifest import Manifest
from stepwell.pipeline.pack_format import PackIdentity
from stepwell.pipeline.sealed import FORMAT, parse_json, typed
from stepwell.stores.base import BytesLike

__all__ = ["root_about", "root_header"]


def root_about(layout_hash: str, identity: PackIdentity, header: Mapping[str, object]) -> dict[str, object]:
    """Return the attribute ``stepwell`` of the root of a base."""
    return {
        "format": FORMAT,
        "kind": str(identity.kind),
        "run": identity.run,
        "incarnation": identity.incarnation,
        "step": identity.step,
        "rank": identity.rank,
        "world": identity.world,
        "layout": layout_hash,
        "header": header,
    }


def root_header(document: BytesLike, what: str, manifest: Manifest, layout_hash: str) -> dict[str, object]:
    """Return the header in a root's ``zarr.json``, once it is known to be the one of this manifest.

    Raises
    ------
    FormatError
        Not the root of a base.
    IntegrityError
        The root of another base.
    """
    root = parse_json(document, what)
    try:
        about = typed(typed(root["attributes"], dict)["stepwell"], dict)
        named = tuple(about[name] for name in ("run", "incarnation", "step", "rank", "world", "layout"))
        header = typed(about["header"], dict)
    except (KeyError, TypeError) as error:
        raise FormatError(f"{what}: not the root of a base ({error!r})") from error
    m = manifest
    if named != (m.run, m.incarnation, m.step, m.rank, m.world, layout_hash):
        raise IntegrityError(f"{what}: belongs to another base than its manifest")
    return header
