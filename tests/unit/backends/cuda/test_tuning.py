"""Tuned layers and corrected cost models: what the shipped table does to plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from convgrad_service.backends.cuda.families import WHOLE_CHUNKS, WHOLE_CHUNKS_WEIGHT
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm import COUNTERS
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_model import timed
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_products import products_of
from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config
from convgrad_service.backends.cuda.tuning import tuned
from convgrad_service.backends.cuda.tuning.correction import Correction
from convgrad_service.backends.cuda.tuning.features import NAMES, features
from convgrad_service.backends.cuda.tuning.tuned import Tuned, key_of
from convgrad_service.plans.cuda.device import H200
from convgrad_service.plans.cuda.families import Chosen, choose
from convgrad_service.plans.cuda.works import ConvWork
from tests.support.kernels.conv_work import pointwise, work_of

WORKS = {
    "product": pointwise(8, (64, 256), 28),
    "weight_product": pointwise(8, (64, 256), 28, "bwd_weight"),
    "taps": work_of("bwd_data", batch=8, channels=(64, 128)),
    "weight_taps": work_of("bwd_weight", batch=8, channels=(64, 128)),
}


def families_of(work: ConvWork) -> tuple[object, ...]:
    return WHOLE_CHUNKS_WEIGHT if work.direction == "bwd_weight" else WHOLE_CHUNKS


def configuration(chosen: Chosen) -> str:
    """The part of a kernel's name that a table holds."""
    name = chosen.fragment.kernel.removeprefix(f"{chosen.family}_")
    for direction in ("fwd", "bwd_data", "bwd_weight"):
        name = name.removeprefix(f"{direction}_")
    return name


@pytest.mark.parametrize("name", WORKS)
def test_a_tuned_layer_gets_its_configuration(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WORKS[name]
    first, *others = families_of(work)
    assert isinstance(first, Tuned)
    by_model = choose(others, work, H200)  # type: ignore[arg-type]
    key = key_of(work)
    assert key is not None
    entries = {key: (by_model.family, configuration(by_model))}
    monkeypatch.setattr(tuned, "_layers", lambda *_: entries)
    found, _ = first.choice(work, H200)
    assert found is not None
    assert (found.family, found.fragment.kernel) == (by_model.family, by_model.fragment.kernel)
    entries[key] = (by_model.family, "no such configuration")
    assert first.choice(work, H200)[0] is None


def test_what_is_not_tuned() -> None:
    work = WORKS["taps"]
    assert key_of(replace(work, alpha=2.0)) is None
    assert key_of(replace(work, follows=True)) is None
    assert key_of(work_of("bwd_data", batch=8, channels=(64, 128), layout="NCHW")) is None
    assert key_of(work) != key_of(WORKS["weight_taps"])


def test_names_of_products() -> None:
    """Names have no two meanings: those of all candidates are read back."""
    for name in ("product", "weight_product"):
        for product in products_of(WORKS[name]):
            for _, config in timed(product, H200, COUNTERS):
                assert Config.named(str(config)) == config


def test_trees_are_evaluated_level_by_level() -> None:
    table = {
        "features": [["rows", "n"], ["rows", "rows"]],
        "thresholds": [[3.0, 5.0], [1.0, 8.0]],
        "leaves": [[0.0, 1.0, 2.0, 3.0], [10.0, 20.0, 30.0, 40.0]],
    }
    lines = np.zeros((2, len(NAMES)))
    lines[0, NAMES.index("rows")] = 4.0  # bits: first tree 01, second 01
    lines[1, NAMES.index("rows")], lines[1, NAMES.index("n")] = 9.0, 6.0  # 11 and 11
    assert np.log2(Correction.of(table).factors(lines)).tolist() == [21.0, 43.0]


def test_features_of_a_gradient_that_no_tap_reaches() -> None:
    """Such as that of an input of one row by stride 3, padding 2: its products have no terms."""
    found = features(
        expected_s=[1e-5, 2e-5],
        rows=18,
        columns=12,
        depth=0,
        m=[32, 64],
        n=32,
        k=32,
        inner=1,
        outer=1,
        workers=132,
        moved=1000,
        kind=0,
        order=2,
    )
    assert found.shape == (2, len(NAMES))
    assert np.isfinite(found).all()
