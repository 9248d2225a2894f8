/** Tensors: a dtype, a shape and the elements in row-major order. */

import {
  type DType,
  type Elements,
  KINDS,
  fromBfloat16,
  fromFloat16,
  toBfloat16,
  toFloat16,
} from "./dtypes.js";

/** Numbers nested as deep as a tensor has dimensions, each level of one length. */
export type Nested = number | readonly Nested[];

export class Tensor<D extends DType = DType> {
  readonly dtype: D;
  readonly shape: readonly number[];
  /** The elements; of float16 and bfloat16 their bits, see `toNumbers`. */
  readonly data: Elements[D];

  constructor(dtype: D, shape: readonly number[], data: Elements[D]) {
    const kind = KINDS[dtype];
    if (kind === undefined) throw new TypeError(`there is no dtype ${String(dtype)}`);
    if (!(data instanceof kind.array)) {
      throw new TypeError(`expected ${kind.array.name} for ${dtype}, got ${data.constructor.name}`);
    }
    const elements = count(shape);
    if (data.length !== elements) {
      throw new RangeError(`shape [${shape.join(", ")}] has ${elements} elements, got ${data.length}`);
    }
    this.dtype = dtype;
    this.shape = [...shape];
    this.data = data;
  }

  /** A tensor of a shape whose elements are all `value`. */
  static full<D extends DType = "float32">(
    shape: readonly number[],
    value: number,
    dtype: D = "float32" as D,
  ): Tensor<D> {
    const data = new KINDS[dtype].array(count(shape)) as Elements[D];
    data.fill(encoded(dtype, value) as never);
    return new Tensor(dtype, shape, data);
  }

  /** A tensor of nested lists of numbers, or of a flat list with a shape, rounded to `dtype`. */
  static from<D extends DType = "float32">(
    values: Nested | ArrayLike<number>,
    { dtype = "float32" as D, shape }: { dtype?: D; shape?: readonly number[] } = {},
  ): Tensor<D> {
    const found = shape ?? shapeOf(values as Nested);
    const flat = shape === undefined ? flattened(values as Nested) : (values as ArrayLike<number>);
    const elements = count(found);
    if (flat.length !== elements) {
      throw new RangeError(`shape [${found.join(", ")}] has ${elements} elements, got ${flat.length}`);
    }
    const data = new KINDS[dtype].array(elements) as Elements[D];
    for (let i = 0; i < elements; i++) data[i] = encoded(dtype, flat[i]!) as never;
    return new Tensor(dtype, found, data);
  }

  /** The elements as numbers, which holds any of them but int64 beyond 2^53 exactly. */
  toNumbers(): Float64Array {
    const { dtype, data } = this;
    if (dtype === "bfloat16") return Float64Array.from(data as Uint16Array, fromBfloat16);
    if (dtype === "float16") return Float64Array.from(data as Uint16Array, fromFloat16);
    if (dtype === "int64") return Float64Array.from(data as BigInt64Array, Number);
    return Float64Array.from(data as Float32Array);
  }

  /** `float32[2, 3]`. */
  toString(): string {
    return `${this.dtype}[${this.shape.join(", ")}]`;
  }
}

/** A tensor that the server keeps; it may stand wherever an operation takes a tensor. */
export class Stored {
  constructor(
    readonly name: string,
    readonly dtype: DType,
    readonly shape: readonly number[],
  ) {}
}

export function count(shape: readonly number[]): number {
  return shape.reduce((product, extent) => product * extent, 1);
}

function encoded(dtype: DType, value: number): number | bigint {
  if (dtype === "bfloat16") return toBfloat16(value);
  if (dtype === "float16") return toFloat16(value);
  return dtype === "int64" ? BigInt(value) : value;
}

function shapeOf(values: Nested): number[] {
  const shape: number[] = [];
  for (let level = values; typeof level !== "number"; level = level[0] ?? 0) shape.push(level.length);
  return shape;
}

function flattened(values: Nested): number[] {
  const shape = shapeOf(values);
  const flat: number[] = [];
  const walk = (level: Nested, depth: number): void => {
    if (typeof level === "number") {
      if (depth < shape.length) throw new TypeError("the lists are not nested equally deep");
      flat.push(level);
    } else {
      if (level.length !== shape[depth]) throw new TypeError("the lists have different lengths");
      for (const item of level) walk(item, depth + 1);
    }
  };
  walk(values, 0);
  return flat;
}
