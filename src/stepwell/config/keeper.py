"""The `keeper` part of a configuration: this node's own keeper, started along with the run."""

from __future__ import annotations

from pydantic import Field, field_validator

from stepwell.config.addresses import Addresses, parse_address
from stepwell.config.file import local_path
from stepwell.config.strict import NAME_PATTERN, Strict
from stepwell.config.tiers import TlsFiles

__all__ = ["KeeperConfig"]


class KeeperConfig(Strict):
    """A keeper on this node that holds what the other nodes of the run send.

    It is started when the run is opened, unless one runs already, and again when it dies while the run is
    open. It outlives the trainer. It ends by itself once no trainer of this node has the run open, it
    holds nothing of others, and nobody is connected, for `linger_s`.

    Attributes
    ----------
    listen : str or list of str
        ``host:port``; several for several links, with one port. Port 0 takes a free one.
    name : str
        Of this node; the host name where empty.
    secret_file : str or None
        File of mode 0600 with the run's secret; None: that of the first peer tier that has one, else
        ``STEPWELL_RUN_SECRET``.
    tls : TlsFiles or None
        None: that of the first peer tier that has any.
    budget_bytes : int or None
        Most bytes that are held; None: as the memory file system has room.
    directory : str or None
        In a memory file system. None: one in ``/dev/shm``, named by the run and the node.
    linger_s : float
    """

    listen: Addresses = ("127.0.0.1:0",)
    name: str = Field(default="", pattern=rf"^$|{NAME_PATTERN}")
    secret_file: str | None = None
    tls: TlsFiles | None = None
    budget_bytes: int | None = Field(default=None, ge=1)
    directory: str | None = None
    linger_s: float = Field(default=60.0, ge=0)

    @field_validator("listen")
    @classmethod
    def _one_port(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        ports = {parse_address(text)[1] for text in value}
        if len(ports) > 1:
            raise ValueError(f"one port for all addresses, not {sorted(ports)}")
        return value

    @field_validator("secret_file", "directory")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return None if value is None else str(local_path(value))

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each address."""
        return [parse_address(text) for text in self.listen]
