"""A type checker infers that outputs may be None only where they are optional."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

CODE = """
import numpy as np
import convgrad
c, a = convgrad.Client(), np.ones(1)
reveal_type(c.conv_backward(a, a, a).grad_bias)
reveal_type(c.conv_backward(a, a, a, outputs=["grad_input"]).grad_bias)
reveal_type(c.conv_transpose_backward(a, a, a).grad_weight)
reveal_type(c.conv_double_backward(a, a, a, grad_grad_bias=a).grad_grad_output)
reveal_type(c.conv_double_backward(a, a, a, outputs=["grad_input"]).grad_weight)
reveal_type(c.grouped_conv_bwd_weight(input=a, grad_output=a).grad_weight)
reveal_type(c.grouped_conv_bwd_weight(input=a, grad_output=a).grad_bias)
both = c.grouped_conv_bwd_weight(input=a, grad_output=a, outputs=("grad_weight", "grad_bias"))
reveal_type(both.grad_bias)
reveal_type(c.maxpool2d_fwd(a, 2).indices)
reveal_type(c.maxpool3d_fwd(a, 2, return_indices=True).indices)
async def f(c: convgrad.AsyncClient) -> None:
    reveal_type((await c.conv_backward(a, a, a)).grad_weight)
    reveal_type((await c.maxpool2d_fwd(a, 2, return_indices=True)).indices)
c.conv_fwd(a, a, layout="NHCW")  # E: layout
c.with_options(retry=3)  # E: option
c.grouped_conv_bwd_weight(a, a)  # E: position
"""
IS_NONE_TOO = [False, True, False, False, True, False, True, False, True, False, False, False]


def test_results_that_cannot_be_none_are_not(tmp_path: Path) -> None:
    file = tmp_path / "use.py"
    file.write_text(CODE)
    checker = [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(file)]
    done = subprocess.run(checker, capture_output=True, text=True, cwd=tmp_path)
    revealed = re.findall(r'Revealed type is "(.*)"', done.stdout)
    assert ["None" in each for each in revealed] == IS_NONE_TOO, done.stdout
    wrong = {int(line) for line in re.findall(r"use\.py:(\d+): error", done.stdout)}
    expected = [n for n, line in enumerate(CODE.splitlines(), 1) if "# E:" in line]
    assert sorted(wrong) == expected, done.stdout
