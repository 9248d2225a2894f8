"""The configurations of pointwise_gemm, one per instance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from convgrad_service.backends.cuda.kernels.conv.pointwise_gemm_tiles import Config, Product

__all__ = ["DEEP", "SHALLOW", "USUAL", "every_config", "sharing"]

SHALLOW, USUAL, DEEP = (16, 32), 64, 128
"""K of a k-tile: shallow ones for short reductions, deep ones for small tiles."""

# M and N of tiles by `Product.kind` and the K of a k-tile. Of 392 shapes that fit, these are the
# fastest for some of 491 measured layers, or nearly: all shapes would make a layer 0.3 % faster.
Tiles = Mapping[str, Mapping[int, Mapping[int, tuple[int, ...]]]]
# Blocks are persistent and TMA stores results.
STORED: Tiles = {
    "gather": {
        16: {64: (16, 32, 64, 160, 192), 128: (16, 32, 48, 64, 128, 192)},
        32: {64: (32, 64, 80, 144), 128: (16, 24, 64, 96, 192, 256)},
        64: {
            64: (16, 24, 32, 48, 64, 96, 128, 160, 192, 256),
            128: (16, 24, 32, 40, 48, 64, 80, 96, 128, 192, 256),
            192: (64, 96, 128),
            256: (64, 80, 128),
        },
        128: {64: (16, 24, 32, 40, 64, 80), 128: (16, 32, 40, 48)},
    },
    # Nothing of a transposed tile starts where a swizzled pattern does with shallow k-tiles.
    "transposed": {
        64: {
            64: (64, 80, 96, 144, 176, 208),
            128: (96, 104, 112, 128, 176, 192, 208, 224),
            192: (40, 96, 104, 112, 128, 144, 192),
            256: (40, 48, 56, 80),
        },
        128: {64: (56, 80, 104, 112), 128: (48, 96)},
    },
    "weight": {
        64: {64: (16, 24, 32, 48, 64, 128), 128: (16, 32, 64, 128)},
        128: {64: (16, 32, 40, 64)},
    },
    "planes": {64: {64: (64, 128), 128: (32, 64, 96, 128, 192, 256), 256: (64, 96, 128)}},
}
# As STORED, and all of B stays in shared memory.
RESIDENT: Tiles = {
    "gather": {
        16: {64: (160,), 128: (16, 32)},
        32: {64: (80, 96, 160), 128: (16, 40, 48, 64, 80, 96, 128, 144)},
        64: {64: (32, 40, 48, 80, 128, 160), 128: (16, 24, 40, 48, 64, 80, 96, 128, 144, 160)},
    },
    "planes": {64: {128: (32, 64, 96, 128)}},
}
# The blocks of a cluster split K. Also for results that TMA cannot store.
IN_CLUSTER: Tiles = {
    "gather": {
        16: {64: (16, 32, 64)},
        32: {64: (16, 32, 64)},
        64: {64: (16, 24, 32, 64, 96, 128, 192, 256), 128: (64, 128, 192)},
    },
    "weight": {
        64: {64: (80, 96, 128, 144, 160, 192, 256), 128: (48, 64, 80, 96, 128, 192)},
        128: {64: (16, 24, 32, 40, 48, 64), 128: (16,)},
    },
}
# The blocks of the grid split K.
IN_GRID: Tiles = {
    "weight": {
        64: {64: (80, 128, 144, 192, 256), 128: (40, 128, 192, 256)},
        128: {64: (16, 24, 32, 64), 128: (24,)},
    },
}
# Tiles of STORED whose blocks can share an operand with those of their cluster, and the sizes of
# such clusters. All tiles, with 64 x 80, and clusters of eight would make 99 layers 0.2 % faster.
SHARED: Tiles = {
    "gather": {
        32: {128: (256,)},
        64: {
            64: (32, 128, 160, 256),
            128: (32, 40, 48, 80, 128, 192),
            192: (64, 96, 128),
            256: (80,),
        },
        128: {64: (32, 80)},
    },
}
SHARING = (2, 4)


def sharing(config: Config, product: Product) -> Iterator[Config]:
    """Yield the other ways to run a configuration: clusters that share an operand."""
    if config.reduces or config.resident or not product.shares:
        return
    tiles = SHARED.get(product.kind, {}).get(config.depth, {})
    if config.n in tiles.get(config.m, ()):
        yield from (replace(config, multicast=blocks) for blocks in SHARING)


def every_config(kind: str) -> Iterator[Config]:
    """Yield one configuration per instance of a `Product.kind`, but for those of `sharing`."""
    for ways, options in (
        (STORED, {}),
        (RESIDENT, {"resident": True}),
        (IN_CLUSTER, {"cluster": 1}),
        (IN_GRID, {"parts": 2}),
    ):
        for depth, shapes in ways.get(kind, {}).items():
            for m, columns in shapes.items():
                for n in columns:
                    yield Config(m, n, depth, **options)
