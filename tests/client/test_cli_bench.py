"""``convgrad bench``: what it sends, what it makes of the answers, what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from convgrad.cli import main
from convgrad.wire import safetensors
from tests.support.fake_server import REPORT, FakeServer, ones, problem
from tests.support.local_http import listening

SHAPES = ["--shape", "grad_output=1x2x4", "--shape", "weight=2x1x2"]


def answers(*compute_s: float) -> Iterator[httpx.Response]:
    for seconds in compute_s:
        report = json.dumps({**REPORT, "compute_s": seconds})
        content = b"".join(
            bytes(memoryview(chunk))
            for chunk in safetensors.encode({"grad_input": ones(1, 1, 5)}, {"report": report})
        )
        headers = {
            "Content-Type": "application/vnd.safetensors",
            "Server-Timing": f"compute;dur={seconds * 1e3}, queue;dur=2",
        }
        yield httpx.Response(200, content=content, headers=headers)


def bench(fake: FakeServer, *options: str) -> int:
    with listening(fake) as url:
        return main(["bench", "conv_bwd_data", "--url", url, *options])


def test_it_warms_up_repeats_and_gives_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    # The first two are not timed; of ten, nearest rank, the 9th is p90 and the 10th p99.
    timed = [0.001 * n for n in (7, 1, 9, 3, 5, 2, 8, 4, 10, 6)]
    fake = FakeServer(answers(9, 9, *timed))
    options = [*SHAPES, "--dtype", "bfloat16", "--stride", "2"]
    assert bench(fake, *options, "--warm-up", "2", "--repeats", "10", "--json") == 0
    assert len(fake.requests) == 12
    assert len({request.content for request in fake.requests}) == 1
    tensors, parameters = fake.sent()
    assert {name: (array.dtype.name, array.shape) for name, array in tensors.items()} == {
        "grad_output": ("bfloat16", (1, 2, 4)),
        "weight": ("bfloat16", (2, 1, 2)),
    }
    assert len(np.unique(tensors["grad_output"])) == 8  # random, not constant
    assert parameters == {"stride": 2}
    found = json.loads(capsys.readouterr().out)
    expected = {"min": 0.001, "p50": 0.005, "p90": 0.009, "p99": 0.01, "max": 0.01}
    assert found["compute_s"] == pytest.approx(expected)
    assert found["call_s"].keys() == expected.keys()
    assert found["call_s"]["min"] > 0
    assert found["flops_per_s"] == pytest.approx(REPORT["flops"] / 0.005)
    assert found["bytes_per_s"] == pytest.approx(REPORT["bytes"] / 0.005)
    assert found["stages_s"] == pytest.approx({"compute": 0.0055, "queue": 0.002})
    assert (found["repeats"], found["attempts"]) == (10, 10)


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer([problem("overloaded", **{"Retry-After": "0"}), *answers(1e-6)])
    assert bench(fake, *SHAPES, "--warm-up", "0", "--repeats", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "conv_bwd_data on fake: by_hand"
    assert lines[1] == "grad_input: float32[1, 1, 5]"
    assert lines[3].split() == ["2", "calls,", "ms", "min", "p50", "p90", "p99", "max"]
    assert lines[5].split() == ["the", "kernel", *["0.001"] * 5]
    assert lines[-2:] == [
        "the kernel, median: 1.0 GFLOP/s, 0.10 GB/s",
        "1 attempts were repeated",
    ]


def test_tensors_come_from_files_too(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", ones(2, 1, 2))
    fake = FakeServer(answers(0.0))
    files = ["--shape", "grad_output=1x2x4", "--input", f"weight={tmp_path}/w.npy"]
    assert bench(fake, *files, "--repeats", "1") == 0
    np.testing.assert_array_equal(fake.sent()[0]["weight"], ones(2, 1, 2))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "expected tensors: --shape grad_output=… --shape weight=…"),
        (["--shape", "weight"], "--shape: expected NAME=…, got 'weight'"),
        (["--shape", "weight=2,3"], "expected weight=8x64x56x56 or the like, got '2,3'"),
        (["--shape", "wait=2x3"], "conv_bwd_data takes grad_output, weight, accumulate"),
        (["--shape", "weight=2", "--shape", "weight=2"], "weight is given twice"),
        (["--shape", "weight=999999999x999999999"], "999,999,998,000,000,001 elements, too many"),
        (["--shape", "weight=2x1x2"], 'missing field "grad_output"'),
        ([*SHAPES, "--repeats", "0"], "--repeats: expected at least 1, got 0"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "conv_bwd_data", *options]) == 2
    assert said in capsys.readouterr().err


def test_indices_are_not_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "maxpool2d_bwd", "--shape", "indices=1x1x2x2"]) == 2
    assert "take them from a file" in capsys.readouterr().err
