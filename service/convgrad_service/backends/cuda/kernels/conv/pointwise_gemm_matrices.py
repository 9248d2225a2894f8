"""The GEMMs that pointwise_gemm computes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BARRIER_BYTES", "ITEM_BYTES", "SHIFTED", "TF32", "UNALIGNED", "Matrix", "Product"]

ITEM_BYTES, BARRIER_BYTES = 2, 8
# The suffixes of the kinds of products of planes that do not start at multiples of 16 bytes, of
# operands whose rows are no whole chunks, and of TF32.
SHIFTED, UNALIGNED, TF32 = "_shifted", "_unaligned", "_tf32"


@dataclass(frozen=True, slots=True)
class Matrix:
    """An operand of a GEMM.

    Attributes
    ----------
    rows
        Its extent along M or N.
    pitch
        The leading dimension, in elements.
    mn
        Whether it is MN-major; otherwise it is K-major.
    image
        The stride between images, in elements, if the rows are pixels of several.
    item_bytes
        Bytes of an element: 4 of TF32.
    """

    rows: int
    pitch: int
    mn: bool
    image: int = 0
    item_bytes: int = ITEM_BYTES


@dataclass(frozen=True, slots=True)
class Product:
    """The GEMM result[rows, columns] = a[rows, depth] * b[columns, depth].

    Attributes
    ----------
    row_stride, column_stride
        Strides of the result.
    stores
        Whether persistent blocks can store the result: by TMA, if it has the operands' dtype and
        16-byte chunks, and its epilogue is at most a scale and a bias; or as planes of float32.
    swapped
        Whether A and B are exchanged: the rows are channels of the result, or input channels for
        wgrad.
    images
        Of planes, the number of images that the rows (swapped: columns) are divided into; otherwise
        0.
    image_stride
        Of planes, the stride between images of the result.
    summed_images
        Of a weight gradient of planes, the number of images that ``depth`` is divided into.
    together
        Of planes that do not start at multiples of 16 bytes, the channels that together do;
        otherwise 0.
    unaligned
        Whether rows of an operand do not start at multiples of 16 bytes, and are not `together`.
    """

    a: Matrix
    b: Matrix
    depth: int
    row_stride: int
    column_stride: int
    stores: bool
    swapped: bool = False
    images: int = 0
    image_stride: int = 0
    summed_images: int = 0
    together: int = 0
    unaligned: bool = False

    @property
    def rows(self) -> int:
        return self.a.rows

    @property
    def columns(self) -> int:
        return self.b.rows

    @property
    def in_tf32(self) -> bool:
        return self.a.item_bytes > ITEM_BYTES

    @property
    def shifted(self) -> bool:
        """Whether planes do not start at multiples of 16 bytes."""
        return self.together > 0

    @property
    def straddles(self) -> bool:
        """Whether rows or images of an operand start at odd elements."""
        starts = (start % 2 for one in (self.a, self.b) for start in (one.pitch, one.image))
        return self.unaligned and any(starts)

    @property
    def transposed(self) -> bool:
        """Whether the result's columns are contiguous, and stored by TMA."""
        return self.stores and self.swapped

    @property
    def shares(self) -> bool:
        """Whether `sharing` was measured: gradients of the input, channels last, in 16 bits."""
        usual = not (self.in_tf32 or self.images or self.unaligned)
        return self.stores and usual and self.a.mn != self.b.mn

    @property
    def kind(self) -> str:
        """The name of its cost model's correction."""
        how = SHIFTED if self.shifted else UNALIGNED * self.unaligned + TF32 * self.in_tf32
        if self.images:
            return ("planes_transposed" if self.transposed else "planes") + how
        if self.summed_images:
            return "weight_planes" + how
        if self.unaligned:
            return ("weight" if self.a.mn else "gather") + how
        if not self.a.mn or self.transposed:
            return ("transposed" if self.transposed else "gather") + how
        return f"weight{how}"

    @property
    def menu(self) -> str:
        """The name of its configurations: its kind, and whether it is forward."""
        weight = self.a if self.transposed else self.b
        backward = weight.mn or self.summed_images
        return self.kind if backward else f"{self.kind}_forward"

    @property
    def barrier_bytes(self) -> int:
        """Bytes of a pipeline stage's mbarriers."""
        return (4 if self.shifted else 2) * BARRIER_BYTES

    @property
    def bytes(self) -> int:
        """Bytes that must be read and written."""
        elements = (self.rows + self.columns) * self.depth + self.rows * self.columns
        return elements * self.a.item_bytes
