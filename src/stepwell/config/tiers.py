"""The `tiers` list of a configuration: one model for each kind of tier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from stepwell.config.addresses import Addresses, parse_address
from stepwell.config.faults import plugin_names
from stepwell.config.file import local_path
from stepwell.config.nodes import NodeConfig, Placement, holders
from stepwell.config.strict import NAME_PATTERN, Strict
from stepwell.stores.remote_options import RemoteOptions
from stepwell.stores.remote_url import check_endpoint, check_remote_url

__all__ = [
    "DeclaredTier",
    "DirectoryTier",
    "MemoryTier",
    "OnError",
    "PeerTier",
    "PeersTier",
    "PluginTier",
    "RemoteTier",
    "TierConfig",
    "TlsFiles",
]

OnError = Literal["raise", "degrade", "retry"]
BaseLayout = Literal["tree", "pack"]


class _Tier(Strict):
    """What every tier has.

    Attributes
    ----------
    name : str
        What `handle.until`, `Restored.tier` and messages call the tier; the kind where not given.
    keep : int
        How many of the newest committed chains (a base and its log) stay.
    on_error : "raise", "degrade", "retry" or None
        What a failure of this tier does; None takes the run's own `on_error`.
    log_budget : float
        A base that is merely due is left out here while the log is not this many times as large as the
        base before it. The first tier takes every base, and so does any where saves are lossy.
    """

    name: str = Field(default="", pattern=rf"^$|{NAME_PATTERN}")
    keep: int = Field(default=2, ge=1)
    on_error: OnError | None = None
    log_budget: float = Field(default=2.0, ge=0)
    kind: str

    @property
    def label(self) -> str:
        """The tier's name, or its kind where it has none."""
        return self.name or self.kind


class MemoryTier(_Tier):
    """Files in a memory file system on this machine; survives the death of the process.

    Attributes
    ----------
    directory : str or None
        Where the arena lies. None: ``/dev/shm/stepwell-<uid>/<hash of the run>``.
    slots : int
        Capture slots, one captured save each. One makes no progress, two are safe, three stall less.
    """

    kind: Literal["memory"] = "memory"
    directory: str | None = None
    slots: int = Field(default=3, ge=2, le=64)

    @field_validator("directory")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(local_path(value))


class DirectoryTier(_Tier):
    """A directory on a disk or a network file system; survives what that disk survives.

    Attributes
    ----------
    path : str
        A plain path or a ``file:`` URL; made absolute when the configuration is loaded.
    layout : "tree" or "pack"
        Write bases as a zarr group with an object for each chunk and array, or as a few objects that zarr
        opens through fsspec's ``reference://``.
    """

    kind: Literal["directory"] = "directory"
    path: str
    layout: BaseLayout = "tree"

    @field_validator("path")
    @classmethod
    def _absolute(cls, value: str) -> str:
        return str(local_path(value))


class RemoteTier(_Tier):
    """A place on object storage; survives what that service survives.

    Credentials are never written here: they come from the environment, a profile or the instance.

    Attributes
    ----------
    url : str
        ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``memory://name`` (lasts as long as the process,
        for trials), or any URL of fsspec whose service has an atomic create-if-absent.
    endpoint : str or None
        URL of a service that speaks S3; http only to this machine. None: ``AWS_ENDPOINT_URL_S3`` or
        ``AWS_ENDPOINT_URL``, else Amazon.
    region : str or None
        Of the bucket. None: ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, else the service is asked.
    requests_max : int
        Requests at one time; each upload has its object, a chunk of a base or a pack, in memory once more.
    bytes_per_s_max : float or None
        Bytes uploaded a second on average, so that an upload leaves the network to the training.
    timeout_s : float
        Deadline of one request, and one second more for each MiB it moves.
    retry_for_s : float
        How long after its first try a request is tried again, where that may help.
    put_bytes_max : int
        Larger objects are stored in parts. S3 takes 5 GiB in one piece.
    lease_s : float
        How long a run that another machine has open is believed to live without a sign of life.
    layout : "tree" or "pack"
        Write bases as a zarr group with an object for each chunk and array, or as a few objects that zarr
        opens through fsspec's ``reference://``.
    """

    kind: Literal["remote"] = "remote"
    url: str
    layout: BaseLayout = "tree"
    endpoint: str | None = None
    region: str | None = Field(default=None, pattern=r"^[a-z0-9-]{1,64}$")
    requests_max: int = Field(default=8, ge=1, le=256)
    bytes_per_s_max: float | None = Field(default=None, gt=0)
    timeout_s: float = Field(default=30.0, gt=0)
    retry_for_s: float = Field(default=60.0, ge=0)
    put_bytes_max: int = Field(default=5 << 30, ge=1 << 20, le=5 << 30)
    lease_s: float = Field(default=20.0, ge=1, le=3600)

    @field_validator("url")
    @classmethod
    def _checked_url(cls, value: str) -> str:
        return check_remote_url(value)

    @field_validator("endpoint")
    @classmethod
    def _checked_endpoint(cls, value: str | None) -> str | None:
        return None if value is None else check_endpoint(value)

    @property
    def options(self) -> RemoteOptions:
        """What the store is opened with."""
        return RemoteOptions(
            url=self.url,
            endpoint=self.endpoint,
            region=self.region,
            requests_max=self.requests_max,
            bytes_per_s_max=self.bytes_per_s_max,
            timeout_s=self.timeout_s,
            retry_for_s=self.retry_for_s,
            put_bytes_max=self.put_bytes_max,
            lease_s=self.lease_s,
        )


class TlsFiles(Strict):
    """Certificates for mutual TLS, all PEM.

    Attributes
    ----------
    certificate, key : str
        Of this node.
    authority : str
        What signs those of peers: one of the run's own.
    """

    certificate: str
    key: str
    authority: str


class PeerTier(_Tier):
    """The memory of another node, held there by ``stepwell keeper``; survives the loss of this node.

    A peer that is away is no reason to stop: unless told otherwise (`on_error`) the others go on, and it
    takes part again when it answers.

    Attributes
    ----------
    address : str or list of str
        ``host:port`` of the keeper; several where several links lead to it.
    keeper : str or None
        Name of the node that must answer; None: whoever belongs to the run.
    secret_file : str or None
        File of mode 0600 with the run's secret; None: ``STEPWELL_RUN_SECRET``, if it is set.
    tls : TlsFiles or None
    call_s : float
        Longest time for a call with all its attempts, and a second more for each MiB it moves.
    """

    kind: Literal["peer"] = "peer"
    address: Addresses
    keeper: str | None = None
    secret_file: str | None = None
    tls: TlsFiles | None = None
    on_error: OnError | None = "degrade"
    log_budget: float = Field(default=0.0, ge=0)
    call_s: float = Field(default=60.0, gt=0)

    @field_validator("secret_file")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(local_path(value))

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each address."""
        return [parse_address(text) for text in self.address]


class PeersTier(Strict):
    """Copies at other nodes of a cluster, chosen from its `nodes`; becomes a peer tier for each of them.

    Attributes
    ----------
    copies : int
    placement : "auto", "adjacent" or "racks"
        See ``stepwell.config.nodes.holders``.
    secret_file, tls, keep, on_error, log_budget, call_s
        Those of each peer tier.
    """

    kind: Literal["peers"]
    copies: int = Field(default=1, ge=1)
    placement: Placement = "auto"
    secret_file: str | None = None
    tls: TlsFiles | None = None
    keep: int = Field(default=2, ge=1)
    on_error: OnError | None = "degrade"
    log_budget: float = Field(default=0.0, ge=0)
    call_s: float = Field(default=60.0, gt=0)

    def peers(self, nodes: tuple[NodeConfig, ...], own: NodeConfig) -> list[PeerTier]:
        """Return the peer tiers that this stands for at one node.

        Raises
        ------
        ValueError
            The nodes do not suffice.
        """
        same = {
            name: getattr(self, name) for name in type(self).model_fields if name in PeerTier.model_fields
        }
        same.pop("kind")
        return [
            PeerTier(**same, name=node.name, keeper=node.name, address=node.address)
            for node in holders(nodes, own, self.copies, self.placement)
        ]


class PluginTier(_Tier):
    """A tier whose store a third party registered in the entry-point group ``stepwell.stores``.

    Attributes
    ----------
    options : dict
        Handed to the class as ``from_config(options)``.
    """

    kind: str
    options: dict[str, object] = Field(default_factory=dict)


def _tier_tag(value: object) -> str | None:
    """Decide which model a tier is read by; None where the kind is missing or unknown."""
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    if kind in ("memory", "directory", "peer", "peers", "remote"):
        return str(kind)
    return "plugin" if kind in plugin_names("stepwell.stores") else None


TierConfig = MemoryTier | DirectoryTier | PeerTier | RemoteTier | PluginTier

DeclaredTier = Annotated[
    Annotated[MemoryTier, Tag("memory")]
    | Annotated[DirectoryTier, Tag("directory")]
    | Annotated[PeerTier, Tag("peer")]
    | Annotated[PeersTier, Tag("peers")]
    | Annotated[RemoteTier, Tag("remote")]
    | Annotated[PluginTier, Tag("plugin")],
    Discriminator(_tier_tag),
]
"""As they are written."""
