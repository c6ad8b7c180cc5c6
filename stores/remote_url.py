"""From a URL to the storage it names, checked: what is wrong with it is said before anything is opened."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from ipaddress import ip_address
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, unquote, urlsplit

from stepwell.errors import ConfigError
from stepwell.stores.keys import check_key
from stepwell.stores.remote_options import RemoteOptions

if TYPE_CHECKING:
    from stepwell.stores.blobs import Blobs

__all__ = ["blobs_of", "check_endpoint", "check_remote_url"]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+")
_TENSORSTORE = ("s3", "gs", "memory")

# tensorstore's own tries: ours have deadlines and pauses of their own, and know when to end.
_ONE_TRY = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "10ms"}
_REQUESTS_MIN = 16  # the limit of a run is kept before; signs of life and fences come on top
_REGION_OF_ENDPOINTS = "us-east-1"  # services that are not Amazon's sign for this one or ignore it


def check_remote_url(url: str) -> str:
    """Return a URL in the form that everything else expects: without a final ``/``.

    Raises
    ------
    ConfigError
        It is no URL of object storage, or holds credentials, a query or a fragment.
    """
    parts = _split(url)
    scheme = parts.scheme
    if not _SCHEME.fullmatch(scheme) or "://" not in url:
        raise ConfigError(f"{url}: not a URL; write s3://bucket/prefix, gs://bucket/prefix or another one")
    if scheme == "file":
        raise ConfigError(f"{url}: a file: URL is a directory tier; write kind: directory, path: ...")
    if "@" in parts.netloc or parts.password:
        raise ConfigError(
            f"{scheme}://...: a URL holds no credentials; set them in the environment (for S3 "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or an instance role)"
        )
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise ConfigError(f"{url}: no query and no fragment; options are keys of the tier")
    if scheme in ("s3", "gs") and not _BUCKET.fullmatch(parts.netloc):
        raise ConfigError(f"{url}: {parts.netloc!r} is no name of a bucket; write {scheme}://bucket/prefix")
    path = parts.path.strip("/")
    if path:
        try:
            check_key(path)
        except Exception as error:
            raise ConfigError(f"{url}: {error}") from error
    if not parts.netloc and not path:
        raise ConfigError(f"{url}: names no place; write {scheme}://name/prefix")
    return f"{scheme}://{parts.netloc}" + (f"/{path}" if path else "")


def check_endpoint(endpoint: str) -> str:
    """Return the URL of a service.

    Raises
    ------
    ConfigError
        It is none, or is not encrypted and not on this machine.
    """
    parts = _split(endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"endpoint {endpoint!r} is no URL of a service; write https://host or https://host:port"
        )
    if "@" in parts.netloc:
        raise ConfigError("endpoint: holds no credentials; set them in the environment")
    if parts.scheme == "http" and not _is_this_machine(parts.hostname):
        raise ConfigError(
            f"endpoint {endpoint!r}: http is allowed to this machine alone, checkpoints would travel for "
            "everyone to read; write https"
        )
    return endpoint.rstrip("/")


def blobs_of(options: RemoteOptions) -> Blobs:
    """Return the storage of a URL. Opens no connection yet.

    Raises
    ------
    ConfigError
        See `check_remote_url` and `check_endpoint`.
    """
    url = check_remote_url(options.url)
    parts = _split(url)
    scheme, path = parts.scheme, parts.path.strip("/")
    if scheme not in _TENSORSTORE:
        from stepwell.stores.blobs_fsspec import FsspecBlobs

        return FsspecBlobs(url, _fsspec_options(scheme, options))
    _end_silence(options.timeout_s)
    import tensorstore as ts

    from stepwell.stores.base import Failure
    from stepwell.stores.blobs_kv import KvBlobs, memory_context

    prefix = f"{path}/" if path else ""
    if scheme == "memory":
        spec: dict[str, object] = {"driver": "memory", "path": f"{parts.netloc}/{prefix}"}
        return KvBlobs(url, spec, memory_context(), Failure.PROCESS)
    family = "gcs" if scheme == "gs" else "s3"
    context = ts.Context(
        {
            f"{family}_request_concurrency": {"limit": max(options.requests_max, _REQUESTS_MIN)},
            f"{family}_request_retries": _ONE_TRY,
        }
    )
    spec = {"driver": family, "bucket": parts.netloc, "path": prefix}
    return KvBlobs(url, spec | (_s3_spec(options) if family == "s3" else {}), context)


def _end_silence(timeout_s: float) -> None:
    """Let tensorstore end requests without an answer: those we gave up hold a place among all until then.

    It has no deadlines by itself (google/tensorstore#291), and takes them from the environment alone, with
    its first request; what the user has set there stays.
    """
    seconds = str(max(1, math.ceil(timeout_s)))
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", seconds)
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")
    os.environ.setdefault("TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS", seconds)


def _s3_spec(options: RemoteOptions) -> dict[str, object]:
    spec: dict[str, object] = {}
    endpoint = _endpoint(options)
    region = options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint is not None:
        spec |= {"endpoint": endpoint, "aws_region": region or _REGION_OF_ENDPOINTS}
    elif region:
        spec["aws_region"] = region
    if "AWS_ACCESS_KEY_ID" in os.environ:
        spec["aws_credentials"] = {"type": "environment"}  # without a look at profiles and instances
    return spec


def _endpoint(options: RemoteOptions) -> str | None:
    given = (
        options.endpoint
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
        or None
    )
    return None if given is None else check_endpoint(given)


def _fsspec_options(scheme: str, options: RemoteOptions) -> Mapping[str, object]:
    endpoint = _endpoint(options) if scheme == "s3a" else None
    if options.endpoint is not None and scheme != "s3a":
        raise ConfigError(f"{options.url}: only S3 has an `endpoint`")
    client = {"endpoint_url": endpoint, "region_name": options.region}
    named = {key: value for key, value in client.items() if value is not None}
    return {"client_kwargs": named} if scheme == "s3a" and named else {}


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}") from error


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(unquote(host)).is_loopback
    except ValueError:
        return False
