/** Element types, the typed array that holds each, and 16-bit floats as bits. */

/** An element type, by the name that requests use. */
export type DType = "float16" | "bfloat16" | "float32" | "float64" | "int32" | "int64";

/** What holds the elements of each type; of the 16-bit ones their bits, for JavaScript has no such
 * numbers. */
export interface Elements {
  float16: Uint16Array;
  bfloat16: Uint16Array;
  float32: Float32Array;
  float64: Float64Array;
  int32: Int32Array;
  int64: BigInt64Array;
}

interface Kind<D extends DType> {
  readonly array: {
    new (length: number): Elements[D];
    new (buffer: ArrayBuffer, byteOffset: number, length: number): Elements[D];
    readonly BYTES_PER_ELEMENT: number;
  };
  readonly safetensors: string;
}

export const KINDS: { readonly [D in DType]: Kind<D> } = {
  float16: { array: Uint16Array, safetensors: "F16" },
  bfloat16: { array: Uint16Array, safetensors: "BF16" },
  float32: { array: Float32Array, safetensors: "F32" },
  float64: { array: Float64Array, safetensors: "F64" },
  int32: { array: Int32Array, safetensors: "I32" },
  int64: { array: BigInt64Array, safetensors: "I64" },
};

const float = new Float32Array(1);
const bits = new Uint32Array(float.buffer);

/** The bits of a number as bfloat16, rounded to nearest, ties to even. */
export function toBfloat16(value: number): number {
  float[0] = value;
  const found = bits[0]!;
  if (Number.isNaN(value)) return ((found >>> 16) | 0x40) & 0xffff;
  return ((found + 0x7fff + ((found >>> 16) & 1)) >>> 16) & 0xffff;
}

/** The number that bits of bfloat16 mean. */
export function fromBfloat16(half: number): number {
  bits[0] = half << 16;
  return float[0]!;
}

/** The bits of a number as float16, rounded to nearest, ties to even. */
export function toFloat16(value: number): number {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const magnitude = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (magnitude >= 65520) return sign | 0x7c00; // half of the last step rounds up to infinity
  const exponent = Math.max(Math.floor(Math.log2(magnitude || 1)), -14);
  // Of subnormal numbers the step is that of the smallest normal ones.
  const step = 2 ** (Math.max(magnitude < 2 ** -14 ? -14 : exponent, -14) - 10);
  const steps = roundHalfEven(magnitude / step);
  // 1024 steps are the implicit bit; one more exponent follows from 2048 by itself.
  const biased = magnitude < 2 ** -14 ? 0 : exponent + 14;
  return sign | (biased * 1024 + steps);
}

/** The number that bits of float16 mean. */
export function fromFloat16(half: number): number {
  const sign = half & 0x8000 ? -1 : 1;
  const exponent = (half >>> 10) & 0x1f;
  const fraction = half & 0x3ff;
  if (exponent === 0x1f) return fraction ? Number.NaN : sign * Number.POSITIVE_INFINITY;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1024 + fraction) * 2 ** (exponent - 25);
}

function roundHalfEven(value: number): number {
  const floor = Math.floor(value);
  const rest = value - floor;
  return rest > 0.5 || (rest === 0.5 && floor % 2 === 1) ? floor + 1 : floor;
}
