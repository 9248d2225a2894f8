"""Compiles the CPU kernels when a wheel (or an editable install) is built."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU_BACKEND = Path("service", "convgrad_service", "backends", "cpu")


class CpuKernelsBuildHook(BuildHookInterface[Any]):
    """Runs the CPU backend's own compile script and puts its libraries into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        compile_script = runpy.run_path(str(root / CPU_BACKEND / "compile.py"))
        libraries: list[Path] = compile_script["compile_libraries"]()
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        for library in libraries:
            inside = library.relative_to(root / "service")
            build_data["force_include"][str(library)] = str(inside)
