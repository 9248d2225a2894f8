/** The server's endpoints that the page uses, and the parts of their answers that it shows. */

export interface Operation {
  name: string;
  summary: string;
  tensors: Record<string, { required: boolean; description: string }>;
  outputs?: Record<string, unknown>;
}

export interface Tensor {
  shape: number[];
  dtype: string;
}

export interface Roofline {
  seconds: number;
  limited_by: string;
  flops_per_s: number;
  bytes_per_s: number;
  source: string;
}

export interface Plan {
  kernel: string;
  workspace_bytes: number;
  pieces: number;
  passed_over: { kernel: string; reason: string }[];
}

export interface Device {
  backend: string;
  name: string;
  index: number;
  processors: number;
}

export interface Again {
  command: string;
}

export interface PlanAnswer {
  device: Device;
  plan: Plan;
  inputs: Record<string, Tensor>;
  outputs: Record<string, Tensor>;
  flops: number;
  valid_flops: number;
  bytes: number;
  reference: Roofline;
  again: Again;
}

export interface Layer {
  title: string;
  kind: string;
  operation: string | null;
  batch: number;
  in_channels: number;
  out_channels: number;
  groups: number;
  input_size: number[];
  output_size: number[];
  kernel_size: number[];
  stride: number[];
  padding: [number, number][];
  dilation: number[];
  output_padding: number[];
  ceil_mode: boolean;
  count_include_pad: boolean;
  bias: boolean;
  operations: string[];
  spellings: Record<string, string>;
}

export interface Timing {
  samples: number;
  median_s: number;
  min_s: number;
  max_s: number;
  p05_s: number;
  p95_s: number;
  standard_error: number;
  converged: boolean;
  flops_per_s: number;
  bytes_per_s: number;
  reference_share: number;
  samples_s: number[];
}

export interface TimeAnswer extends Omit<PlanAnswer, "inputs" | "outputs"> {
  timings: Record<"cold" | "warm" | "back_to_back", Timing | null>;
  clocks_after: Record<string, number | boolean | null> | null;
  peers: { name: string; timings: Record<string, Timing | null> | null; reason: string | null }[];
  candidates: {
    kernel: string;
    chosen: boolean;
    predicted_s: number | null;
    measured_s: number | null;
    reason: string | null;
  }[];
}

export interface Histogram {
  edges: number[];
  counts: number[];
}

export interface OutputReport {
  shape: number[];
  elements: number;
  passed: boolean;
  exceeding: number;
  worst: { index: number[]; value: Value; reference: Value; bound: Value; share: Value } | null;
  shares: Histogram;
  ulps: { max: number } | null;
  exact: { applies: boolean; reason: string | null; passed: boolean | null };
  bits: { digest: string; equal_to_ours: boolean | null };
  heat_map: { axes: string[]; extents: number[]; values: Value[][] } | null;
}

/** A number; those that JSON cannot hold are text, such as "NaN". */
export type Value = number | string;

export interface VerifyAnswer {
  passed: boolean;
  findings: { code: string; output: string | null; sentence: string }[];
  outputs: Record<string, OutputReport>;
  adjointness: Record<string, { applies: boolean; reason: string | null; passed: boolean | null }>;
  ours: { kernel: string; passed: boolean } | null;
  reference: { device: string; flops: number; seconds: number };
  again: Again;
}

/** An error that the server answered. */
export class Refusal extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    detail: string,
  ) {
    super(detail);
  }
}

let key = "";

/** Set the API key, which is kept in memory only. */
export function useKey(value: string): void {
  key = value;
}

// The page is at <root>/ui/; everything else is beside it.
const root = new URL("..", document.baseURI);

async function send(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let answer: Response;
  try {
    answer = await fetch(new URL(path, root), { ...init, headers });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new Refusal(0, "unreachable", "The server does not answer. Is it still running?");
  }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => ({}));
    throw new Refusal(
      answer.status,
      problem.code ?? "unknown",
      problem.detail ?? `The server answered ${answer.status} ${answer.statusText}.`,
    );
  }
  return answer;
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await send(path, { signal: signal ?? null })).json();
}

export async function getText(path: string): Promise<string> {
  return (await send(path)).text();
}

export async function postJson<T>(path: string, body: unknown, signal: AbortSignal): Promise<T> {
  const answer = await send(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  return answer.json();
}

/** Time an operation; `report` is called with its place in the queue, and when it runs. */
export async function time(
  operation: string,
  body: unknown,
  signal: AbortSignal,
  report: (state: string) => void,
): Promise<TimeAnswer> {
  const answer = await send(`time/${operation}`, {
    method: "POST",
    headers: { "Content-Type": "application/json", Accept: "text/event-stream" },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.body) throw new Refusal(0, "unreachable", "The answer has no body.");
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refusal(0, "cut-off", "The connection ended before the result came.");
    text += value;
    const events = text.split("\n\n");
    text = events.pop() ?? "";
    for (const event of events) {
      const name = /^event: (.*)$/m.exec(event)?.[1];
      const data = JSON.parse(/^data: (.*)$/m.exec(event)?.[1] ?? "{}");
      if (name === "queued") {
        report(data.position === 0 ? "next in the queue" : `${data.position} ahead in the queue`);
      } else if (name === "running") report("running");
      else if (name === "result") return data;
      else if (name === "error") throw new Refusal(data.status, data.code, data.detail);
    }
  }
}
