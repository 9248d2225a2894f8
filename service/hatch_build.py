"""Compiles the CPU kernels when a wheel (or an editable install) is built.

Where there are no CPU kernels for the platform, the wheel is built without them: the client works
everywhere, and the server says what is missing when it starts.
"""

from __future__ import annotations

import platform
import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU_BACKEND = Path("service", "convgrad_service", "backends", "cpu")


class CpuKernelsBuildHook(BuildHookInterface[Any]):
    """Runs the CPU backend's own compile script and puts its libraries into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        compile_script = runpy.run_path(str(root / CPU_BACKEND / "compile.py"))
        if (
            not sys.platform.startswith("linux")
            or compile_script["machine"]() not in (compile_script["LEVELS"])
        ):
            self.app.display_warning(
                f"no CPU kernels for {sys.platform} on {platform.machine()}: client only"
            )
            return
        libraries: list[Path] = compile_script["compile_libraries"]()
        # The libraries hold no Python, so one wheel serves every version; glibc 2.17 is what the
        # compile script links against.
        system = "linux" if version == "editable" else "manylinux_2_17"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{system}_{platform.machine()}"
        for library in libraries:
            inside = library.relative_to(root / "service")
            build_data["force_include"][str(library)] = str(inside)
