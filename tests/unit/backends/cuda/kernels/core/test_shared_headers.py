"""Headers of several kernels take template parameters: a macro is read by one kernel alone."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.sources import KERNELS


def included(path: Path, seen: set[Path]) -> set[Path]:
    """Return a source and all headers that it includes."""
    if path not in seen:
        seen.add(path)
        for name in re.findall(r'#include "([\w/.]+)"', path.read_text(encoding="utf-8")):
            included(KERNELS / name, seen)
    return seen


def read_in(path: Path) -> set[str]:
    """Return the names in a source, without comments and parameters of its own macros."""
    text = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
    own = ",".join(re.findall(r"#define \w+\(([^)]*)\)", text))
    return set(re.findall(r"\w+", text)) - set(re.findall(r"\w+", own))


def test_a_shared_header_reads_no_macro_of_an_instance() -> None:
    instances = FAMILIES.instances()
    macros = {name for instance in instances for name, _ in instance.defines}
    users = defaultdict(set)
    for source in {instance.source for instance in instances}:
        for path in included(KERNELS / source, set()):
            users[path].add(source)
    shared = [path for path, sources in users.items() if len(sources) > 1]
    assert len(shared) > 20
    assert {path.name: found for path in shared if (found := read_in(path) & macros)} == {}
