"""Who a peer is, and the limits and deadlines of its connections."""

from __future__ import annotations

from dataclasses import dataclass, field

from stepwell.errors import ConfigError
from stepwell.stores.transport.secret import RunSecret
from stepwell.stores.transport.tls import MutualTls

__all__ = ["NAME_BYTES_MAX", "Identity", "Limits"]

NAME_BYTES_MAX = 200


@dataclass(frozen=True, slots=True)
class Identity:
    """What one end of a connection says about itself, and how it proves it.

    Attributes
    ----------
    run : str
        Name of the run; peers of another run are refused.
    name : str
        Of this node, one for each.
    session : int
        Random 64 bits, new for each life of a keeper.
    incarnation : str
        Of the run, ``000002-0123456789abcdef``; empty where there is none yet.
    secret : RunSecret or None
        None only on loopback, or with `tls`.
    tls : MutualTls or None
    """

    run: str
    name: str
    session: int
    incarnation: str = ""
    secret: RunSecret | None = None
    tls: MutualTls | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        size_bytes = len(self.name.encode())
        if not 0 < size_bytes <= NAME_BYTES_MAX:
            raise ConfigError(
                f"the name of a peer has 1 to {NAME_BYTES_MAX} bytes, {self.name[:60]!r} has {size_bytes}"
            )


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines and sizes; both ends of a connection have their own.

    Attributes
    ----------
    connect_s : float
        For a connection to be there.
    handshake_s : float
        For both sides to have proved who they are.
    progress_s : float
        Longest time in which no byte moves while one is waited for; also TCP_USER_TIMEOUT.
    call_s : float
        For a whole call with all its attempts, and beside it a second for each
        `rate_bytes_s_min` bytes.
    rate_bytes_s_min : int
        A peer that is slower than this counts as away.
    working_s : float
        How often a peer that needs time says that it is at work.
    attempts_max : int
        How often a call, or a part of a large one, is tried.
    backoff_s : float
        Before the second attempt; doubled for each further one.
    connection_count : int
        Connections to one address at once.
    part_bytes : int
        Largest part of an object that is cut, whose parts go over all connections at once.
    inline_bytes : int
        A smaller object goes in one frame, unasked.
    frame_bytes_max : int
        Largest payload of one frame that is taken.
    unauthenticated_count_max : int
        Connections that have not proved who they are; the oldest gives way to a new one.
    connection_count_max : int
        Connections in all.
    upload_count_max : int
        Large objects on their way at once.
    upload_idle_s : float
        One that nothing came for in so long is dropped.
    slow_s : float
        A part that takes this long is also sent another way where one is idle.
    """

    connect_s: float = 5.0
    handshake_s: float = 5.0
    progress_s: float = 10.0
    call_s: float = 60.0
    rate_bytes_s_min: int = 1 << 20
    working_s: float = 1.0
    attempts_max: int = 3
    backoff_s: float = 0.05
    connection_count: int = 2
    part_bytes: int = 32 << 20
    inline_bytes: int = 1 << 20
    frame_bytes_max: int = 64 << 20
    unauthenticated_count_max: int = 16
    connection_count_max: int = 256
    upload_count_max: int = 64
    upload_idle_s: float = 60.0
    slow_s: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)!r}")
        if not self.inline_bytes <= self.part_bytes <= self.frame_bytes_max:
            raise ConfigError(
                f"inline_bytes <= part_bytes <= frame_bytes_max must hold, not {self.inline_bytes}, "
                f"{self.part_bytes}, {self.frame_bytes_max}"
            )

    def call_deadline_s(self, size_bytes: int) -> float:
        """Return how long a call that moves `size_bytes` may take in all."""
        return self.call_s + size_bytes / self.rate_bytes_s_min
