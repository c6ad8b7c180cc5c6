"""A real S3 service for tests: a server of its own, a bucket for each test, a proxy that can fail."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import os
import subprocess
import sys
import urllib.error
import urllib.request
import xml.etree.ElementTree as Xml
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from s3_proxy import Proxy, proxied

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_REGION": "us-east-1",
}
"""The server takes any; what matters is that they come from the environment."""

_buckets = itertools.count(1)


@dataclass(frozen=True)
class Bucket:
    """A fresh bucket, behind a proxy of its own."""

    name: str
    port: int
    proxy: Proxy

    @property
    def endpoint(self) -> str:
        """What clients are given: the proxy."""
        return self.proxy.url

    @property
    def server(self) -> str:
        """The service itself, where nothing is to fail or to be counted."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """A run in the bucket."""
        return f"s3://{self.name}/run"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process needs to find the bucket."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL": self.endpoint}

    def get(self, key: str) -> bytes | None:
        """Read an object of the bucket past everything that is tested."""
        try:
            with self._request("GET", key) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            with contextlib.closing(error):
                if error.code != 404:
                    raise
            return None

    def put(self, key: str, data: bytes) -> None:
        """Write an object of the bucket past everything that is tested."""
        self._request("PUT", key, data).close()

    def remove(self, key: str) -> None:
        """Delete an object of the bucket past everything that is tested."""
        self._request("DELETE", key).close()

    def listed(self, prefix: str = "") -> list[str]:
        """List the bucket past everything that is tested."""
        found: list[str] = []
        token = ""
        while True:
            query = f"?list-type=2&prefix={quote(prefix, safe='')}{token}"
            with self._request("GET", "", query=query) as answer:
                root = Xml.fromstring(answer.read())
            space = root.tag.partition("}")[0] + "}"
            found += [str(key.text) for key in root.iter(f"{space}Key")]
            following = root.find(f"{space}NextContinuationToken")
            if following is None:
                return found
            token = f"&continuation-token={quote(str(following.text), safe='')}"

    def _request(
        self, method: str, key: str, data: bytes | None = None, query: str = ""
    ) -> http.client.HTTPResponse:
        url = f"http://127.0.0.1:{self.port}/{self.name}/{quote(key)}{query}"
        # The server looks for a signature and does not check it.
        signed = {"Authorization": "AWS test:unchecked", "Content-Type": "application/octet-stream"}
        answer = urllib.request.urlopen(urllib.request.Request(url, data, signed, method=method))
        assert isinstance(answer, http.client.HTTPResponse)
        return answer


@contextmanager
def s3_service(log: Path) -> Iterator[int]:
    """Run the server in a process of its own; gives its port."""
    with log.open("w") as told:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("s3_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=told,
            text=True,
            env={**os.environ, **CREDENTIALS},
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert line.strip().isdigit(), f"the S3 server did not start: {log.read_text()[-2000:]}"
        yield int(line)
    finally:
        server.kill()
        server.wait()
        server.stdin.close()
        server.stdout.close()


@contextmanager
def fresh_bucket(port: int) -> Iterator[Bucket]:
    """Make a bucket nobody used before."""
    name = f"bucket-{os.getpid()}-{next(_buckets)}"
    made = urllib.request.Request(f"http://127.0.0.1:{port}/{name}", method="PUT")
    urllib.request.urlopen(made).close()
    with proxied(port) as proxy:
        yield Bucket(name, port, proxy)
