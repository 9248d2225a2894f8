"""The README tells the truth: its tables are the stored results, its commands and links exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.perf import peer_times
from tests.perf.readme_tables import README, TABLES, rendered

ROOT = README.parent
TEXT = README.read_text()
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DOCUMENTS = sorted({*TABLES, CONTRIBUTING, *(ROOT / "docs").rglob("*.md")})


@pytest.mark.parametrize("document", TABLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_what_the_stored_results_say(document: Path) -> None:
    text = document.read_text()
    assert rendered(document) == text, "run `make readme`"
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(TABLES[document])


def test_what_is_left_to_pytorch_is_what_the_stored_results_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = peer_times.TABLE.read_text(encoding="utf-8")
    monkeypatch.setattr(peer_times, "TABLE", tmp_path / "peer_times.json")
    peer_times.main()
    assert peer_times.TABLE.read_text(encoding="utf-8") == shipped, "run `make readme`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text)
    for target, anchor in links:
        file = document.parent / target if target else document
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            assert anchor in {_anchor(title) for title in titles}, (target, anchor)


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")


def test_make_targets_exist() -> None:
    texts = [document.read_text() for document in DOCUMENTS]
    named = {name for text in texts for name in re.findall(r"\bmake ([a-z][a-z-]*)", _code(text))}
    assert {"demo", "test", "serve", "load", "soak", "ray", "check-deploy"} <= named
    for target in sorted(named):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_ci_runs_the_readmes_test_command() -> None:
    commands = [
        line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("make ")
    ]
    assert commands[:2] == ["make check", "make test"]
    assert {"make docs", "make check-clients", "make dist"} <= set(commands)
    assert "make check-deploy IF_POSSIBLE=1" in commands
    assert "`make test`" in TEXT


def test_paths_exist() -> None:
    for document in DOCUMENTS:
        for name in re.findall(
            r"`((?:client|service|tests|deploy|docs|examples)/[\w./-]+)`", document.read_text()
        ):
            assert (ROOT / Path(name)).exists(), (document, name)


def test_the_readme_is_short() -> None:
    """Tables made by `make readme` do not count."""
    words = re.sub(r"<!-- table.*?<!-- end -->", "", TEXT, flags=re.DOTALL).split()
    assert len(words) <= 1000


def test_the_tree_names_what_there_is() -> None:
    """Every path in it exists, and no package is left out."""
    named = _tree()
    for path in named:
        assert list(path.parent.glob(path.name)), f"CONTRIBUTING names {path}, which is not there"
    for base in ("client/convgrad", "service/convgrad_service", "tests"):
        for package in {path.parent for path in (ROOT / base).glob("*/__init__.py")}:
            assert any(path.is_relative_to(package) for path in named), f"no {package} in the tree"


def _tree() -> list[Path]:
    """The paths in the section "Where things are"."""
    tree = CONTRIBUTING.read_text().split("## Where things are")[1].split("```")[1].strip("\n")
    base, paths = ROOT, []
    for line in tree.splitlines():
        names = line[:28].split()  # descriptions begin at one column
        if not line.startswith(" "):
            base = ROOT / names.pop(0)
        paths += [base, *(base / name for name in names)]
    return paths


def _code(text: str) -> str:
    """What stands in code blocks and between backticks."""
    return "\n".join(
        [*re.findall(r"```bash\n(.*?)```", text, re.DOTALL), *re.findall(r"`([^`\n]+)`", text)]
    )
