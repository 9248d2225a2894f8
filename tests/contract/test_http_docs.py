"""What the server says about itself: OpenAPI, the docs page, the list of operations."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from convgrad.contract import OPERATIONS
from convgrad.errors import CODES
from convgrad_service.http_api import openapi
from tests.support.fake_backends import Zeros
from tests.support.http_server import JSON, SAFETENSORS, LiveServer, serving

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def document(live: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = live.get("/openapi.json").json()
    return found


def test_others_are_answered_while_openapi_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, continued = threading.Event(), threading.Event()
    made = openapi._document

    def waiting(*arguments: Any) -> dict[str, Any]:
        begun.set()
        assert continued.wait(60)
        return made(*arguments)

    monkeypatch.setattr(openapi, "_document", waiting)
    with serving(Zeros()) as server, ThreadPoolExecutor(2) as asking:
        try:
            answers = [asking.submit(server.get, "/openapi.json") for _ in range(2)]
            assert begun.wait(60)
            assert server.get("/v2/health/live").status_code == 200
        finally:
            continued.set()
        first, second = (answer.result(60).json() for answer in answers)
    assert first == second
    assert "/conv_bwd_data" in first["paths"]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_openapi_describes_every_operation(document: dict[str, Any], operation: str) -> None:
    post = document["paths"][f"/{operation}"]["post"]
    assert post["summary"]
    assert post["requestBody"]["content"].keys() == {JSON, SAFETENSORS, "multipart/form-data"}
    numpys = {"application/x-npy", "application/x-npz"}
    assert post["responses"]["200"]["content"].keys() == {JSON, SAFETENSORS, *numpys}
    for status, answer in post["responses"].items():
        if status != "200":
            assert answer == {"$ref": f"#/components/responses/Error{status}"}
            named = document["components"]["responses"][f"Error{status}"]
            assert named["content"].keys() == {PROBLEM}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_examples_in_openapi_work(
    live: LiveServer, document: dict[str, Any], operation: str
) -> None:
    body = document["paths"][f"/{operation}"]["post"]["requestBody"]["content"][JSON]["example"]
    answer = live.post(json.dumps(body).encode(), path=f"/{operation}")
    assert answer.status_code == 200, answer.text


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)))
    assert references
    for reference in references:
        found: Any = document
        for part in reference.removeprefix("#/").split("/"):
            found = found[part]


def test_tensors_are_named_everywhere(document: dict[str, Any]) -> None:
    """Generators of clients make types of named schemas alone."""
    schemas = document["components"]["schemas"]
    for kind in ("Tensor", "FloatTensor", "IndexTensor"):
        forms = [form["$ref"].rpartition("/")[2] for form in schemas[kind]["oneOf"]]
        assert len(forms) == 4
        assert "StoredTensor" in forms
        for form in forms:
            assert schemas[form]["title"] == form
    for operation in OPERATIONS.values():
        properties = schemas[operation.request.__name__]["properties"]
        for tensor in operation.tensors:
            kind = "IndexTensor" if tensor == "indices" else "FloatTensor"
            assert f'"#/components/schemas/{kind}"' in json.dumps(properties[tensor]), tensor


def test_a_tensor_has_one_form_even_to_lenient_readers(document: dict[str, Any]) -> None:
    """Generated clients take a missing field for null, which an untyped field would allow."""
    schemas = document["components"]["schemas"]
    for kind in ("Tensor", "FloatTensor", "IndexTensor", "OutputTensor"):
        for form in schemas[kind]["oneOf"]:
            described = schemas[form["$ref"].rpartition("/")[2]]
            assert all("type" in described["properties"][name] for name in described["required"])


def test_choices_have_no_default(document: dict[str, Any]) -> None:
    """openapi-generator's clients for Go would not compile."""
    for schema in document["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if "oneOf" in field and "default" in field:
                assert (field["default"], field["oneOf"][-1]) == (None, {"type": "null"})
                assert "By default" in field["description"], name


def test_generated_clients_have_names_and_answers(document: dict[str, Any]) -> None:
    operations = [
        operation
        for item in document["paths"].values()
        for method, operation in item.items()
        if method != "parameters"
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(set(names)) == len(names)
    assert {"server_ready", "model_metadata", "system_shared_memory_register"} <= set(names)
    for operation in operations:
        assert "__" not in operation["operationId"]
        assert operation["responses"]["200"]["content"], operation["operationId"]


def test_the_registration_of_a_region_is_described(document: dict[str, Any]) -> None:
    def required(kind: str) -> list[str]:
        post = document["paths"][f"/v2/{kind}sharedmemory/region/{{name}}/register"]["post"]
        fields: list[str] = post["requestBody"]["content"][JSON]["schema"]["required"]
        return fields

    assert required("system") == ["key", "byte_size"]
    assert required("cuda") == ["raw_handle", "device_id", "byte_size"]


def test_stored_tensors_are_described(document: dict[str, Any]) -> None:
    assert document["paths"]["/tensors"].keys() == {"get"}
    assert {"put", "get", "delete"} <= document["paths"]["/tensors/{name}"].keys()


def test_a_server_without_keys_asks_for_none(document: dict[str, Any]) -> None:
    assert "security" not in document
    assert "securitySchemes" not in document["components"]


def test_the_codes_are_the_tables(document: dict[str, Any]) -> None:
    problem = document["components"]["schemas"]["Problem"]
    assert problem["properties"]["code"]["enum"] == list(CODES)


def test_the_docs_need_no_network(live: LiveServer) -> None:
    page = live.get("/docs").text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert len(links) >= 3
    for link in links:
        if not link.startswith("data:"):
            assert link.startswith("/docs/assets/")
            assert live.get(link).status_code == 200
    assert "//" not in re.sub(r"https?://(localhost|127\.0\.0\.1)", "", " ".join(links))


def test_operations_lists_what_each_takes(live: LiveServer) -> None:
    listed = live.get("/operations").json()
    assert [operation["name"] for operation in listed["operations"]] == list(OPERATIONS)
    assert listed["backend"] == "zeros"
    assert listed["media_types"] == [JSON, SAFETENSORS, "multipart/form-data"]
    assert listed["limits"]["body_bytes"][JSON] == 256 * 1024
    first = listed["operations"][0]
    assert first["tensors"]["weight"]["required"] is True
    assert first["tensors"]["accumulate"]["required"] is False
    assert "stride" in first["parameters"]["properties"]
    assert "weight" not in first["parameters"]["properties"]
    assert first["dtypes"] == ["float16", "bfloat16", "float32", "float64"]
    assert "NHWC" in first["layouts"]
