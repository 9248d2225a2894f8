"""``convgrad kernels``: the cache is filled without a GPU, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from convgrad_service.backends.cuda import compile as compiling
from convgrad_service.backends.cuda.compile import Compiler
from convgrad_service.backends.cuda.device import device_count
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.nvrtc import CompileError, find_nvrtc
from convgrad_service.plans.cuda.device import H200
from convgrad_service.server import kernels_command
from convgrad_service.server.kernels_command import kernels


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    try:
        find_nvrtc()
    except CompileError as missing:
        pytest.skip(str(missing))


def test_fills_the_cache_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing lies in the package, as it may where there is a GPU.
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", tmp_path / "package")
    cache = tmp_path / "cache"
    wanted = ["--arch", "sm_80", "sm_90a", "--match", "split_sum", "--cache", str(cache)]
    assert kernels(wanted) == 0
    expected = sum("split_sum" in one.name for one in FAMILIES.instances())
    cubins = {path: path.stat().st_mtime_ns for path in cache.glob("*.cubin")}
    assert len(cubins) == 2 * expected > 0
    said = capsys.readouterr().out
    assert f"sm_90a: {expected} of {expected} kernels in {cache}" in said
    # An image's build runs as another user than the server.
    assert {path.stat().st_mode & 0o777 for path in cubins} == {0o644}
    assert kernels(wanted) == 0
    assert {path: path.stat().st_mtime_ns for path in cache.glob("*.cubin")} == cubins


def test_copies_only_the_wanted_kernels_out_of_a_cache_that_holds_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image's build keeps its cache from build to build; the image gets what is current."""
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", tmp_path / "package")
    cache, image = tmp_path / "cache", tmp_path / "image"
    command = ["--arch", "sm_80", "--cache", str(cache)]
    assert kernels([*command, "--match", "flat_sum"]) == 0
    (cache / "flat_sum-sm_80-0123.cubin").write_bytes(b"of an older source")
    kept = {path.name for path in cache.glob("*.cubin")}
    monkeypatch.setattr(Compiler, "compile", lambda *_: pytest.fail("compiled again"))
    assert kernels([*command, "--match", "flat_sum", "--copy-to", str(image)]) == 0
    copied = {path.name for path in image.iterdir()}
    assert copied == kept - {"flat_sum-sm_80-0123.cubin"}
    assert all((image / name).read_bytes() == (cache / name).read_bytes() for name in copied)


def test_what_an_image_compiled_ahead_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume for the cache starts empty; what lies in the package need not be compiled again."""
    ahead, volume = tmp_path / "ahead", tmp_path / "volume"
    assert kernels(["--arch", "sm_80", "--match", "flat_sum", "--cache", str(ahead)]) == 0
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", ahead)
    compiler = Compiler(find_nvrtc(), "sm_80", volume)
    monkeypatch.setattr(compiler, "compile", lambda instance: pytest.fail("compiled again"))
    instance = next(one for one in FAMILIES.instances() if one.entry == "flat_sum")
    assert compiler.cubin(instance).code
    assert not volume.exists()


def test_without_a_gpu_an_architecture_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    if device_count() == 0:
        assert kernels([]) == 1
        error = capsys.readouterr().err
        assert "0 GPUs" in error
        assert "--arch" in error


@pytest.mark.parametrize("capability", [(8, 6), (10, 3), (12, 0)], ids=str)
def test_without_an_architecture_that_of_the_gpu_is_compiled_for(
    capability: tuple[int, int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", tmp_path / "package")
    device = replace(H200, capability=capability)
    monkeypatch.setattr(kernels_command, "describe", lambda index: device)
    assert kernels(["--match", "flat_sum", "--cache", str(tmp_path / "cache")]) == 0
    expected = sum("flat_sum" in one.name for one in FAMILIES.instances())
    assert f"{device.architecture}: {expected} of {expected} kernels" in capsys.readouterr().out
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == expected > 0


def test_several_texts_may_match(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", tmp_path / "package")
    command = ["--arch", "sm_80", "--cache", str(tmp_path), "--match", "flat_sum<f", "row_copy"]
    assert kernels(command) == 0
    entries = {path.name.partition("-")[0] for path in tmp_path.glob("*.cubin")}
    assert entries == {"flat_sum", "row_copy"}


def test_what_matches_no_kernel_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kernels(["--arch", "sm_80", "--match", "no such", "--cache", str(tmp_path)]) == 1
    assert "'no such'" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["file/below", "file"])
def test_a_cache_that_takes_no_files_is_an_error_before_anything_is_compiled(
    folder: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", tmp_path / "package")
    monkeypatch.setattr(Compiler, "compile", lambda *_: pytest.fail("compiled"))
    (tmp_path / "file").touch()
    cache = str(tmp_path / folder)
    assert kernels(["--arch", "sm_80", "--match", "flat_sum", "--cache", cache]) == 1
    assert f"cannot write to {cache}: [Errno" in capsys.readouterr().err


def test_kernels_that_could_not_be_stored_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    monkeypatch.setattr(compiling, "DEFAULT_CACHE", tmp_path / "package")
    monkeypatch.setattr(compiling, "_store", lambda *_: None)
    assert kernels(["--arch", "sm_80", "--match", "flat_sum", "--cache", str(tmp_path)]) == 1
    assert "sm_80: 0 of " in capsys.readouterr().out


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_there_is_at_least_one_job(jobs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        kernels(["--arch", "sm_80", "--jobs", jobs])
    assert f"argument --jobs: {jobs} is less than 1" in capsys.readouterr().err
