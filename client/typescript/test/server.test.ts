/** Against the real server at CONVGRAD_URL. */

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { test } from "node:test";

import createFetchClient from "openapi-fetch";

import { Client, ConvgradError, Stored, Tensor, type OperationName } from "../src/index.js";
import type { paths } from "../src/openapi.js";

const url = process.env["CONVGRAD_URL"];
assert.ok(url, "CONVGRAD_URL names no server");
const client = new Client(url);

// grad_output [2, 2] in full convolution with the diagonal (1, -1), by hand
const grad_output = Tensor.from([[[[1, 2], [3, 4]]]]);
const weight = Tensor.from([[[[1, 0], [0, -1]]]]);
const GRADIENT = [1, 2, 0, 3, 3, -2, 0, -3, -4];

test("a gradient, in every floating-point type", async () => {
  for (const dtype of ["float16", "bfloat16", "float32", "float64"] as const) {
    const shape = [1, 1, 2, 2];
    const answer = await client.conv_bwd_data({
      grad_output: Tensor.from([1, 2, 3, 4], { dtype, shape }),
      weight: Tensor.from([1, 0, 0, -1], { dtype, shape }),
    });
    assert.equal(answer.grad_input.dtype, dtype);
    assert.deepEqual(answer.grad_input.shape, [1, 1, 3, 3]);
    assert.deepEqual([...answer.grad_input.toNumbers()].map((value) => value + 0), GRADIENT);
    assert.equal(answer.report.backend, "cpu");
  }
});

// Every operation is a method: otherwise this is a type that `true` has not.
const complete: Exclude<OperationName, keyof Client> extends never ? true : never = true;
assert.ok(complete);

test("every operation answers its example", async () => {
  const document = JSON.parse(await readFile("openapi.json", "utf8")) as Document;
  const whole = (await (await fetch(`${url}/openapi.json`)).json()) as Document;
  for (const path of Object.keys(document.paths)) {
    const operation = path.slice(1) as OperationName;
    const example = whole.paths[path]!.post.requestBody.content["application/json"].example;
    const { response: _, ...fields } = example;
    const request = Object.fromEntries(
      Object.entries(fields).map(([name, value]) => [name, isValues(value) ? Tensor.from(value.values as never, value as never) : value]),
    );
    const answer = await client.compute(operation, request as never);
    const by_json = (await (
      await fetch(`${url}${path}`, {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(example),
      })
    ).json()) as Record<string, { values: never; dtype: never }>;
    for (const [name, output] of Object.entries(answer)) {
      if (!(output instanceof Tensor)) continue;
      const { values, dtype } = by_json[name]!;
      assert.deepEqual(output, Tensor.from(values, { dtype }), `${operation}: ${name}`);
    }
    assert.ok(Object.values(answer).some((output) => output instanceof Tensor), operation);
  }
});

test("several outputs, and those that were not asked for", async () => {
  const input = Tensor.from([[[[1, 4], [3, 2]]]]);
  const { output, indices } = await client.maxpool2d_fwd({ input, kernel_size: 2, return_indices: true });
  assert.deepEqual([...output.data], [4]);
  assert.deepEqual([...indices!.data], [1n]);
  const without = await client.maxpool2d_fwd({ input, kernel_size: 2 });
  assert.equal(without.indices, undefined);
});

test("a refusal is an error with a code and what was expected", async () => {
  const call = client.conv_bwd_data({ grad_output, weight: Tensor.full([2, 1, 2, 2], 1) });
  await assert.rejects(call, (error: ConvgradError) => {
    assert.equal(error.code, "invalid-problem");
    assert.equal(error.status, 400);
    assert.match(error.message, /expected 1, the channels of grad_output/);
    return true;
  });
  // @ts-expect-error a tensor is missing
  await assert.rejects(client.conv_bwd_data({ grad_output }), { code: "malformed-request" });
  // @ts-expect-error a parameter that there is not
  await assert.rejects(client.conv_bwd_data({ grad_output, weight, strides: 2 }), /did you mean "stride"/);
});

test("tensors that stay on the server", async () => {
  const kept = await client.put("ts-weight", weight, { timeToLiveS: 60 });
  assert.deepEqual(kept, new Stored("ts-weight", "float32", [1, 1, 2, 2]));
  const { grad_input } = await client.conv_bwd_data({ grad_output, weight: kept });
  assert.deepEqual([...grad_input.toNumbers()].map((value) => value + 0), GRADIENT);
  const made = await client.store("conv_bwd_data", { grad_output, weight: kept }, { grad_input: "ts-g" });
  assert.deepEqual(await client.get(made.grad_input.name), grad_input);
  assert.deepEqual(Object.keys(await client.stored()).sort(), ["ts-g", "ts-weight"]);
  await client.drop("ts-g");
  await client.drop("ts-weight");
  await assert.rejects(client.get("ts-g"), { code: "not-found", status: 404 });
  await assert.rejects(client.put("a/b", weight), /expected 1 to 128 letters/);
});

test("a large tensor goes there and back", async () => {
  const input = Tensor.from(Float32Array.from({ length: 2 ** 21 }, (_, i) => i % 251), { shape: [1, 2, 1024, 1024] });
  const { output } = await client.maxpool2d_fwd({ input, kernel_size: 1 });
  assert.deepEqual(output, input);
});

test("health", async () => assert.equal(await client.isReady(), true));

// What a generator of clients makes of the OpenAPI document by itself, without ours.
test("a client generated from the OpenAPI document calls the server", async () => {
  const generated = createFetchClient<paths>({ baseUrl: url });
  const { data, error } = await generated.POST("/conv_bwd_data", {
    body: {
      grad_output: { values: [[[[1, 2], [3, 4]]]], dtype: "float32" },
      weight: { values: [[[[1, 0], [0, -1]]]], dtype: "float32" },
      response: "values",
    },
  });
  assert.equal(error, undefined);
  assert.ok("values" in data!.grad_input);
  assert.deepEqual((data.grad_input.values as number[][][][]).flat(3).map((value) => value + 0), GRADIENT);
});

interface Document {
  paths: Record<
    string,
    { post: { requestBody: { content: { "application/json": { example: Record<string, unknown> } } } } }
  >;
}

function isValues(value: unknown): value is { values: unknown; dtype: string } {
  return typeof value === "object" && value !== null && !Array.isArray(value) && "values" in value;
}
