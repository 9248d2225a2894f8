from dataclasses import replace
import random
import pytest
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.grouped.gw2 import GroupedWeight, HopperGroupedWeight
from convgrad_service.backends.cuda.kernels.grouped.gw2_shares import shares_of
from tests.emulator.backend import EmulatedBackend
from tests.support.kernels.grouped_cases import grouped_cases, NOT_FINITE
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.nonfinite import check_rule
used=[]
def made(cls,n,k):
    class Weight(cls):
        def launches(self, work, device, share=None):
            few = replace(device, multiprocessors=n)
            c=[s for _,s in shares_of(work, few, self.engine)]
            share=random.Random(n*100+k).choice(c); used.append(share); print(cls.__name__,share)
            return super().launches(work, few, share)
    return Weight()
CASES=grouped_cases("grouped_conv_bwd_weight")
@pytest.mark.parametrize("k",range(3))
@pytest.mark.parametrize("n",[2,9])
@pytest.mark.parametrize("cls",[GroupedWeight,HopperGroupedWeight])
@pytest.mark.parametrize("case", CASES, ids=lambda c:c.id)
def test_it(seed,case,cls,n,k):
    f=made(cls,n,k)
    b=EmulatedBackend(replace(FAMILIES,bwd_weight=(f,WeightDirect())))
    gates(b, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1:])
    if case.name in NOT_FINITE and k==0: check_rule(b, seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1])
@pytest.mark.parametrize("dtype",["float16","tf32","float32"])
@pytest.mark.parametrize("cls",[GroupedWeight,HopperGroupedWeight])
@pytest.mark.parametrize("case", CASES[::3], ids=lambda c:c.id)
def test_types(seed,case,cls,dtype):
    f=made(cls,3,1)
    b=EmulatedBackend(replace(FAMILIES,bwd_weight=(f,WeightDirect())))
    gates(b, seed, case, dtype, with_layouts(case.ndim, grouped=False)[-1:])
