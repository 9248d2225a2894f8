"""Compiles the CPU kernels when a wheel (or an editable install) is built.

The architecture is this machine's, or what ``_PYTHON_HOST_PLATFORM`` names (``linux-aarch64``), as
in any cross build of a wheel. Where there are no CPU kernels for the platform, the wheel is built
without them, and the server says what is missing when it starts.
"""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CPU_BACKEND = Path("convgrad_service", "backends", "cpu")


class CpuKernelsBuildHook(BuildHookInterface[Any]):
    """Runs the CPU backend's own compile script and puts its libraries into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        # The root is the checkout's, or, for the server's own distribution, this folder.
        service = Path(self.root, "service")
        if not service.is_dir():
            service = Path(self.root)
        compile_script = runpy.run_path(str(service / CPU_BACKEND / "compile.py"))
        system, _, architecture = sysconfig.get_platform().partition("-")
        if system != "linux" or architecture not in compile_script["LEVELS"]:
            self.app.display_warning(f"no CPU kernels for {system} on {architecture}")
            return
        libraries: list[Path] = compile_script["compile_libraries"](architecture)
        # The libraries hold no Python, so one wheel serves every version; glibc 2.17 is what the
        # compile script links against.
        oldest = "linux" if version == "editable" else "manylinux_2_17"
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{oldest}_{architecture}"
        for library in libraries:
            inside = library.relative_to(service)
            build_data["force_include"][str(library)] = str(inside)
