from dataclasses import replace
import random
import pytest
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.grouped.gw2 import GroupedWeight
from convgrad_service.backends.cuda.kernels.grouped.gw2_shares import shares_of
from tests.emulator.backend import EmulatedBackend
from tests.support.kernels.grouped_cases import grouped_cases
from tests.support.kernels.harness import gates, with_layouts
used=[]
class Weight(GroupedWeight):
    def launches(self, work, device, share=None):
        few = replace(device, multiprocessors=self.n)
        c=[s for _,s in shares_of(work, few)]
        share=random.Random(self.n*100+self.k).choice(c); used.append(share); print(share)
        return super().launches(work, few, share)
@pytest.mark.parametrize("k",range(3))
@pytest.mark.parametrize("n",[2,9])
@pytest.mark.parametrize("case", grouped_cases("grouped_conv_bwd_weight"), ids=lambda c:c.id)
def test_it(seed,case,n,k):
    f=Weight(); f.n,f.k=n,k
    gates(EmulatedBackend(replace(FAMILIES,bwd_weight=(f,WeightDirect()))), seed, case, "bfloat16", with_layouts(case.ndim, grouped=False)[-1:])
