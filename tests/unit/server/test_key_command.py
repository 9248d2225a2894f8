"""`convgrad key` and the file of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from convgrad_service.security.keys import read_keys
from convgrad_service.server.key_command import key


@pytest.mark.parametrize("end", ["", "\n# to be rotated in May"])
def test_a_key_is_a_line_of_its_own(end: str, tmp_path: Path) -> None:
    """Whether or not the line before it ends with a line break."""
    file = tmp_path / "keys"
    assert key(["ada", "--file", str(file)]) == 0
    file.write_text(file.read_text().rstrip() + end)
    assert key(["bob", "--file", str(file)]) == 0
    assert {each.caller.name for each in read_keys(file).values()} == {"ada", "bob"}
