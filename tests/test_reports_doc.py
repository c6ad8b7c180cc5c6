"""Every test that ``docs/reports.md`` names is there, and every report says what became of it."""

from __future__ import annotations

import re
from pathlib import Path


def test_the_page_names_tests_that_exist(repository: Path) -> None:
    rows = [
        line for line in (repository / "docs/reports.md").read_text().splitlines() if line.startswith("| [")
    ]
    assert len(rows) >= 45
    for row in rows:
        found = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert found or "later: " in row, row
        for file, test in found:
            assert re.search(rf"def {test}\b", (repository / file).read_text()), f"{file}::{test}"


def test_no_test_of_a_report_is_left_out(repository: Path) -> None:
    page = (repository / "docs/reports.md").read_text()
    for path in (repository / "tests").rglob("test_reports*.py"):
        if path != Path(__file__):
            for test in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
                assert f"{path.relative_to(repository)}::{test}`" in page, test
