import assert from "node:assert/strict";
import { createServer, type IncomingMessage, type ServerResponse } from "node:http";
import type { AddressInfo } from "node:net";
import { test } from "node:test";

import { Client, ConvgradError, Tensor } from "../src/index.js";
import { encode } from "../src/safetensors.js";

type Handler = (answer: ServerResponse, request: IncomingMessage) => void;

const x = Tensor.full([1, 1, 2, 2], 1);
const REPORT = { backend: "cpu", kernel: "k", flops: 1, bytes: 1, compute_s: 0 };

const ok: Handler = (answer) => {
  answer.writeHead(200, { "Content-Type": "application/vnd.safetensors" });
  answer.end(encode({ output: x }, { report: JSON.stringify(REPORT) }));
};
const problem =
  (status: number, code: string, headers: Record<string, string> = {}): Handler =>
  (answer) => {
    answer.writeHead(status, { "Content-Type": "application/problem+json", ...headers });
    answer.end(JSON.stringify({ code, detail: "said so" }));
  };
const bare =
  (status: number): Handler =>
  (answer) => {
    answer.writeHead(status).end("nginx");
  };
const lost: Handler = (answer) => answer.destroy();
const cut: Handler = (answer) => {
  answer.writeHead(200, { "Content-Length": "1000" });
  answer.write("half", () => answer.destroy());
};

/** Each request meets the next handler. */
async function against<T>(
  handlers: Handler[],
  call: (client: Client, seen: IncomingMessage[]) => Promise<T>,
  options: ConstructorParameters<typeof Client>[1] = {},
): Promise<T> {
  const seen: IncomingMessage[] = [];
  const server = createServer((request, answer) => {
    seen.push(request);
    request.resume().on("end", () => handlers[seen.length - 1]?.(answer, request));
  });
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  try {
    const { port } = server.address() as AddressInfo;
    return await call(new Client(`http://127.0.0.1:${port}/`, options), seen);
  } finally {
    server.closeAllConnections();
    server.close();
  }
}

const pool = (client: Client) => client.maxpool2d_fwd({ input: x, kernel_size: 1 });

for (const [name, handler] of Object.entries({
  "429": problem(429, "overloaded", { "Retry-After": "0" }),
  "503": problem(503, "device-unavailable"),
  "502 of a proxy": bare(502),
  "503 of a proxy": bare(503),
  "504 of a proxy": bare(504),
  "503 of a proxy with its own problem details": problem(503, "upstream_reset"),
  "a lost connection": lost,
  "an answer that breaks off": cut,
})) {
  test(`after ${name} the same request is sent again`, async () => {
    await against([handler, ok], async (client, seen) => {
      const { output } = await pool(client);
      assert.deepEqual(output, x);
      assert.equal(seen.length, 2);
      assert.equal(seen[0]!.headers["x-request-id"], seen[1]!.headers["x-request-id"]);
    });
  });
}

test("what a second attempt cannot help is thrown at once, with its code", async () => {
  for (const [status, code] of [[400, "invalid-problem"], [504, "deadline-exceeded"]] as const) {
    await against([problem(status, code), ok], async (client, seen) => {
      await assert.rejects(pool(client), (error: ConvgradError) => {
        assert.ok(error instanceof ConvgradError);
        assert.deepEqual([error.code, error.status, error.retryable], [code, status, false]);
        assert.match(error.message, /^said so \(request [0-9a-f-]+\)$/);
        return true;
      });
      assert.equal(seen.length, 1);
    });
  }
});

test("max_retries bounds the attempts", async () => {
  await against([bare(503), bare(503), ok], async (client) => {
    await assert.rejects(pool(client), { code: "gateway-error", status: 503 });
  }, { maxRetries: 1 });
});

test("Retry-After is honoured", async () => {
  const began = performance.now();
  await against([problem(429, "overloaded", { "Retry-After": "1" }), ok], pool);
  assert.ok(performance.now() - began >= 1000);
});

test("what is not convgrad's is an invalid answer", async () => {
  await against([bare(404)], async (client) => {
    await assert.rejects(pool(client), { code: "invalid-answer" });
  });
  await against([(answer) => answer.end("<html>")], async (client) => {
    await assert.rejects(pool(client), { code: "invalid-answer" });
  });
});

test("the time is up for the call as a whole", async () => {
  await against([() => undefined], async (client, seen) => {
    await assert.rejects(pool(client), { code: "client-timeout" });
    const left = Number(seen[0]!.headers["x-request-timeout"]); // less what has passed by then
    assert.ok(left > 0.15 && left <= 0.2, `${left}`);
  }, { timeoutMs: 200 });
});

test("a signal ends a call with its own reason", async () => {
  await against([() => undefined], async (client) => {
    const reason = new Error("no longer wanted");
    const call = client.maxpool2d_fwd({ input: x, kernel_size: 1 }, { signal: AbortSignal.abort(reason) });
    await assert.rejects(call, reason);
  });
});

test("a server that is down says so", async () => {
  const client = new Client("http://127.0.0.1:9", { maxRetries: 0 });
  await assert.rejects(pool(client), { code: "connection-failed", message: /is a server running there/ });
  assert.equal(await client.isReady(), false);
  assert.throws(() => new Client("127.0.0.1:8000"), /expected http:/);
});

test("key and headers are sent", async () => {
  await against([ok], async (client, seen) => {
    await pool(client);
    assert.equal(seen[0]!.headers.authorization, "Bearer secret");
    assert.equal(seen[0]!.headers["x-team"], "7");
  }, { apiKey: "secret", headers: { "X-Team": "7" } });
});
