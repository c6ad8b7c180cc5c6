"""What one can say about a place on object storage. Holds no credentials."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RemoteOptions"]


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Where objects lie and what reaching them may take.

    Attributes
    ----------
    url : str
        ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``memory://name``, or any URL of fsspec.
    endpoint : str or None
        Of a service that speaks S3; None takes ``AWS_ENDPOINT_URL_S3`` or ``AWS_ENDPOINT_URL`` from
        the environment, and Amazon where there is none.
    region : str or None
        Of the bucket; None takes ``AWS_REGION`` or ``AWS_DEFAULT_REGION``, else asks the service.
    requests_max : int
        Requests at one time.
    bytes_per_s_max : float or None
        Bytes written a second on average.
    timeout_s : float
        Deadline of one request, and one second more for each MiB it moves.
    retry_for_s : float
        How long after the first try another may begin, where another may help.
    put_bytes_max : int
        Largest object stored in one piece; S3 takes 5 GiB.
    lease_s : float
        How long an opener on another machine is believed to live without a sign of life.
    """

    url: str
    endpoint: str | None = None
    region: str | None = None
    requests_max: int = 8
    bytes_per_s_max: float | None = None
    timeout_s: float = 30.0
    retry_for_s: float = 60.0
    put_bytes_max: int = 5 << 30
    lease_s: float = 20.0
