"""The package from outside: what it exports, what importing it costs, what it never imports."""

from __future__ import annotations

import ast
import graphlib
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import convgrad
from tests.support.fake_server import FakeServer, answer, ones
from tests.support.local_http import listening

PACKAGE = Path(convgrad.__file__).parent
HEAVY = ("httpx", "pydantic", "numpy", "ml_dtypes", "importlib.metadata", "asyncio")
SERVICE = ("convgrad_service", "fastapi", "starlette", "uvicorn", "prometheus_client", "msgspec")


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has after running ``code``."""
    program = f"{code}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    before = modules_after("pass")
    loaded = modules_after("import convgrad") - before
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize(
    "code",
    [
        "import convgrad; [getattr(convgrad, name) for name in convgrad.__all__]",
        "import convgrad.cli; convgrad.cli.main(['operations', '--offline'])",
        "import convgrad; convgrad.calls.conv_fwd([[[1.0]]], [[[1.0]]])",
    ],
)
def test_no_use_of_the_client_imports_the_service(code: str) -> None:
    assert not modules_after(
        f"import io, sys; sys.stdout = io.StringIO()\n{code}\nsys.stdout = sys.__stdout__"
    ) & set(SERVICE)


def test_it_works_where_sockets_and_shared_memory_are_those_of_windows() -> None:
    program = """
import select, sys
del select.poll
sys.modules["fcntl"] = None
import asyncio, convgrad
with convgrad.Client(sys.argv[1]) as client:
    print(client.conv_fwd([[[1.0]]], [[[1.0]]]).shape)
async def run():
    async with convgrad.AsyncClient(sys.argv[1]) as client:
        print((await client.conv_fwd([[[1.0]]], [[[1.0]]])).shape)
asyncio.run(run())
try:
    convgrad.Client(transport="shm")
except convgrad.ClientError as error:
    print(error)
"""
    with listening(FakeServer([answer({"output": ones(1, 1, 1)})])) as url:
        done = subprocess.run(
            [sys.executable, "-c", program, url], capture_output=True, text=True, check=True
        )
    first, second, third = done.stdout.splitlines()
    assert first == second == "(1, 1, 1)"
    assert third.startswith('transport="shm" works only on Linux: ')


def test_client_source_never_names_the_service() -> None:
    # Not even to say what is missing: `serve` finds it by an entry point's name alone.
    naming = [path for path in PACKAGE.rglob("*.py") if SERVICE[0] in path.read_text()]
    assert naming == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports within functions count; the package's own lazy names do not."""
    modules = {}
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "__init__.py"}:
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts).removesuffix(".__init__")] = path
    imports = {
        name: {
            found
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module is not None
            for found in {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            if found in modules and found != name
        }
        for name, path in modules.items()
    }
    sorter = graphlib.TopologicalSorter(imports)
    sorter.prepare()  # raises CycleError, which names the modules


def test_all_is_what_can_be_had() -> None:
    for name in convgrad.__all__:
        assert getattr(convgrad, name) is not None
    assert set(convgrad.__all__) <= set(dir(convgrad))
    with pytest.raises(AttributeError, match="Clint"):
        convgrad.Clint  # type: ignore[attr-defined]  # noqa: B018


def test_type_checkers_and_the_interpreter_see_the_same_names() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    seen = {
        alias.asname or alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(seen) | {"__version__"} == set(convgrad.__all__)
    for name, module in seen.items():
        if name not in ("calls", "errors"):
            assert module is not None
            assert getattr(convgrad, name) is getattr(__import__(module, fromlist=[name]), name)


def test_every_public_error_is_exported() -> None:
    tree = [convgrad.errors.ConvgradError]
    for error in tree:
        tree += error.__subclasses__()
        if error.__module__ == "convgrad.errors":
            assert error.__name__ in convgrad.__all__


def test_public_names_have_docstrings() -> None:
    for name in set(convgrad.__all__) - {"__version__"}:
        assert getattr(convgrad, name).__doc__, name


@pytest.mark.parametrize("home", [convgrad.Client, convgrad.AsyncClient, convgrad.calls])
def test_all_that_is_public_has_an_example_and_its_parameters_explained(home: Any) -> None:
    for name, each in inspect.getmembers(home, inspect.isfunction):
        if name.startswith("_"):
            continue
        text = inspect.getdoc(each) or ""
        assert "Examples\n--------\n>>> " in text, name
        if len(inspect.signature(each).parameters) > 1:
            assert "Parameters\n----------\n" in text, name
        if home is convgrad.AsyncClient:
            examples = text.partition("Examples\n")[2]
            assert "await " in examples or "async " in examples, name
        if home is convgrad.AsyncClient and name not in ("close", "is_live", "is_ready"):
            sibling = inspect.getdoc(getattr(convgrad.Client, name)) or ""
            assert text.partition("Examples\n")[0] == sibling.partition("Examples\n")[0], name
