// A gradient from Node or a browser with fetch alone: safetensors in and out, no package needed.
// In a browser the server must allow the page's origin (CONVGRAD_CORS_ORIGINS).

const SAFETENSORS = "application/vnd.safetensors";

/** {name: {shape, data: Float32Array}} and parameters as the bytes of a safetensors file. */
function encode(tensors, parameters) {
  const header = { __metadata__: { parameters: JSON.stringify(parameters) } };
  let end = 0;
  for (const [name, { shape, data }] of Object.entries(tensors)) {
    header[name] = { dtype: "F32", shape, data_offsets: [end, (end += data.byteLength)] };
  }
  let text = JSON.stringify(header);
  text = text.padEnd(Math.ceil(text.length / 8) * 8); // so that the data is aligned
  const bytes = new Uint8Array(8 + text.length + end);
  new DataView(bytes.buffer).setBigUint64(0, BigInt(text.length), true);
  bytes.set(new TextEncoder().encode(text), 8);
  let at = 8 + text.length;
  for (const { data } of Object.values(tensors)) {
    bytes.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
    at += data.byteLength;
  }
  return bytes;
}

/** The float32 tensors of a safetensors file by name. */
function decode(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  delete header.__metadata__;
  return Object.fromEntries(
    Object.entries(header).map(([name, { shape, data_offsets: [begin, end] }]) => [
      name,
      { shape, data: new Float32Array(buffer.slice(8 + length + begin, 8 + length + end)) },
    ]),
  );
}

/** Compute an operation; throws what the server says is wrong. */
export async function compute(url, operation, tensors, parameters = {}) {
  const answer = await fetch(`${url}/${operation}`, {
    method: "POST",
    headers: { "Content-Type": SAFETENSORS },
    body: encode(tensors, parameters),
  });
  if (!answer.ok) throw new Error((await answer.json()).detail);
  return decode(await answer.arrayBuffer());
}

const url = globalThis.process?.env.CONVGRAD_URL ?? "http://127.0.0.1:8000";
const ones = (...shape) => ({ shape, data: new Float32Array(shape.reduce((a, b) => a * b)).fill(1) });
const { grad_input: gradient } = await compute(
  url,
  "conv_bwd_data",
  { grad_output: ones(1, 4, 8, 8), weight: ones(4, 2, 3, 3) },
  { padding: 1 },
);
console.log(gradient.shape.join("x"), Math.max(...gradient.data)); // 1x2x8x8 36
