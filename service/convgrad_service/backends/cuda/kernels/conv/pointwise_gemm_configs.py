"""The configurations of pointwise_gemm, one per instance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config, Product

__all__ = ["DEEP", "SHALLOW", "USUAL", "every_config", "sharing"]

SHALLOW, USUAL, DEEP = (16, 32), 64, 128
"""K of a k-tile: shallow ones for short reductions, deep ones for small tiles."""

# M and N of tiles by `Product.menu` and the K of a k-tile: those of all measured and tuned layers,
# and others that shorten 8,500 products of networks' and random layers the most (docs/kernels.md).
Tiles = dict[str, Mapping[int, Mapping[int, tuple[int, ...]]]]
# Blocks are persistent and TMA stores results.
STORED: Tiles = {
    "gather": {
        16: {128: (16, 64, 128, 192)},
        32: {64: (32, 80), 128: (24, 64, 192)},
        64: {
            64: (16, 24, 32, 48, 64, 96, 128, 160, 192, 256),
            128: (40, 64, 80, 96, 128, 192, 256),
            192: (64, 128),
            256: (64,),
        },
        128: {64: (16, 24, 32, 64, 80), 128: (16,)},
    },
    "gather_forward": {
        16: {64: (16,), 128: (64, 192)},
        32: {64: (32,), 128: (192,)},
        64: {64: (16, 32, 48), 128: (80, 192, 256), 192: (64, 128), 256: (64,)},
    },
    "planes": {
        64: {64: (32,), 128: (16, 192, 256), 256: (64, 96)},
    },
    "planes_forward": {
        64: {64: (64,), 128: (32, 64, 128, 192, 256), 256: (64, 96, 128)},
    },
    "planes_transposed_shifted": {
        64: {64: (56, 224), 128: (56, 112), 192: (56,), 256: (56,)},
    },
    "transposed": {
        64: {64: (144, 176), 128: (96, 104, 112, 192), 192: (104, 144, 192)},
        128: {64: (56,)},
    },
    "transposed_forward": {
        64: {64: (80,), 128: (112, 208), 192: (192,)},
    },
    "weight": {
        64: {64: (32, 48, 64, 128), 128: (128,)},
        128: {64: (32, 40, 64)},
    },
}
# Of rows that are no whole chunks: those that shorten 363 products of networks' layers the most.
STORED["gather_unaligned"] = STORED["gather_unaligned_forward"] = {
    32: {128: (48, 96)},
    48: {128: (64,)},
    64: {64: (32, 64), 128: (32, 64, 128)},
}
STORED["planes_transposed_unaligned"] = STORED["planes_transposed_unaligned_forward"] = {
    64: {64: (64, 128), 128: (128,)},
}
# Of TF32: those that shorten 3,725 products of networks' and random layers the most.
STORED["gather_tf32_forward"] = {
    32: {64: (32, 64, 96, 128, 192), 128: (32, 64, 96, 128, 192)},
}
STORED["transposed_tf32"] = {
    32: {64: (64, 80, 112, 144, 192, 256), 128: (64, 112, 128, 144, 208), 192: (64, 128)},
    64: {64: (32,)},
}
STORED["planes_tf32_forward"] = {32: {64: (32, 64, 128), 128: (32, 64, 96, 128, 192)}}
# As STORED, and all of B stays in shared memory.
RESIDENT: Tiles = {
    "gather": {
        16: {64: (160,), 128: (16, 32)},
        32: {64: (96,), 128: (16, 40, 48, 64, 80, 96, 144)},
        64: {64: (32, 128), 128: (16, 24, 40, 64, 80, 96, 128, 144)},
    },
    "gather_forward": {
        16: {64: (160,), 128: (16, 32)},
        32: {64: (160,), 128: (16, 48, 80)},
        64: {64: (32, 48), 128: (16, 80, 96, 160)},
    },
    "planes": {
        64: {64: (64,), 128: (16, 32, 64, 80, 96)},
    },
    "planes_forward": {
        64: {128: (32, 64, 96)},
    },
}
# The blocks of a cluster split K. Also for results that TMA cannot store.
IN_CLUSTER: Tiles = {
    "gather": {
        16: {64: (16, 32)},
        32: {64: (16, 64)},
        64: {64: (16, 24, 32, 64)},
    },
    "gather_forward": {
        16: {64: (16, 64)},
        32: {64: (16, 64)},
        64: {64: (16, 32), 128: (64, 128, 192)},
    },
    "weight": {
        64: {64: (80, 96, 128, 160, 192), 128: (64, 192)},
        128: {64: (16, 24, 32, 64)},
    },
    "weight_tf32": {
        32: {64: (64, 96, 128)},
        64: {64: (16, 32, 64)},
    },
}
IN_CLUSTER["gather_tf32_forward"] = {32: {64: (32, 64), 128: (128,)}}
IN_CLUSTER["transposed_tf32"] = {32: {64: (64, 128)}, 64: {64: (32,)}}
IN_CLUSTER["weight_planes_tf32"] = {32: {64: (32, 64), 128: (64, 128)}}
# The blocks of the grid split K.
IN_GRID: Tiles = {
    "weight": {
        64: {64: (80, 128, 144, 192, 256), 128: (40, 128, 192, 256)},
        128: {64: (16, 24, 32, 64), 128: (24,)},
    },
    "weight_tf32": {
        32: {64: (64, 96, 128)},
        64: {64: (16, 32, 64)},
    },
}
IN_CLUSTER["gather_unaligned"] = IN_CLUSTER["gather_unaligned_forward"] = {64: {64: (32, 64)}}
IN_CLUSTER["weight_unaligned"] = IN_CLUSTER["weight_planes_unaligned"] = {64: {64: (32, 64)}}
IN_GRID["weight_unaligned"] = IN_GRID["weight_planes_unaligned"] = {
    64: {64: (32, 64, 96), 128: (32, 64)},
}
IN_GRID["weight_planes_tf32"] = {32: {64: (32, 64, 128), 128: (128,)}}
# Tiles of STORED whose blocks can share an operand with those of their cluster, and the sizes of
# such clusters.
SHARED: Tiles = {
    "gather": {
        64: {64: (32, 128, 160, 256), 128: (40, 80, 192), 192: (64, 128)},
        128: {64: (80,)},
    },
}
SHARING = (2, 4)
# As STORED, in planes: warpgroups take tiles in turn.
IN_TURN: Tiles = {
    "planes": {64: {64: (128,), 128: (32, 64, 128)}},
    "planes_transposed_shifted": {64: {64: (112,)}},
}
# Tiles of STORED that warpgroups can take in turn, also in such clusters.
ALTERNATE: Tiles = {"gather": {64: {128: (128,)}}}


# Weight gradients channels first: as channels last. Those of planes that are aligned first: tiles
# of whole blocks of 64 channels.
for _ways in (STORED, IN_CLUSTER, IN_GRID):
    _ways["weight_planes"] = _ways["weight"]
STORED["weight_planes_shifted"] = {64: {128: (64, 128)}, 128: {64: (64,)}}
IN_CLUSTER["weight_planes_shifted"] = {64: {64: (64, 128), 128: (64,)}, 128: {64: (64,)}}
IN_GRID["weight_planes_shifted"] = {64: {64: (64,), 128: (64, 128)}, 128: {64: (64,)}}


def sharing(config: Config, product: Product) -> Iterator[Config]:
    """Yield the other ways to run a configuration: clusters that share an operand, and warpgroups
    that take tiles in turn."""
    if config.reduces or config.resident or not product.shares:
        return
    for ways, clusters, alternate in ((SHARED, SHARING, False), (ALTERNATE, (1, *SHARING), True)):
        tiles = ways.get(product.menu, {}).get(config.depth, {})
        if config.n in tiles.get(config.m, ()):
            for blocks in clusters:
                yield replace(config, multicast=blocks, alternate=alternate)


def every_config(menu: str) -> Iterator[Config]:
    """Yield one configuration per instance of a `Product.menu`, but for those of `sharing`."""
    for ways, options in (
        (STORED, {}),
        (RESIDENT, {"resident": True}),
        (IN_TURN, {"alternate": True}),
        (IN_CLUSTER, {"cluster": 1}),
        (IN_GRID, {"parts": 2}),
    ):
        for depth, shapes in ways.get(menu, {}).items():
            for m, columns in shapes.items():
                for n in columns:
                    yield Config(m, n, depth, **options)
