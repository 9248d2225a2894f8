/** `Client`: every operation of a server as a method. */

import { ConvgradError, errorOf } from "./errors.js";
import type { DType } from "./dtypes.js";
import type { Answer, OperationName, Report, Request } from "./operations.js";
import { MEDIA_TYPE, decode, encode } from "./safetensors.js";
import { Stored, Tensor } from "./tensor.js";

export interface ClientOptions {
  /** Sent as `Authorization: Bearer …`; in Node by default the variable CONVGRAD_API_KEY. */
  apiKey?: string;
  /** Milliseconds for one call in all, retries and the waits between them included. */
  timeoutMs?: number;
  /** How often a call is sent again after a lost connection or an answer that may pass. */
  maxRetries?: number;
  /** Sent with every request. */
  headers?: Readonly<Record<string, string>>;
  /** What sends requests: a `fetch` with a proxy, certificates or a log of its own. */
  fetch?: typeof fetch;
}

export interface CallOptions {
  /** Ends the call; the error is then the signal's reason. */
  signal?: AbortSignal;
  /** Instead of the client's. */
  timeoutMs?: number;
}

interface Sent {
  method: "GET" | "PUT" | "POST" | "DELETE";
  path: string;
  headers?: Record<string, string>;
  body?: Uint8Array<ArrayBuffer>;
}

interface Description {
  name: string;
  dtype: DType;
  shape: number[];
}

const DEFAULT_URL = "http://127.0.0.1:8000";
const FIRST_DELAY_MS = 250;
const LONGEST_DELAY_MS = 8000;

/** A server. Requests are sent by `fetch`, so there is nothing to close.
 *
 * ```ts
 * const client = new Client("http://127.0.0.1:8000");
 * const { grad_input } = await client.conv_bwd_data({ grad_output, weight, stride: 2 });
 * ```
 *
 * Every method rejects with a `ConvgradError` where the server refuses or cannot be reached. Calls are
 * sent again after 429, 502, 503, 504 and lost connections, which is safe: operations are pure
 * functions. */
export class Client {
  readonly baseUrl: string;
  readonly #headers: Readonly<Record<string, string>>;
  readonly #timeoutMs: number;
  readonly #maxRetries: number;
  readonly #fetch: typeof fetch;

  /** `baseUrl` is in Node by default the variable CONVGRAD_URL. */
  constructor(baseUrl?: string, options: ClientOptions = {}) {
    this.baseUrl = (baseUrl ?? environment("CONVGRAD_URL") ?? DEFAULT_URL).replace(/\/+$/, "");
    if (!/^https?:\/\//.test(this.baseUrl)) {
      throw new TypeError(`expected http://… or https://…, got ${this.baseUrl}`);
    }
    const apiKey = options.apiKey ?? environment("CONVGRAD_API_KEY");
    this.#headers = {
      ...(apiKey === undefined ? {} : { Authorization: `Bearer ${apiKey}` }),
      ...options.headers,
    };
    this.#timeoutMs = options.timeoutMs ?? 60_000;
    this.#maxRetries = options.maxRetries ?? 2;
    this.#fetch = options.fetch ?? globalThis.fetch.bind(globalThis);
  }

  conv_bwd_data(request: Request<"conv_bwd_data">, options?: CallOptions) {
    return this.compute("conv_bwd_data", request, options);
  }
  grouped_conv_bwd_weight(request: Request<"grouped_conv_bwd_weight">, options?: CallOptions) {
    return this.compute("grouped_conv_bwd_weight", request, options);
  }
  maxpool2d_bwd(request: Request<"maxpool2d_bwd">, options?: CallOptions) {
    return this.compute("maxpool2d_bwd", request, options);
  }
  maxpool3d_bwd(request: Request<"maxpool3d_bwd">, options?: CallOptions) {
    return this.compute("maxpool3d_bwd", request, options);
  }
  conv3d_backprop_input(request: Request<"conv3d_backprop_input">, options?: CallOptions) {
    return this.compute("conv3d_backprop_input", request, options);
  }
  grouped_conv_conv_fwd(request: Request<"grouped_conv_conv_fwd">, options?: CallOptions) {
    return this.compute("grouped_conv_conv_fwd", request, options);
  }
  conv3d_transpose(request: Request<"conv3d_transpose">, options?: CallOptions) {
    return this.compute("conv3d_transpose", request, options);
  }
  conv_fwd(request: Request<"conv_fwd">, options?: CallOptions) {
    return this.compute("conv_fwd", request, options);
  }
  maxpool2d_fwd(request: Request<"maxpool2d_fwd">, options?: CallOptions) {
    return this.compute("maxpool2d_fwd", request, options);
  }
  maxpool3d_fwd(request: Request<"maxpool3d_fwd">, options?: CallOptions) {
    return this.compute("maxpool3d_fwd", request, options);
  }
  conv_backward(request: Request<"conv_backward">, options?: CallOptions) {
    return this.compute("conv_backward", request, options);
  }
  conv_transpose_fwd(request: Request<"conv_transpose_fwd">, options?: CallOptions) {
    return this.compute("conv_transpose_fwd", request, options);
  }
  conv_transpose_backward(request: Request<"conv_transpose_backward">, options?: CallOptions) {
    return this.compute("conv_transpose_backward", request, options);
  }
  conv_double_backward(request: Request<"conv_double_backward">, options?: CallOptions) {
    return this.compute("conv_double_backward", request, options);
  }
  conv_transpose_double_backward(request: Request<"conv_transpose_double_backward">, options?: CallOptions) {
    return this.compute("conv_transpose_double_backward", request, options);
  }
  maxpool1d_fwd(request: Request<"maxpool1d_fwd">, options?: CallOptions) {
    return this.compute("maxpool1d_fwd", request, options);
  }
  maxpool1d_bwd(request: Request<"maxpool1d_bwd">, options?: CallOptions) {
    return this.compute("maxpool1d_bwd", request, options);
  }
  avg_pool_fwd(request: Request<"avg_pool_fwd">, options?: CallOptions) {
    return this.compute("avg_pool_fwd", request, options);
  }
  avg_pool_bwd(request: Request<"avg_pool_bwd">, options?: CallOptions) {
    return this.compute("avg_pool_bwd", request, options);
  }
  adaptive_avg_pool_fwd(request: Request<"adaptive_avg_pool_fwd">, options?: CallOptions) {
    return this.compute("adaptive_avg_pool_fwd", request, options);
  }
  adaptive_avg_pool_bwd(request: Request<"adaptive_avg_pool_bwd">, options?: CallOptions) {
    return this.compute("adaptive_avg_pool_bwd", request, options);
  }
  adaptive_max_pool_fwd(request: Request<"adaptive_max_pool_fwd">, options?: CallOptions) {
    return this.compute("adaptive_max_pool_fwd", request, options);
  }
  adaptive_max_pool_bwd(request: Request<"adaptive_max_pool_bwd">, options?: CallOptions) {
    return this.compute("adaptive_max_pool_bwd", request, options);
  }
  max_unpool_fwd(request: Request<"max_unpool_fwd">, options?: CallOptions) {
    return this.compute("max_unpool_fwd", request, options);
  }
  max_unpool_bwd(request: Request<"max_unpool_bwd">, options?: CallOptions) {
    return this.compute("max_unpool_bwd", request, options);
  }

  /** Any operation by its name. */
  async compute<O extends OperationName>(
    operation: O,
    request: Request<O>,
    options?: CallOptions,
  ): Promise<Answer<O>> {
    return (await this.#compute(operation, request, {}, options)) as Answer<O>;
  }

  /** Compute an operation and keep outputs on the server: `store` has the names there by output. */
  async store<O extends OperationName, S extends Readonly<Record<string, string>>>(
    operation: O,
    request: Request<O>,
    store: S,
    options?: CallOptions,
  ): Promise<{ [Output in keyof S]: Stored }> {
    return (await this.#compute(operation, request, { store }, options)) as {
      [Output in keyof S]: Stored;
    };
  }

  /** Keep a tensor on the server under a name, which then stands for it in requests. */
  async put(
    name: string,
    tensor: Tensor,
    { timeToLiveS, ...options }: CallOptions & { timeToLiveS?: number } = {},
  ): Promise<Stored> {
    const headers: Record<string, string> = { "Content-Type": MEDIA_TYPE };
    if (timeToLiveS !== undefined) headers["X-Time-To-Live"] = String(timeToLiveS);
    const body = encode({ tensor });
    const path = tensorPath(name);
    return this.#send({ method: "PUT", path, headers, body }, options, async (answer) =>
      stored((await answer.json()) as Description),
    );
  }

  /** The elements of a stored tensor. */
  async get(name: string, options?: CallOptions): Promise<Tensor> {
    const headers = { Accept: MEDIA_TYPE };
    const sent: Sent = { method: "GET", path: tensorPath(name), headers };
    return this.#send(sent, options, async (answer) => {
      const [tensor] = Object.values(decode(await answer.arrayBuffer()).tensors);
      if (tensor === undefined) throw new RangeError("it holds no tensor");
      return tensor;
    });
  }

  /** Have the server forget a stored tensor. */
  async drop(name: string, options?: CallOptions): Promise<void> {
    const sent: Sent = { method: "DELETE", path: tensorPath(name) };
    await this.#send(sent, options, (answer) => answer.arrayBuffer());
  }

  /** The tensors that the server keeps, by name. */
  async stored(options?: CallOptions): Promise<Record<string, Stored>> {
    return this.#send({ method: "GET", path: "tensors" }, options, async (answer) => {
      const { tensors } = (await answer.json()) as { tensors: Description[] };
      return Object.fromEntries(tensors.map((each) => [each.name, stored(each)]));
    });
  }

  /** Whether the server accepts requests. */
  async isReady(options: CallOptions = {}): Promise<boolean> {
    try {
      const signal = this.#signal(options);
      const answer = await this.#fetch(`${this.baseUrl}/v2/health/ready`, { signal });
      await answer.arrayBuffer();
      return answer.status === 200;
    } catch {
      options.signal?.throwIfAborted();
      return false;
    }
  }

  async #compute(
    operation: OperationName,
    request: object,
    extra: object,
    options?: CallOptions,
  ): Promise<Record<string, unknown>> {
    const tensors: Record<string, Tensor> = {};
    const named: Record<string, string> = {};
    const parameters: Record<string, unknown> = { ...extra };
    for (const [name, value] of Object.entries(request)) {
      if (value instanceof Tensor) tensors[name] = value;
      else if (value instanceof Stored) named[name] = value.name;
      else if (value !== undefined) parameters[name] = value;
    }
    if (Object.keys(named).length > 0) parameters["stored"] = named;
    const headers = { "Content-Type": MEDIA_TYPE, Accept: MEDIA_TYPE };
    const body = encode(tensors, { parameters: JSON.stringify(parameters) });
    const sent: Sent = { method: "POST", path: operation, headers, body };
    return this.#send(sent, options, async (answer, requestId) => {
      const { tensors: outputs, metadata } = decode(await answer.arrayBuffer());
      const report = JSON.parse(metadata["report"] ?? "null") as Report;
      const kept = JSON.parse(metadata["stored"] ?? "{}") as Record<string, Description & { stored: string }>;
      const names = Object.entries(kept).map(([output, each]) => [
        output,
        new Stored(each.stored, each.dtype, each.shape),
      ]);
      return { ...outputs, ...Object.fromEntries(names), report, requestId };
    });
  }

  /** One call: attempts until one is answered, the time is up or trying again cannot help. */
  async #send<T>(
    sent: Sent,
    options: CallOptions = {},
    read: (answer: Response, requestId: string) => Promise<T>,
  ): Promise<T> {
    const requestId = newRequestId();
    const timeoutMs = options.timeoutMs ?? this.#timeoutMs;
    const until = Date.now() + timeoutMs;
    const signal = this.#signal(options);
    for (let attempt = 1; ; attempt++) {
      let error: ConvgradError;
      try {
        return await this.#attempt(sent, requestId, until, signal, read);
      } catch (found) {
        options.signal?.throwIfAborted();
        if (signal.aborted) {
          throw new ConvgradError("client-timeout", `no answer within ${timeoutMs} ms`, requestId);
        }
        error = found as ConvgradError;
      }
      const delayMs = delay(attempt, error.retryAfterS);
      if (!error.retryable || attempt > this.#maxRetries || Date.now() + delayMs >= until) throw error;
      await new Promise((resolve) => setTimeout(resolve, delayMs));
      options.signal?.throwIfAborted();
    }
  }

  async #attempt<T>(
    sent: Sent,
    requestId: string,
    until: number,
    signal: AbortSignal,
    read: (answer: Response, requestId: string) => Promise<T>,
  ): Promise<T> {
    const { method, body } = sent;
    const url = `${this.baseUrl}/${sent.path}`;
    const headers: Record<string, string> = { ...this.#headers, ...sent.headers };
    headers["X-Request-Id"] = requestId;
    if (method === "POST") {
      headers["X-Request-Timeout"] = (Math.max(until - Date.now(), 1) / 1000).toFixed(3);
    }
    const init: RequestInit = { method, headers, signal, ...(body === undefined ? {} : { body }) };
    let answer: Response;
    try {
      answer = await this.#fetch(url, init);
    } catch (cause) {
      const detail = `no answer from ${url}: ${reason(cause)}; is a server running there?`;
      throw new ConvgradError("connection-failed", detail, requestId, { retryable: true, cause });
    }
    if (answer.status !== 200) throw await errorOf(answer, requestId);
    try {
      return await read(answer, requestId);
    } catch (cause) {
      // What `fetch` reports of a body that breaks off is a TypeError, as for a connection.
      const lost = cause instanceof TypeError;
      const detail = lost
        ? `the answer from ${url} broke off: ${reason(cause)}`
        : `the answer from ${url} cannot be read: ${reason(cause)}`;
      throw new ConvgradError(lost ? "connection-failed" : "invalid-answer", detail, requestId, {
        retryable: lost,
        cause,
      });
    }
  }

  #signal(options: CallOptions): AbortSignal {
    const timeout = AbortSignal.timeout(options.timeoutMs ?? this.#timeoutMs);
    return options.signal === undefined ? timeout : AbortSignal.any([timeout, options.signal]);
  }
}

// `crypto.randomUUID` is missing where a page came over plain HTTP.
function newRequestId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(8));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function stored({ name, dtype, shape }: Description): Stored {
  return new Stored(name, dtype, shape);
}

function tensorPath(name: string): string {
  if (!/^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$/.test(name)) {
    throw new TypeError(
      `a stored tensor cannot be called ${JSON.stringify(name)}: expected 1 to 128 letters, digits, ` +
        `"_", "-" and ".", beginning with a letter, a digit or "_"`,
    );
  }
  return `tensors/${name}`;
}

/** Exponential, with jitter, and no sooner than the server asked for. */
function delay(attempt: number, retryAfterS: number | undefined): number {
  if (retryAfterS !== undefined) return retryAfterS * 1000 * (1 + Math.random() / 4);
  const full = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** (attempt - 1));
  return (full * (1 + Math.random())) / 2;
}

/** What an exception of `fetch` says; Node puts what happened into its cause. */
function reason(error: unknown): string {
  const { message, cause } = error as Error;
  return cause instanceof Error ? `${message}: ${cause.message || String((cause as { code?: string }).code)}` : message;
}

function environment(name: string): string | undefined {
  const { process } = globalThis as { process?: { env?: Record<string, string | undefined> } };
  return process?.env?.[name] || undefined;
}
