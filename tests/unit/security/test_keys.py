"""API keys: what is stored, what is let in, and how they change while a server runs."""

from __future__ import annotations

import stat
import timeit
from pathlib import Path

import pytest

from convgrad.errors import PermissionDenied, Unauthenticated
from convgrad_service.engine.scheduling.quotas import KeyLimits
from convgrad_service.security import keys
from convgrad_service.security.keys import (
    KeyRing,
    KeysError,
    hash_of,
    new_key,
    require_method,
    require_path,
)
from convgrad_service.server.key_command import key as key_command


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
    assert ring.caller(f"Bearer {ada}").name == "ada"
    assert ring.caller(f"bearer  {bob} ").name == "bob"
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
        KeyRing(file).caller(header)


def test_a_hash_is_no_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ada = made(file, "ada", capsys)
    with pytest.raises(Unauthenticated):
        KeyRing(file).caller(f"Bearer {hash_of(ada)}")


def test_keys_come_and_go_while_the_server_runs(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ada = made(file, "ada", capsys)
    ring = KeyRing(file)
    bob = made(file, "bob", capsys)
    assert ring.caller(f"Bearer {bob}").name == "bob"
    stay = [line for line in file.read_text().splitlines() if not line.startswith("ada:")]
    file.write_text("\n".join(["# ada has left", *stay]))
    with pytest.raises(Unauthenticated):
        ring.caller(f"Bearer {ada}")
    assert ring.caller(f"Bearer {bob}").name == "bob"


def test_a_slip_in_the_file_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    ada = made(file, "ada", capsys)
    ring = KeyRing(file)
    file.write_text("ada: what?\n")
    assert ring.caller(f"Bearer {ada}").name == "ada"
    assert "line 1: expected a name" in caplog.text
    file.unlink()
    assert ring.caller(f"Bearer {ada}").name == "ada"
    with pytest.raises(KeysError, match="cannot be read"):
        KeyRing(file)


def test_a_name_is_one_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(file, "ada", capsys)
    assert key_command(["ada", "--file", str(file)]) == 1
    assert "expected another name" in capsys.readouterr().err
    assert key_command(["ada"]) == 0
    out, line = capsys.readouterr()
    assert line.strip() == f"ada:{hash_of(out.strip())}"


def test_a_name_may_have_two_keys_while_one_takes_the_others_place(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = made(file, "ada", capsys)
    ring = KeyRing(file)
    assert key_command(["ada", "--file", str(file), "--another"]) == 0
    new = capsys.readouterr().out.strip()
    assert {ring.caller(f"Bearer {key}").name for key in (old, new)} == {"ada"}
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    assert ring.caller(f"Bearer {new}").name == "ada"
    with pytest.raises(Unauthenticated):
        ring.caller(f"Bearer {old}")


@pytest.mark.parametrize(
    "expires", ["2030-01-01T00:00:00+00:00", "2030-01-01", "2030-01-01T00:00Z"]
)
def test_a_key_is_accepted_until_it_expires(
    file: Path, expires: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = new_key()
    file.write_text(f"ada:{hash_of(key)} expires={expires}")
    ring = KeyRing(file)
    moment_s = 1893456000.0  # 2030-01-01 in UTC
    monkeypatch.setattr(keys.time, "time", lambda: moment_s - 1)
    assert ring.caller(f"Bearer {key}").name == "ada"
    monkeypatch.setattr(keys.time, "time", lambda: moment_s)
    with pytest.raises(Unauthenticated, match="'ada' expired at 2030-01-01T00:00:00"):
        ring.caller(f"Bearer {key}")


def test_scopes(file: Path) -> None:
    every, some = new_key(), new_key()
    file.write_text(
        f"ada:{hash_of(every)} scopes=infer,metrics,admin\nbob:{hash_of(some)} scopes=metrics\n"
    )
    ring = KeyRing(file)
    assert ring.caller(f"Bearer {every}").scopes is None
    bob = ring.caller(f"Bearer {some}")
    for path in ("/metrics", "/v2", "/operations", "/v2/models/conv_fwd", "/v2/models/stats"):
        require_path(bob, "GET", path)
    require_path(bob, "POST", "/v2/repository/index")  # RepositoryIndex over gRPC needs none either
    for verb, path in (
        ("POST", "/conv_fwd"),
        ("POST", "/v2/models/conv_fwd/infer"),
        ("GET", "/tensors/weight"),
        ("PUT", "/tensors/weight"),
        ("GET", "/v2/systemsharedmemory/status"),
    ):
        with pytest.raises(PermissionDenied, match="'bob' has the scopes metrics; this needs"):
            require_path(bob, verb, path)
    for method in ("ServerMetadata", "ModelStatistics", "ModelConfig", "RepositoryIndex"):
        require_method(bob, method)
    for method in ("ModelInfer", "ModelStreamInfer", "CudaSharedMemoryRegister"):
        with pytest.raises(PermissionDenied):
            require_method(bob, method)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("scopes=", "one or more of admin, infer, metrics"), ("scopes=infer,root", "got 'infer,root'"),
     ("expires=soon", "expected a date or a time"), ("expires=", "got ''")],
)  # fmt: skip
def test_a_scope_or_a_time_that_is_none_is_refused(file: Path, words: str, expected: str) -> None:
    file.write_text(f"ada:{hash_of(new_key())} {words}\n")
    with pytest.raises(KeysError, match=f"line 1: .*{expected}"):
        KeyRing(file)


def test_keys_differ() -> None:
    assert len({new_key() for _ in range(100)}) == 100


def test_a_key_s_line_may_set_its_limits(file: Path) -> None:
    key, plain, free = new_key(), new_key(), new_key()
    lines = [
        f"ada:{hash_of(key)} max_inflight=4  max_inflight_bytes=1GiB max_requests_per_s=0.5 "
        "max_flops_per_s=1e12 # hers",
        f"bob:{hash_of(plain)}",
        f"eve:{hash_of(free)} max_inflight=none",
    ]
    file.write_text("\n".join(lines))
    usual = KeyLimits(inflight=2, inflight_bytes=1000)
    ring = KeyRing(file, usual)
    assert ring.caller(f"Bearer {key}").limits == (4, 2**30, 0.5, 1e12)
    assert ring.caller(f"Bearer {plain}").limits == usual
    assert ring.caller(f"Bearer {free}").limits == (None, 1000, None, None)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("max_inflight=0", "max_inflight: .* greater than 0, got '0' .'none' means no limit"),
        ("max_inflight_bytes=lots", "max_inflight_bytes: .*, got 'lots'"),
        ("max_requests_per_s=inf", "max_requests_per_s: .* finite"),
        ("inflight=1", "expected one of max_inflight=…, .*; got 'inflight=1'"),
        ("max_inflight", "got 'max_inflight'"),
    ],
)
def test_a_limit_that_is_none_is_refused(file: Path, words: str, expected: str) -> None:
    file.write_text(f"ada:{hash_of(new_key())} {words}\n")
    with pytest.raises(KeysError, match=f"line 1: .*{expected}"):
        KeyRing(file)


def test_the_command_writes_limits(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--max-inflight", "3", "--max-inflight-bytes", "2MiB", "--max-requests-per-s", "9"]
    assert key_command(["ada", "--file", str(file), *limits]) == 0
    made_key = capsys.readouterr().out.strip()
    assert KeyRing(file).caller(f"Bearer {made_key}").limits == (3, 2 * 2**20, 9.0, None)
    assert key_command(["bob", "--file", str(file), "--max-inflight", "many"]) == 1
    assert "max_inflight: " in capsys.readouterr().err
    assert "bob" not in file.read_text()


def test_ten_thousand_keys_are_looked_up_as_fast_as_one(file: Path) -> None:
    def lookup_s(count: int) -> float:
        presented = [new_key() for _ in range(count)]
        file.write_text("".join(f"key{i}:{hash_of(key)}\n" for i, key in enumerate(presented)))
        ring = KeyRing(file)
        sent = [f"Bearer {key}" for key in presented[-50:]]
        # The best of several, because the machine may have other work.
        return min(
            timeit.repeat(lambda: [ring.caller(one) for one in sent], number=1, repeat=20)
        ) / len(sent)

    assert lookup_s(10_000) < 3 * lookup_s(1)
