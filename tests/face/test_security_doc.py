"""The code in docs/security.md runs, in order, as it stands, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import trustme

from stepwell.stores.keys import KEY_BYTES_MAX
from stepwell.stores.transport.secret import SECRET_BYTES_MIN, SECRET_VARIABLE
from stepwell.stores.transport.settings import Identity, Limits


def test_the_examples_run(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (repository / "docs/security.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {"__name__": "security"}
    for block in blocks:
        exec(compile(block, "docs/security.md", "exec"), names)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "authority.pem")
    certificate = authority.issue_cert("node-3")
    certificate.private_key_pem.write_to_path(tmp_path / "node-3.key")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "node-3.pem")
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 40)
    made = names["identity"](tmp_path)  # type: ignore[operator]
    assert isinstance(made, Identity)
    assert made.secret is not None
    assert made.tls is not None


def test_the_numbers_are_those_of_the_code(repository: Path) -> None:
    text = re.sub(r"\s+", " ", (repository / "docs/security.md").read_text(encoding="utf-8"))
    limits = Limits()
    for sentence in (
        f"one of {limits.unauthenticated_count_max} connections",
        f"for at most {limits.handshake_s:g} s",
        f"at least {SECRET_BYTES_MIN} bytes",
        f"the variable `{SECRET_VARIABLE}`",
        f"at most {KEY_BYTES_MAX:,} bytes",
        f"larger than {limits.frame_bytes_max >> 20} MiB",
        f"At most {limits.upload_count_max} are on their way",
    ):
        assert sentence in text
    assert limits.upload_idle_s == 60.0, "the page says a minute"
