/** What goes wrong: said by the server, or found on the way to it. */

import type { components } from "./openapi.js";

/** The server's codes (docs/reference/errors.md), and those of the way there. */
export type ErrorCode =
  | components["schemas"]["Problem"]["code"]
  /** No server was reached, or the connection was lost. */
  | "connection-failed"
  /** The time for the call was up. */
  | "client-timeout"
  /** What stands before the server answered 429, 502, 503 or 504. */
  | "gateway-error"
  /** The answer is none of convgrad's. */
  | "invalid-answer";

export class ConvgradError extends Error {
  override readonly name = "ConvgradError";
  readonly code: ErrorCode;
  /** The HTTP status, where there was an answer. */
  readonly status: number | undefined;
  /** Names the request in the server's log. */
  readonly requestId: string;
  /** Whether sending the same again can help. */
  readonly retryable: boolean;
  /** Seconds after which the server wants to be asked again. */
  readonly retryAfterS: number | undefined;

  constructor(
    code: ErrorCode,
    detail: string,
    requestId: string,
    more: { status?: number; retryable?: boolean; retryAfterS?: number | undefined; cause?: unknown } = {},
  ) {
    super(`${detail} (request ${requestId})`, { cause: more.cause });
    this.code = code;
    this.status = more.status;
    this.requestId = requestId;
    this.retryable = more.retryable ?? false;
    this.retryAfterS = more.retryAfterS;
  }
}

// The server's own word on what may be sent again; see convgrad.errors, a test compares the two.
export const RETRYABLE: ReadonlySet<string> = new Set([
  "request-timeout",
  "overloaded",
  "device-out-of-memory",
  "device-unavailable",
]);
// Proxies answer with these statuses. So does a server, but only with the codes above and the one below.
const GATEWAY_STATUSES: ReadonlySet<number> = new Set([429, 502, 503, 504]);
const FINAL = "deadline-exceeded";

/** The error that an answer other than 200 is. */
export async function errorOf(answer: Response, requestId: string): Promise<ConvgradError> {
  const { status } = answer;
  const retryAfterS = retryAfter(answer.headers.get("retry-after"));
  const text = await answer.text().catch(() => "");
  const ofAGateway = GATEWAY_STATUSES.has(status);
  if (answer.headers.get("content-type")?.startsWith("application/problem+json")) {
    try {
      const { code, detail } = JSON.parse(text) as { code: ErrorCode; detail: string };
      const retryable = RETRYABLE.has(code);
      if (retryable || code === FINAL || !ofAGateway) {
        return new ConvgradError(code, detail, requestId, { status, retryable, retryAfterS });
      }
    } catch {
      // Not JSON, so not the server's.
    }
  }
  const found = `got status ${status} with ${text.trim().slice(0, 120) || "an empty body"}`;
  if (ofAGateway) {
    const detail = `the server could not be reached through what stands before it: ${found}`;
    return new ConvgradError("gateway-error", detail, requestId, { status, retryable: true, retryAfterS });
  }
  return new ConvgradError("invalid-answer", `expected a convgrad answer, ${found}`, requestId, { status });
}

function retryAfter(value: string | null): number | undefined {
  if (value === null) return undefined;
  if (/^\d+$/.test(value.trim())) return Number(value);
  const moment = Date.parse(value);
  return Number.isNaN(moment) ? undefined : Math.max(0, (moment - Date.now()) / 1000);
}
