"""The TypeScript client: its generated types are current, it compiles, and it calls a real server,
from Node and from a browser."""

from __future__ import annotations

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import convgrad
from convgrad.contract import OPERATIONS
from convgrad.errors import CODES
from convgrad_service.backends.cpu import CpuBackend
from tests.deploy.openapi_document import document
from tests.support.http_server import LiveServer, serving

pytestmark = pytest.mark.deploy

CLIENT = Path(__file__).resolve().parents[2] / "client" / "typescript"
PAGE = """<!doctype html><body>pending<script type="module">
import { Client, Tensor } from "./dist/index.js";
try {
  const client = new Client("%s");
  const { grad_input, report } = await client.conv_bwd_data({
    grad_output: Tensor.full([1, 4, 8, 8], 1), weight: Tensor.full([4, 2, 3, 3], 1), padding: 1,
  });
  document.body.textContent = `${grad_input} ${Math.max(...grad_input.data)} ${report.backend}`;
} catch (error) { document.body.textContent = error.stack; }
</script>"""


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    with serving(CpuBackend(), log_level="error", cors_origins="*") as server:
        yield server


@pytest.fixture(scope="module", autouse=True)
def _openapi() -> None:
    if not (CLIENT / "node_modules").exists():
        pytest.skip("needs `npm ci` in client/typescript")
    (CLIENT / "openapi.json").write_text(json.dumps(document()))


def run(*command: str | Path, cwd: Path = CLIENT, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the package as it would be published."""
    folder = tmp_path_factory.mktemp("packed")
    run("npm", "pack", "--silent", "--pack-destination", folder)
    (tarball,) = folder.glob("*.tgz")
    return tarball


def test_the_types_match_the_openapi_document(tmp_path: Path) -> None:
    made = tmp_path / "openapi.ts"
    run("npm", "run", "--silent", "types", "--", made)
    assert made.read_text() == (CLIENT / "src" / "openapi.ts").read_text(), (
        "run `make typescript-types`"
    )


def test_its_own_tests(live: LiveServer) -> None:
    run("npm", "test", CONVGRAD_URL=live.url)


def test_retryable_codes_match_the_servers() -> None:
    source = (CLIENT / "src" / "errors.ts").read_text()
    (listed,) = re.findall(r"RETRYABLE.*?\[(.*?)\]", source, re.DOTALL)
    assert set(re.findall(r'"([a-z-]+)"', listed)) == {
        code for code, row in CODES.items() if row.retryable
    }


def test_every_operation_is_a_method() -> None:
    source = (CLIENT / "src" / "client.ts").read_text()
    assert set(re.findall(r'return this\.compute\("(\w+)", request, options\)', source)) == set(
        OPERATIONS
    )


def test_the_package_installs_and_its_readme_runs(
    packed: Path, live: LiveServer, tmp_path: Path
) -> None:
    assert json.loads((CLIENT / "package.json").read_text())["version"] == convgrad.__version__
    assert packed.name == f"convgrad-{convgrad.__version__}.tgz"
    (tmp_path / "package.json").write_text('{"type": "module"}')
    run("npm", "install", "--silent", "--offline", packed, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "node_modules").iterdir() if path.is_dir()] == [
        "convgrad"
    ]
    (snippet,) = re.findall(r"```ts\n(.*?)```", (CLIENT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "snippet.js").write_text(snippet.replace("http://127.0.0.1:8000", live.url))
    said = run("node", "snippet.js", cwd=tmp_path)
    assert said.startswith("float32[8, 32, 56, 56] ")


def test_a_browser_calls_a_server_of_another_origin(
    packed: Path, live: LiveServer, tmp_path: Path
) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    shutil.unpack_archive(packed, tmp_path, format="gztar")
    (tmp_path / "package" / "index.html").write_text(PAGE % live.url)
    with _pages(tmp_path / "package") as origin:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        options = [f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=20000"]
        page = run(*command, *options, f"{origin}/index.html")
    assert "float32[1, 2, 8, 8] 36 cpu" in page, page


@contextmanager
def _pages(folder: Path) -> Iterator[str]:
    """Serve a folder's files over HTTP; yield the URL."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Do not log."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
