"""GPU kernels are compiled where there is no GPU: a sample of them, for every architecture.

`make compile-all` compiles all of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import pytest

from convgrad_service.backends.cuda.compile import Compiler, Resources
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.core.elements import CUDA_TYPES
from convgrad_service.backends.cuda.nvrtc import CompileError, Nvrtc, find_nvrtc
from convgrad_service.backends.cuda.sources import KERNELS, included, source_hash
from convgrad_service.plans.cuda.device import ARCHITECTURES
from convgrad_service.plans.cuda.program import Instance

MOST = 96
ARCHITECTURE = re.compile(r"__CUDA_ARCH__ [=>]= (\d+)")
SLOW = pytest.mark.slow


def sample(architecture: str) -> list[Instance]:
    """Of each kernel, one instance, and one of float32; the bfloat16 one of 16-bit types."""
    chosen: dict[tuple[str, str, bool], Instance] = {}
    for instance in FAMILIES.instances():
        if architecture in instance.architectures:
            key = instance.source, instance.entry, ("ELEMENT", "float") in instance.defines
            if key not in chosen or _prefers(instance, chosen[key]):
                chosen[key] = instance
    return list(chosen.values())


def _prefers(one: Instance, other: Instance) -> bool:
    return ("ELEMENT", "bf16") in one.defines and ("ELEMENT", "bf16") not in other.defines


@cache
def begins_at(source: str) -> frozenset[int]:
    """The architectures from which on a source, or what it includes, has other lines."""
    texts = [(KERNELS / name).read_text() for name in included(source)]
    return frozenset(int(found) // 10 for text in texts for found in ARCHITECTURE.findall(text))


def is_slow(architecture: str, instance: Instance) -> bool:
    """What has no lines for this architecture is compiled for sm_80."""
    number = int("".join(filter(str.isdigit, architecture)))
    return "sm_80" in instance.architectures and number not in {80, *begins_at(instance.source)}


SAMPLE = [(arch, instance) for arch in ARCHITECTURES for instance in sample(arch)]


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    return find_nvrtc()


Compiled = Mapping[Instance, Resources | CompileError]


@pytest.fixture(scope="session")
def compiled(nvrtc: Nvrtc) -> Callable[[str, bool], Compiled]:
    """What an architecture's instances use, or why they were refused, those of the slow tests or
    the others; compiled side by side."""

    def compile_one(architecture: str, instance: Instance) -> Resources | CompileError:
        try:
            used = Compiler(nvrtc, architecture, cache=None).compile(instance).resources
        except CompileError as error:
            return error
        assert used is not None
        return used

    @cache
    def of(architecture: str, slow: bool) -> Compiled:
        chosen = [one for one in sample(architecture) if is_slow(architecture, one) is slow]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            found = pool.map(partial(compile_one, architecture), chosen)
            return dict(zip(chosen, found, strict=True))

    return of


@pytest.mark.gpu_code
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("architecture", "instance"),
    [
        pytest.param(arch, one, id=f"{arch}-{one.name}", marks=[SLOW] if is_slow(arch, one) else [])
        for arch, one in SAMPLE
    ],
)
def test_compiles_without_spilling(
    compiled: Callable[[str, bool], Compiled], architecture: str, instance: Instance
) -> None:
    used = compiled(architecture, is_slow(architecture, instance))[instance]
    assert isinstance(used, Resources), str(used)
    assert used.registers > 0
    assert not used.spills, used


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sample_is_small(architecture: str) -> None:
    assert 10 <= len(sample(architecture)) <= MOST


def test_every_kernel_source_is_used() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "*.cu", "*.cuh"],
        cwd=KERNELS,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    used = {name for one in FAMILIES.instances() for name in included(one.source)}
    assert set(listed) <= used


def test_element_types_are_those_of_the_headers() -> None:
    text = (KERNELS / "core/elements.cuh").read_text()
    for name in ("f16", "bf16"):
        assert name in CUDA_TYPES.values()
        assert f"struct {name} " in text


def test_a_cubin_is_named_after_all_it_depends_on(nvrtc: Nvrtc, tmp_path: Path) -> None:
    first, second = sample("sm_80")[:2]
    names = {
        Compiler(nvrtc, arch, tmp_path).file_name(instance)
        for arch in ARCHITECTURES
        for instance in (first, second)
    }
    assert len(names) == 2 * len(ARCHITECTURES)


def test_a_changed_header_is_another_hash(tmp_path: Path) -> None:
    shutil.copytree(KERNELS, tmp_path, dirs_exist_ok=True)
    before = source_hash("layout/strided_copy.cu", tmp_path)
    assert before == source_hash("layout/strided_copy.cu")
    header = tmp_path / "core/elements.cuh"
    text = header.read_text()
    header.write_text("// A comment.\n" + text.replace(";\n", ";  /* and\nanother */\n\n", 1))
    assert source_hash("layout/strided_copy.cu", tmp_path) == before
    header.write_text(text + "struct Added {};\n")
    assert source_hash("layout/strided_copy.cu", tmp_path) != before


def test_what_looks_like_a_comment_in_a_string_counts(tmp_path: Path) -> None:
    hashes = set()
    for line in ('f("a//b");', 'f("a//c");', 'f("a/*b*/");', 'f("a/*c*/");', 'f("a");  // b'):
        (tmp_path / "one.cu").write_text(line)
        hashes.add(source_hash("one.cu", tmp_path))
    assert len(hashes) == 5


def test_in_a_debug_build_waits_have_an_end(nvrtc: Nvrtc) -> None:
    """And what does not wait is the same cubin."""
    plain, debug = (Compiler(nvrtc, "sm_90a", cache=None, debug=debug) for debug in (False, True))
    chosen = [
        one
        for one in sample("sm_90a")
        if one.source in ("conv/hopper_weight.cu", "layout/transpose.cu")
    ]
    changed = [one.source for one in chosen if plain.file_name(one) != debug.file_name(one)]
    assert {one.source for one in chosen} == {"conv/hopper_weight.cu", "layout/transpose.cu"}
    assert set(changed) == {"conv/hopper_weight.cu"}
    waiting = next(one for one in chosen if one.source == changed[0])
    codes = [each.compile(waiting).code for each in (plain, debug)]
    # The global timer is read in the one alone.
    assert codes[0] != codes[1]


def test_every_wait_for_a_barrier_has_a_bound() -> None:
    texts = {path.name: path.read_text(encoding="utf-8") for path in KERNELS.rglob("*.cu*")}
    waiting = {name for name, text in texts.items() if "mbarrier.try_wait" in text}
    assert waiting
    assert not [name for name in waiting if "const BoundedWait " not in texts[name]]


def test_the_cache_is_filled_once(nvrtc: Nvrtc, tmp_path: Path) -> None:
    compiler = Compiler(nvrtc, "sm_80", tmp_path / "cubins")
    instance = next(one for one in FAMILIES.instances() if one.source == "layout/strided_copy.cu")
    fresh, again = compiler.cubin(instance), compiler.cubin(instance)
    assert fresh.code == again.code
    assert fresh.resources is not None
    assert again.resources is None
    names = {path.name for path in (tmp_path / "cubins").iterdir()}
    assert names == {compiler.file_name(instance), ".gitignore"}
    assert (compiler.compiled, compiler.found) == (1, 1)
    assert compiler.compile_s > 0


@pytest.mark.parametrize("kept", [0, 10, 64, 2000, -1])
def test_a_file_that_was_cut_short_is_compiled_again(
    kept: int, nvrtc: Nvrtc, tmp_path: Path
) -> None:
    compiler = Compiler(nvrtc, "sm_80", tmp_path)
    instance = next(one for one in FAMILIES.instances() if one.source == "layout/strided_copy.cu")
    path, whole = tmp_path / compiler.file_name(instance), compiler.cubin(instance).code
    path.write_bytes(whole[:kept])
    assert not compiler.is_cached(instance)
    assert compiler.cubin(instance).code == whole == path.read_bytes()
    assert compiler.is_cached(instance)


def test_a_source_that_does_not_compile_is_told_with_the_log(nvrtc: Nvrtc) -> None:
    with pytest.raises(CompileError, match=r"(?s)bad\.cu failed.*no_such_thing"):
        nvrtc.compile("no_such_thing;", "bad.cu", ["--gpu-architecture=sm_80"])


def test_an_nvrtc_newer_than_the_driver_is_not_taken() -> None:
    with pytest.raises(CompileError, match="there is no NVRTC"):
        find_nvrtc(newest_major=11)


LOG = """ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    24 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 18136 bytes smem
"""


def test_resources_are_read_from_the_log() -> None:
    found = Resources.of(LOG)
    assert found == Resources(128, 24, 8, 12, 18136)
    assert found.spills
    assert not Resources.of("").spills
