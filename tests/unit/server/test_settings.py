"""Settings: where they come from and what they refuse."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from convgrad_service.server.command import setting_fields
from convgrad_service.server.settings import Settings


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _, _ in setting_fields():
        monkeypatch.delenv(f"CONVGRAD_{name.upper()}", raising=False)


def test_the_environment_is_read_with_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_HTTP_PORT", "8123")
    monkeypatch.setenv("CONVGRAD_MAX_JSON_BYTES", "3MiB")
    monkeypatch.setenv("CONVGRAD_MALLOC_TUNING", "no")
    settings = Settings()
    assert settings.http_port == 8123
    assert settings.max_json_bytes == 3 * 2**20
    assert settings.malloc_tuning is False


def test_what_is_given_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONVGRAD_HTTP_PORT", "8123")
    assert Settings(http_port=1).http_port == 1


def test_the_server_binds_to_loopback_unless_told_otherwise() -> None:
    assert Settings().http_host == "127.0.0.1"


@pytest.mark.parametrize(
    "ports",
    [
        {"http_port": 8001},
        {"http_port": 9000, "grpc_port": 9000},
        {"http_port": 9000, "management_port": 9000},
    ],
)
def test_ports_that_are_the_same_are_refused(ports: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="expected distinct ones"):
        Settings(**ports)  # type: ignore[arg-type]


def test_ports_that_the_system_chooses_are_not_the_same() -> None:
    Settings(http_port=0, grpc_port=0, management_port=0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("http_port", "65536"),
        ("http_port", "x"),
        ("http_host", ""),
        ("threads", "0"),
        ("threads", "1025"),
        ("http_workers", "257"),
        ("cors_origins", "lab.example"),
        ("cors_origins", "https://lab.example/"),
        ("cors_origins", "https://lab.example,https://Lab.example"),
        ("max_queue", "-1"),
        ("max_connections", "4294967296"),
        ("max_header_bytes", "2GiB"),
        ("memory_bytes", "99999999999999999999"),
        ("grpc_max_message_bytes", "2GiB"),
        ("max_json_bytes", "0"),
        ("max_json_bytes", "much"),
        ("max_timeout_s", "nan"),
        ("max_timeout_s", "inf"),
        ("max_timeout_s", "0"),
        ("max_timeout_s", "1e12"),
        ("drain_s", "nan"),
        ("drain_s", "1e12"),
        ("max_problem_flops", "-1"),
        ("backend", "abacus"),
        ("log_level", "loud"),
    ],
)
def test_a_value_out_of_range_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"CONVGRAD_{name.upper()}", value)
    with pytest.raises(ValidationError):
        Settings()


@pytest.mark.parametrize("name", Settings.model_fields)
def test_an_empty_value_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"CONVGRAD_{name.upper()}", "")
    with pytest.raises(ValidationError, match=f"CONVGRAD_{name.upper()} is empty"):
        Settings()


def test_every_setting_says_what_it_is() -> None:
    for name, field, unit in setting_fields():
        assert field.description, name
        assert field.description.endswith("."), name
        if found := re.search(r"(?<!_per)_(bytes|s)$", name):
            assert unit == found[1], name


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ("CONVGRAD_HTP_PORT", "did you mean CONVGRAD_HTTP_PORT?"),
        ("CONVGRAD_MAX_QUEU", "did you mean CONVGRAD_MAX_QUEUE?"),
        ("convgrad_htp_port", "setting, did you mean CONVGRAD_HTTP_PORT?"),
        ("CONVGRAD_XYZ", "CONVGRAD_XYZ is not the name of a setting ["),
        ("CONVGRAD_RPC_PORT", "did you mean CONVGRAD_GRPC_PORT?"),
    ],
)
def test_a_misspelt_variable_is_refused(
    variable: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "9000")
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        Settings()


def test_variables_of_the_client_and_of_kubernetes_are_let_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in {
        "CONVGRAD_URL": "http://127.0.0.1:8000",
        "CONVGRAD_API_KEY": "key",
        "CONVGRAD_SERVICE_HOST": "10.0.0.1",
        "CONVGRAD_SERVICE_PORT": "8000",
        "CONVGRAD_SERVICE_PORT_HTTP": "8000",
        "CONVGRAD_PORT": "tcp://10.0.0.1:8000",
        "CONVGRAD_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "CONVGRAD_PORT_8000_TCP_ADDR": "10.0.0.1",
        "CONVGRAD_GPU_SERVICE_PORT_GRPC": "8001",
        "CONVGRAD_GPU_PORT_8001_TCP_PROTO": "tcp",
    }.items():
        monkeypatch.setenv(variable, value)
    Settings()
