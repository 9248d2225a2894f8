"""`use` in what trains models: several processes, checkpointing, compilation, loss scaling."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint_sequential

import convgrad.torch as ours

RANKS = 2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.Flatten(),
        nn.Linear(72, 4),
    )


def batch(size: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(size, 3, 16, 16), torch.arange(size) % 4


def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(found: Sequence[torch.Tensor | None], wanted: Sequence[torch.Tensor]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def train_one_rank(rank: int, meeting: str, results: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS
    )
    x, y = batch()
    # Buckets smaller than a layer, so that gradients are reduced while others are computed.
    model = DistributedDataParallel(network(), bucket_cap_mb=0.001)
    with ours.use(ours.Local(), fallback=False):
        found = gradients(model, x[rank::RANKS], y[rank::RANKS])
    calls = sum(row.calls for row in ours.report().rows)
    torch.save((found, calls), f"{results}/{rank}")
    torch.distributed.destroy_process_group()
    # DistributedDataParallel keeps the process group's threads. One of them that drops its last
    # tensor while the interpreter finalizes aborts the process (pytorch/pytorch#179291).
    os._exit(0)


def test_distributed_data_parallel(tmp_path: Path) -> None:
    multiprocessing.spawn(train_one_rank, (str(tmp_path / "meeting"), str(tmp_path)), RANKS)
    wanted = gradients(network(), *batch())
    for rank in range(RANKS):
        found, calls = torch.load(tmp_path / str(rank))
        same(found, wanted)
        assert calls == 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, (x, y) = network(), batch()
    wanted = gradients(model, x, y)
    model.zero_grad()
    x.requires_grad_()
    with ours.use(ours.Local(), fallback=False):
        output = checkpoint_sequential(model, 2, x, use_reentrant=reentrant)
        nn.functional.cross_entropy(output, y).backward()
    same([p.grad for p in model.parameters()], wanted)


@pytest.mark.timeout(900)  # it compiles C++
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_compiled_by_inductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers, x = network()[:4], batch()[0]
    wanted = torch.autograd.grad(layers(x).sum(), list(layers.parameters()))
    compiled: Any = torch.compile(layers, fullgraph=True)
    ours.report(reset=True)
    with ours.use(ours.Local(), fallback=False):
        same(torch.autograd.grad(compiled(x).sum(), list(layers.parameters())), wanted)
    # Inductor has a max pooling of its own.
    assert sum(row.calls for row in ours.report(reset=True).rows) >= 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_loss_scaling_skips_a_step_that_overflows(dtype: torch.dtype) -> None:
    model, (x, y) = network(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(x: torch.Tensor) -> tuple[float, bool]:
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = any(
            not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
        )
        return scaler.get_scale(), changed

    with ours.use(ours.Local(), fallback=False):
        assert step(x) == (2.0, True)
        x[0, 0, 0, 0] = torch.inf
        assert step(x) == (1.0, False)
        assert step(batch()[0]) == (1.0, True)
    assert all(p.isfinite().all() for p in model.parameters())
