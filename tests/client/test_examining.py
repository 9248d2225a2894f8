"""``convgrad verify``, ``time`` and ``plan``, and pytest's plugin, against a real server."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from convgrad import Client, check, layers
from convgrad.cli import main
from convgrad.errors import ProblemTooLarge
from convgrad_service.backends.cpu import CpuBackend
from tests.support.http_server import serving

LAYER = "mb2ic8ih9oc8oh9kh3ph1"
ROOT = Path(__file__).parents[2]
KERNELS = """
import convgrad
from convgrad.check.convolve import NumpyConvolver
from convgrad.check.operations import targets

def right(grad_output, weight, **parameters):
    (target,) = targets("conv_bwd_data", {"grad_output": grad_output, "weight": weight},
                        parameters, NumpyConvolver()).values()
    n, g, c, *size = target.shape
    return target.part((0, n)).value.reshape(n, g * c, *size).astype(grad_output.dtype)

def wrong(grad_output, weight, **parameters):
    weight = weight.copy()
    weight[:, :, 1, 0] = 0
    return right(grad_output, weight, **parameters)

def narrow(grad_output, weight, **parameters):
    assert grad_output.shape[1] < 8, "at most 7 channels"
    return right(grad_output, weight, **parameters)
"""
TESTS = """
from kernels import right, wrong

def test_right(convgrad_verify):
    found = convgrad_verify(right, "mb2ic8ih9oc8oh9kh3ph1")
    assert found.passed

def test_layers(convgrad_verify, convgrad_layer):
    convgrad_verify(right, convgrad_layer, operation="conv_bwd_data")

def test_wrong(convgrad_verify):
    convgrad_verify(wrong, "mb2ic8ih9oc8oh9kh3ph1", operation="conv_bwd_data")
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(CpuBackend(threads=1), log_level="error") as server:
        yield server.url


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a kernel that is right, one that is not, and their results for seed 7."""
    (tmp_path / "kernels.py").write_text(KERNELS)
    (tmp_path / "test_kernels.py").write_text(TESTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "kernels", raising=False)
    import kernels  # type: ignore[import-not-found]

    shapes, parameters = layers.arguments("conv_bwd_data", layers.parse(LAYER))
    tensors = {name: check.draw(name, shape, "float32", 7) for name, shape in shapes.items()}
    for name in ("right", "wrong"):
        np.save(tmp_path / f"{name}.npy", getattr(kernels, name)(**tensors, **parameters))
    for name, each in zip(
        ("y", "sum"), check.linear_pair("weight", tensors["weight"]), strict=True
    ):
        changed = {**tensors, "weight": each}
        np.save(tmp_path / f"{name}.npy", kernels.right(**changed, **parameters))
    for name, array in tensors.items():
        np.save(tmp_path / f"{name}.npy", array)
    return tmp_path


@pytest.mark.parametrize("local", [False, True])
def test_files_are_verified(
    local: bool, folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ["--local"] if local else ["--url", url]
    asked = ["verify", "conv_bwd_data", "--layer", LAYER, "--seed", "7", *where]
    assert main([*asked, "--mine", "right.npy", "--second", "right.npy"]) == 0
    assert "PASSED" in capsys.readouterr().out
    assert main([*asked, "--mine", "right.npy", "--linear", "weight=y.npy,sum.npy"]) == 0
    assert "linearity in weight holds" in capsys.readouterr().out
    assert main([*asked, "--mine", "right.npy", "--linear", "weight=sum.npy,y.npy"]) == 1
    assert "it is not linear in weight" in capsys.readouterr().out
    assert main([*asked, "--mine", "grad_input=wrong.npy"]) == 1
    told = capsys.readouterr().out
    assert "dropped-terms" in told
    assert "tap (1, 0) is missing" in told
    given = [f"--input={name}={name}.npy" for name in ("grad_output", "weight")]
    alone = ["verify", "conv_bwd_data", *given, "--param", "padding=1", *where]
    assert main([*alone, "--mine", "right.npy", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def test_a_kernel_is_verified_on_a_suite(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [each for each in layers.suite("networks") if each.layer.ndim == 1][:2]
    small = [each._replace(layer=layers.parse("mb1ic4iw9oc4kw3pw1")) for each in few]
    small = [each._replace(layer=_named(each.layer)) for each in small]
    monkeypatch.setattr(layers, "suite", lambda name: small)
    asked = ["verify", "conv_bwd_data", "--suite", "networks", "--kernel", "kernels:right"]
    assert main([*asked, "--local"]) == 0
    assert capsys.readouterr().out.count("PASSED") == 4
    one = ["verify", "conv_bwd_data", "--layer", LAYER, "--url", url, "--kernel", "kernels:wrong"]
    assert main(one) == 1
    assert capsys.readouterr().out.count("FAILED") == 2


def test_a_kernel_that_raises_is_reported_with_its_arguments(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["verify", "conv_bwd_data", "--kernel", "kernels:narrow", "--local"]
    assert main([*asked, "--layer", LAYER]) == 1
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert "convgrad: kernels:narrow(grad_output=float32[2, 8, 9, 9], weight=float32" in told
    assert "raised AssertionError: at most 7 channels" in told
    few = [each for each in layers.suite("networks") if each.layer.ndim == 1][:1]
    words = (LAYER, "mb1ic4iw9oc4kw3pw1")
    suite = [few[0]._replace(layer=_named(layers.parse(each))) for each in words]
    monkeypatch.setattr(layers, "suite", lambda name: suite)
    assert main([*asked, "--suite", "networks"]) == 1
    told = capsys.readouterr().out
    assert "not verified: kernels:narrow(" in told
    assert told.count("PASSED") == 2


def test_layers_are_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layers"]) == 0
    assert "resnet50: 23 layers" in capsys.readouterr().out.splitlines()
    assert main(["layers", "resnet50"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 23
    assert listed[2] == "64>64g1_56x56_k3x3_s1_d1  mb1ic64ih56oc64oh56kh3ph1  x3"
    assert main(["layers", "Conv2d(64, 64, 3, padding=1) on 1x64x56x56"]) == 0
    told = capsys.readouterr().out
    assert "64 → 64 channels, 56x56 → 56x56" in told
    assert "conv_bwd_data" in told
    assert "benchdnn: mb1ic64ih56oc64oh56kh3ph1" in told
    assert main(["layers", "ck_headlines"]) == 1
    assert "did you mean 'ck_headline'?" in capsys.readouterr().err


def test_of_a_suite_every_layer_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that do not fit the operation are skipped, and an error does not end the suite."""
    few = [each for each in layers.suite("networks") if each.layer.ndim == 1][:1]
    words = ("--pool mb1ic4ih8kh2sh2", "mb1ic4iw9oc4kw3pw1", "mb1ic4iw8oc4kw3pw1")
    suite = [few[0]._replace(layer=_named(layers.parse(each))) for each in words]
    monkeypatch.setattr(layers, "suite", lambda name: suite)
    judge = check.kernel

    def limited(run: object, operation: str, layer: str, **more: object) -> check.KernelCheck:
        if "iw9" in layer:
            raise ProblemTooLarge("the reference takes too long")
        return judge(run, operation, layer, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(check, "kernel", limited)
    asked = ["verify", "conv_bwd_data", "--suite", "networks", "--kernel", "kernels:right"]
    assert main([*asked, "--local"]) == 1
    told = capsys.readouterr().out
    assert "not verified: the reference takes too long" in told
    assert told.count("PASSED") == 2
    assert "pool" not in told
    assert main(["verify", "avg_pool_fwd", *asked[2:], "--local"]) == 2
    assert "avg_pool_fwd takes no layer of networks" in capsys.readouterr().err


def _named(layer: layers.Layer) -> layers.Layer:
    import dataclasses

    return dataclasses.replace(layer, name=layers.text(layer))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layer", LAYER], "either --mine FILE or --kernel"),
        (["--layer", LAYER, "--mine", "x.npy", "--kernel", "a:b"], "either --mine FILE or"),
        (["--suite", "networks", "--mine", "right.npy"], "--suite needs --kernel"),
        (["--layer", LAYER, "--kernel", "kernels"], "expected MODULE:FUNCTION"),
        (["--layer", LAYER, "--kernel", "kernels:none"], "--kernel:"),
        (["--layer", LAYER, "--mine", "grad=right.npy"], "has no output 'grad'"),
        (["--layer", LAYER, "--mine", "none.npy"], "cannot read"),
        (["--layer", LAYER, "--mine", "right.npy", "--linear", "weight"], "expected TENSOR=FILE,"),
    ],
)
def test_a_wrong_command_line_is_said(
    arguments: list[str], sentence: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "conv_bwd_data", *arguments, "--local"]) == 2
    assert sentence in capsys.readouterr().err


def test_shapes_on_the_command_line(
    folder: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = ["--shape", "grad_output=1x4x5x3", "--shape", "weight=4x2x3x2"]
    for command in ("plan", "time"):
        assert main([command, "conv_bwd_data", *shapes, "--url", url]) == 0
        told = capsys.readouterr().out
        assert told.startswith("conv_bwd_data on ")
        assert ", 1 piece\n" in told
        # They take no tensors.
        assert main([command, "conv_bwd_data", *shapes, "--input", "weight=w.npy"]) == 2
        assert "unrecognized arguments: --input" in capsys.readouterr().err
    grad_output = check.draw("grad_output", (1, 4, 5, 3), "float32", 3)
    weight = check.draw("weight", (4, 2, 3, 2), "float32", 3)
    with Client(url) as client:
        np.save(folder / "odd.npy", client.conv_bwd_data(grad_output, weight))
    for where in (["--url", url], ["--local"]):
        asked = ["verify", "conv_bwd_data", *shapes, "--seed", "3", *where]
        assert main([*asked, "--mine", str(folder / "odd.npy")]) == 0
        assert "PASSED" in capsys.readouterr().out
    assert main(["plan", "conv_bwd_data", "--shape", "weight=4,2,3,2", "--url", url]) == 2
    assert "expected weight=8x64x56x56 or the like" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given",
    [["--layer", LAYER], ["--shape", "grad_output=1x3x5x8", "--shape", "weight=8x3x2x4"]],
    ids=["layer", "shapes"],
)
def test_time_and_plan(url: str, capsys: pytest.CaptureFixture[str], given: list[str]) -> None:
    problem = ["conv_bwd_data", *given, "--dtype", "bfloat16", "--layout", "NHWC"]
    assert main(["plan", *problem, "--url", url]) == 0
    told = capsys.readouterr().out
    assert "; roofline " in told
    (again,) = (line for line in told.splitlines() if "repeat with: " in line)
    assert " ".join(given) in again
    # What it says asks the same once more.
    assert main([*shlex.split(again.partition("repeat with: convgrad ")[2]), "--url", url]) == 0
    assert capsys.readouterr().out == told
    short = ["--budget-s", "0.1", "--peers", "none", "--candidates", "--standard-error", "0.4"]
    assert main(["time", *problem, *short, "--url", url]) == 0
    told = capsys.readouterr().out
    assert "cold: " in told
    assert "of the roofline" in told
    assert "--budget-s 0.1" in told
    assert "--candidates" in told
    assert main(["time", *problem, "--budget-s", "1000", "--url", url]) == 1
    assert "times for at most" in capsys.readouterr().err


def test_pytests_plugin(folder: Path, url: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "convgrad.pytest_plugin", "--no-header"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT / 'client'}"}
    told = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--convgrad-url", url, str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        cwd=folder,
    ).stdout
    assert "1 failed, 4 passed" in told, told
    assert "integers inputs: grad_input" in told
    assert "tap (1, 0) is missing from the sum" in told
    assert "Traceback" not in told
