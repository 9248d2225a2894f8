"""The shape of the project: which layer may import which, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLIENT, SERVICE = ROOT / "client", ROOT / "service"
# In the order of a request's way through them: each layer imports those before it.
LAYERS = ("problems", "plans", "backends", "examination", "engine", "oip", "http_api", "grpc_api")
# What of the client the service builds on: the contract and nothing of the SDK.
CONTRACT = {"_version", "check", "contract", "dtypes", "errors", "layers", "wire"}
MAX_LINES = 400
# Which files may read the environment, and why.
ENVIRONMENT_READERS = {
    "settings.py": "its job",
    "_environment.py": "the same for the client",
    "compile.py": "hands it on, unread, to the compiler that it starts",
    "logs.py": "gives a variable of gRPC's library its default",
    "service_manager.py": "where the service manager that starts a server listens",
    "hatch_metadata.py": "when a distribution is built: the address that its publisher gives it",
}
# Files that are longer, each with its reason. Better empty.
LONGER: dict[str, str] = {}

# Built at run time, so that this file does not hold them itself.
_HOSTS = ["pypi" + ".org", "pythonhosted" + ".org", "registry.npmjs" + ".org"]
_PATHS = ["/" + "home/", "/" + "Users/", "/" + "work/", "/" + "root/"]


def python_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "_native" not in path.parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """Every module that a file imports, wherever in it, in absolute form."""
    found: list[tuple[int, str]] = []
    root = next(root for root in (CLIENT, SERVICE, ROOT) if path.is_relative_to(root))
    package = path.relative_to(root).with_suffix("").parts[:-1]
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found.append((node.lineno, module))
            found += ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
    return tuple(found)


def tracked_files() -> list[Path]:
    """What git tracks or would: nothing that it ignores."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    names = listed.stdout.decode().split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def texts() -> Iterator[tuple[Path, list[str]]]:
    for path in tracked_files():
        try:
            yield path, path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # not text


def test_the_client_never_imports_the_service() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in python_files(CLIENT)
        for line, module in imports(path)
        if module.split(".")[0] == "convgrad_service"
    ]
    assert not wrong, wrong


def test_the_contract_stands_below_the_sdk() -> None:
    """The part of the client that the service imports does not need the rest."""
    inner = [path for name in CONTRACT for path in (CLIENT / "convgrad").glob(f"{name}*/**/*.py")]
    inner += [CLIENT / "convgrad" / f"{name}.py" for name in ("dtypes", "errors", "_version")]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in inner
        for line, module in imports(path)
        if module.startswith("convgrad.") and module.split(".")[1] not in CONTRACT
    ]
    assert inner
    assert not wrong, wrong


def test_the_service_imports_the_contract_alone() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in python_files(SERVICE)
        for line, module in imports(path)
        if module.startswith("convgrad.") and module.split(".")[1] not in CONTRACT
    ]
    assert not wrong, wrong


def test_layers_import_downwards() -> None:
    """problems < plans < backends < engine < oip < http_api, grpc_api."""
    wrong = []
    package = SERVICE / "convgrad_service"
    for height, layer in enumerate(LAYERS):
        above = {f"convgrad_service.{name}" for name in (*LAYERS[height + 1 :], "command")}
        for path in python_files(package / layer):
            for line, module in imports(path):
                if ".".join(module.split(".")[:2]) in above:
                    wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, wrong


def test_each_package_imports_of_others_what_it_may() -> None:
    """Beside the order of layers: who may not know whom, top-level modules included."""
    package = SERVICE / "convgrad_service"
    # What of `server` is below everything: values that are read, and no part that composes others.
    values = {"convgrad_service.server.settings", "convgrad_service.server.tls"}
    wrong = []
    for path in python_files(package):
        place = path.relative_to(package)
        whose = place.parts[0] if len(place.parts) > 1 else ""
        for line, module in imports(path):
            if not module.startswith("convgrad_service."):
                continue
            of = module.split(".")[1]
            below = ".".join(module.split(".")[:3])
            if (
                (whose == "" and of in (*LAYERS, "server", "security"))
                or (whose == "engine" and of == "backends" and not below.endswith(".base"))
                or (whose in LAYERS and of == "server" and below not in values)
                or (whose in LAYERS[:5] and of == "server")
            ):
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong, wrong


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports for types alone count as well; those within functions do not."""
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for root in (CLIENT, SERVICE)
        for path in python_files(root)
    }
    imported = {
        name: {each for each in imports_at_once(path, modules) if each in modules} - {name}
        for name, path in modules.items()
    }
    # Whatever imports nothing that is left cannot be part of a circle; nor can what is above it.
    while leaves := [name for name, others in imported.items() if not others & imported.keys()]:
        for name in leaves:
            del imported[name]
    assert not imported, sorted(imported)


def imports_at_once(path: Path, modules: Collection[str]) -> Iterator[str]:
    """The modules that a file imports as it is imported itself, or for types."""
    waiting: list[ast.AST] = list(parsed(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                part = f"{node.module}.{alias.name}"
                yield part if part in modules else node.module
        waiting += ast.iter_child_nodes(node)


def test_layers_exist() -> None:
    """So that the test above cannot pass by looking at nothing."""
    package = SERVICE / "convgrad_service"
    for layer in LAYERS:
        assert python_files(package / layer), layer


def test_problems_and_plans_import_no_device() -> None:
    """Plans are pure: they are tested where there is no GPU and no compiled kernel."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for layer in ("problems", "plans")
        for path in python_files(SERVICE / "convgrad_service" / layer)
        for line, module in imports(path)
        if module.split(".")[0] in ("ctypes", "cupy", "fastapi", "uvicorn", "subprocess")
    ]
    assert not wrong, wrong


def test_core_code_knows_no_transport() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for layer in ("problems", "plans", "backends", "engine", "oip")
        for path in python_files(SERVICE / "convgrad_service" / layer)
        for line, module in imports(path)
        if module.split(".")[0] in ("fastapi", "starlette", "uvicorn", "httpx", "grpc")
    ]
    assert not wrong, wrong


def test_the_environment_is_read_in_settings_alone() -> None:
    wrong = []
    for path in (*python_files(CLIENT), *python_files(SERVICE)):
        if path.name in ENVIRONMENT_READERS:
            continue
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Attribute | ast.Name):
                continue
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in ("environ", "environb", "getenv", "getenvb"):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} reads {name}")
    assert not wrong, wrong


def test_no_operation_is_chosen_by_comparing_its_name() -> None:
    """Operations are found in registries: no `if op == ...` ladders."""
    operations = ("conv_", "grouped_conv", "maxpool", "conv3d_")
    wrong = []
    for path in (*python_files(CLIENT), *python_files(SERVICE)):
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.Compare) or not isinstance(node.ops[0], ast.Eq | ast.NotEq):
                continue
            for side in (node.left, *node.comparators):
                text = side.value if isinstance(side, ast.Constant) else None
                if isinstance(text, str) and text.startswith(operations):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} compares with {text!r}")
    assert not wrong, wrong


def test_no_package_sits_directly_in_client_or_service() -> None:
    assert not (CLIENT / "__init__.py").exists()
    assert not (SERVICE / "__init__.py").exists()


def test_tests_share_helpers_and_not_test_modules() -> None:
    """What several tests need lies in tests/support."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in python_files(ROOT / "tests")
        for line, module in imports(path)
        if module.startswith("tests.") and ".test_" in module
    ]
    assert not wrong, wrong


def test_no_registry_host_and_no_path_of_one_machine() -> None:
    wrong = []
    for path, lines in texts():
        for number, line in enumerate(lines, 1):
            # A path within an address is no path of a machine.
            bare = re.sub(r"https?://\S+", "", line)
            held = [word for word in _HOSTS if word in line]
            held += [word for word in _PATHS if word in bare]
            wrong += [f"{path.relative_to(ROOT)}:{number} holds {word}" for word in held]
    assert not wrong, wrong


def test_files_are_short() -> None:
    """Each has one job and can be read in one sitting."""
    sources = (".py", ".cpp", ".hpp", ".cu", ".cuh", ".sh")
    long = {
        str(path.relative_to(ROOT)): len(lines)
        for path, lines in texts()
        if path.suffix in sources and len(lines) > MAX_LINES
    }
    assert long.keys() == LONGER.keys(), f"over {MAX_LINES} lines: {long}, allowed: {LONGER}"
