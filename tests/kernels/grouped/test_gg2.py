from dataclasses import replace
import pytest
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.gather_direct import GatherDirect
from convgrad_service.backends.cuda.kernels.grouped.grouped_box import lattice_axis
from convgrad_service.backends.cuda.kernels.grouped.grouped_gather import GroupedGather, HopperGroupedGather, boxes_of
from tests.emulator.backend import EmulatedBackend
from tests.support.kernels.grouped_cases import grouped_cases, NOT_FINITE
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.nonfinite import check_rule
def made(cls,k):
    class Gather(cls):
        def launches(self, work, device, box=None):
            if k==0: return super().launches(work,device)
            few = replace(device, multiprocessors=1)
            axes = [lattice_axis(work, dim) for dim in range(3)]
            fitting = [b for b in boxes_of(work, axes, few) if b.stages > 1 and b.positions > 5]
            return super().launches(work, few, min(fitting, key=lambda b: b.positions)) if fitting else super().launches(work,few)
    return Gather()
CASES=[*grouped_cases("conv_fwd"),*grouped_cases("conv_bwd_data")]
@pytest.mark.parametrize("k",[0,1])
@pytest.mark.parametrize("cls",[GroupedGather,HopperGroupedGather])
@pytest.mark.parametrize("dtype",["bfloat16","float32"])
@pytest.mark.parametrize("case", CASES, ids=lambda c:c.id)
def test_it(seed,case,cls,k,dtype):
    f=made(cls,k)
    b=EmulatedBackend(replace(FAMILIES,fwd=(f,GatherDirect()),bwd_data=(f,GatherDirect())))
    gates(b, seed, case, dtype, with_layouts(case.ndim, grouped=False)[-1:])
    if case.name in NOT_FINITE and k==0: check_rule(b, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1])
