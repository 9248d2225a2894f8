/** Parts that several views share. */

import type { ComponentChildren } from "preact";

import { Refusal } from "./api";

export function Facts(props: { facts: [string, ComponentChildren][] }) {
  return (
    <dl>
      {props.facts.map(([name, value]) => (
        <div>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Problem(props: { error: unknown }) {
  const { error } = props;
  const text = error instanceof Error ? error.message : String(error);
  return (
    <p class="problem" role="alert">
      {text}
      {error instanceof Refusal && error.code !== "unreachable" && <span class="quiet"> ({error.code})</span>}
    </p>
  );
}

/** The command that repeats the request. */
export function Again(props: { command: string }) {
  return (
    <p class="again">
      Repeat with: <code>{props.command}</code>
    </p>
  );
}
