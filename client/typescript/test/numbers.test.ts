import assert from "node:assert/strict";
import { test } from "node:test";

import { fromBfloat16, fromFloat16, toBfloat16, toFloat16 } from "../src/dtypes.js";
import { Tensor } from "../src/tensor.js";
import { decode, encode } from "../src/safetensors.js";

for (const [name, from, to, infinity] of [
  ["float16", fromFloat16, toFloat16, 0x7c00],
  ["bfloat16", fromBfloat16, toBfloat16, 0x7f80],
] as const) {
  test(`${name}: every number is its own, and what lies between goes to the nearer or the even one`, () => {
    for (let half = 0; half < infinity; half++) {
      const value = from(half);
      assert.equal(to(value), half);
      assert.equal(to(-value), half | 0x8000);
      if (half + 1 < infinity) {
        const next = from(half + 1);
        const middle = (value + next) / 2;
        assert.equal(to(middle), half % 2 ? half + 1 : half);
        assert.equal(to(Math.fround(value + (next - value) * 0.51)), half + 1);
        assert.equal(to(Math.fround(value + (next - value) * 0.49)), half);
      }
    }
    assert.equal(to(Number.POSITIVE_INFINITY), infinity);
    assert.equal(to(-1e39), infinity | 0x8000);
    assert.ok(Number.isNaN(from(to(Number.NaN))));
  });
}

test("tensors are made of nested and of flat lists", () => {
  const nested = Tensor.from([[1, 2, 3], [4, 5, 6]]);
  assert.deepEqual([nested.dtype, nested.shape, [...nested.data]], ["float32", [2, 3], [1, 2, 3, 4, 5, 6]]);
  const flat = Tensor.from([1, 2, 3, 4, 5, 6], { dtype: "bfloat16", shape: [2, 3] });
  assert.deepEqual([...flat.toNumbers()], [1, 2, 3, 4, 5, 6]);
  assert.deepEqual([...Tensor.full([2], 7, "int64").data], [7n, 7n]);
  assert.equal(String(flat), "bfloat16[2, 3]");
});

test("what is no tensor is refused", () => {
  assert.throws(() => Tensor.from([[1, 2], [3]]), /different lengths/);
  assert.throws(() => Tensor.from([[1], 2]), /equally deep/);
  assert.throws(() => new Tensor("float32", [2, 2], new Float32Array(3)), /has 4 elements, got 3/);
  // @ts-expect-error the array of another type
  assert.throws(() => new Tensor("float32", [2], new Float64Array(2)), /expected Float32Array/);
});

test("safetensors come back as they went, aligned whatever the order", () => {
  const tensors = {
    half: Tensor.from([1, 2, 3], { dtype: "float16" }),
    double: Tensor.from([[0.1]], { dtype: "float64" }),
    index: Tensor.from([5], { dtype: "int64" }),
    none: Tensor.full([0, 3], 0),
  };
  const found = decode(encode(tensors, { parameters: '{"é": 1}' }).buffer);
  assert.deepEqual(found.metadata, { parameters: '{"é": 1}' });
  for (const [name, tensor] of Object.entries(tensors)) assert.deepEqual(found.tensors[name], tensor);
});

test("broken safetensors are refused", () => {
  const file = encode({ x: Tensor.from([1, 2]) });
  assert.throws(() => decode(file.buffer.slice(0, 4)), RangeError);
  assert.throws(() => decode(file.buffer.slice(0, 20)), RangeError);
  assert.throws(() => decode(file.buffer.slice(0, file.length - 1)), RangeError);
});
