"""API keys: what is stored, what is let in, and how they change while a server runs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from convgrad.errors import Unauthenticated
from convgrad_service import keys
from convgrad_service.key_command import key as key_command
from convgrad_service.keys import KeyRing, KeysError, hash_of, new_key


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(keys, "_LOOK_S", 0.0)
    return tmp_path / "keys"


def made(file: Path, name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert key_command([name, "--file", str(file)]) == 0
    return capsys.readouterr().out.strip()


def test_a_key_lets_its_owner_in(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ada, bob = made(file, "ada", capsys), made(file, "bob", capsys)
    ring = KeyRing(file)
    assert ring.owner(f"Bearer {ada}") == "ada"
    assert ring.owner(f"bearer  {bob} ") == "bob"
    stored = file.read_text()
    assert ada not in stored
    assert bob not in stored
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer cg_wrong"])
def test_nobody_else_gets_in(
    file: Path, header: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    made(file, "ada", capsys)
    with pytest.raises(Unauthenticated, match="API key"):
        KeyRing(file).owner(header)


def test_a_hash_is_no_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ada = made(file, "ada", capsys)
    with pytest.raises(Unauthenticated):
        KeyRing(file).owner(f"Bearer {hash_of(ada)}")


def test_keys_come_and_go_while_the_server_runs(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ada = made(file, "ada", capsys)
    ring = KeyRing(file)
    bob = made(file, "bob", capsys)
    assert ring.owner(f"Bearer {bob}") == "bob"
    lines = file.read_text().splitlines()
    file.write_text("# ada has left\n" + "\n".join(line for line in lines if "ada" not in line))
    with pytest.raises(Unauthenticated):
        ring.owner(f"Bearer {ada}")
    assert ring.owner(f"Bearer {bob}") == "bob"


def test_a_slip_in_the_file_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ada = made(file, "ada", capsys)
    ring = KeyRing(file)
    file.write_text("ada: what?\n")
    assert ring.owner(f"Bearer {ada}") == "ada"
    assert "line 1: expected a name" in caplog.text
    file.unlink()
    assert ring.owner(f"Bearer {ada}") == "ada"
    with pytest.raises(KeysError, match="cannot be read"):
        KeyRing(file)


def test_a_name_is_one_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(file, "ada", capsys)
    assert key_command(["ada", "--file", str(file)]) == 1
    assert "expected another name" in capsys.readouterr().err
    assert key_command(["ada"]) == 0
    out, line = capsys.readouterr()
    assert line.strip() == f"ada:{hash_of(out.strip())}"


def test_keys_differ() -> None:
    assert len({new_key() for _ in range(100)}) == 100
