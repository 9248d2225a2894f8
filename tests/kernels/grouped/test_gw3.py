from dataclasses import replace
import random
import pytest
from convgrad_service.backends.cuda.families import FAMILIES
from convgrad_service.backends.cuda.kernels.fallback.weight_direct import WeightDirect
from convgrad_service.backends.cuda.kernels.grouped.gw3 import HopperGroupedWeight, shares_of
from tests.emulator.backend import EmulatedBackend
from tests.support.kernels.harness import gates, with_layouts
from tests.support.numerics.geometries import Conv
from tests.support.numerics.cases import FROM_CONV
from tests.support.numerics.nonfinite import check_rule
used=[]
class Weight(HopperGroupedWeight):
    def __init__(self,n,k): self.n,self.k=n,k
    def launches(self, work, device, share=None):
        few = replace(device, multiprocessors=self.n)
        c=[s for _,s in shares_of(work, few)]
        share=random.Random(self.n*100+self.k).choice(c); used.append(share); print(share)
        return super().launches(work, few, share)
G = {
    "c4": Conv(2, 32, 32, (7, 9), (3, 3), padding=1, groups=8),
    "c8": Conv(3, 32, 32, (8, 7), (3, 3), padding=1, groups=4),
    "c8_24": Conv(2, 24, 24, (5, 6), (3, 3), padding=1, groups=3),
    "c16": Conv(3, 48, 48, (14, 14), (3, 3), padding=1, groups=3),
    "c32": Conv(2, 64, 64, (7, 7), (3, 3), padding=1, groups=2),
    "c64": Conv(2, 128, 128, (7, 9), (3, 3), padding=1, groups=2),
    "c96": Conv(1, 192, 192, (6, 5), (3, 3), padding=1, groups=2),
    "c64s2": Conv(2, 128, 128, (14, 9), (3, 3), 2, padding=1, groups=2),
    "c32s2": Conv(2, 64, 64, (14, 14), (3, 3), 2, padding=1, groups=2),
    "c16s2w": Conv(1, 32, 32, (9, 35), (3, 3), 2, padding=1, groups=2),
    "c16s3": Conv(1, 32, 32, (19, 35), (3, 3), 3, padding=1, groups=2),
    "c16d2": Conv(2, 32, 32, (12, 17), (3, 3), 1, padding=2, dilation=2, groups=2),
    "c16d3s2": Conv(1, 32, 32, (22, 27), (3, 3), 2, padding=3, dilation=3, groups=2),
    "c8_5x5": Conv(2, 32, 32, (9, 18), (5, 5), 1, padding=2, groups=4),
    "c8_1x1": Conv(2, 32, 32, (5, 18), (1, 1), 1, padding=0, groups=4),
    "c8_1d": Conv(2, 32, 32, (33,), (9,), 1, padding=4, groups=4),
    "c8_3d": Conv(1, 32, 32, (4,5,9), (3,3,3), (1,2,2), padding=1, groups=4),
    "c16_3d": Conv(2, 32, 32, (5,6,7), (3,3,3), 2, padding=1, groups=2),
    "images_left_over": Conv(5, 32, 32, (7, 7), (3, 3), padding=1, groups=2),
    "columns": Conv(1, 16, 16, (5, 150), (3, 3), padding=1, groups=2),
    "asym": Conv(1, 16, 16, (12, 28), (3, 3), padding=((0, 1), (2, 1)), groups=2),
    "beyond": Conv(1, 16, 16, (5, 4), (3, 3), padding=((4, 0), (1, 5)), groups=2),
    "nopad": Conv(2, 32, 32, (3, 4), (3, 3), groups=2),
}
CASES={n:FROM_CONV["grouped_conv_bwd_weight"](n,c) for n,c in G.items()}
@pytest.mark.parametrize("k",range(3))
@pytest.mark.parametrize("n",[2,9,132])
@pytest.mark.parametrize("name", CASES)
def test_it(seed,name,n,k):
    f=Weight(n,k); case=CASES[name]
    b=EmulatedBackend(replace(FAMILIES,bwd_weight=(f,)))
    lay=with_layouts(case.ndim, grouped=False)
    gates(b, seed, case, "bfloat16", lay[-1:])
    if k==0 and n==2: check_rule(b, seed, case, "bfloat16", lay[-1])
