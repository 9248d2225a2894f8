/** Parts that several views share. */

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

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

/** Scrolls what is too wide for the page, by keyboard too. */
export function Scroll(props: { label: string; children: ComponentChildren }) {
  const place = useRef<HTMLDivElement>(null);
  const [scrolls, setScrolls] = useState(false);
  useEffect(() => {
    const element = place.current;
    if (!element) return;
    const watch = new ResizeObserver(() => setScrolls(element.scrollWidth > element.clientWidth));
    for (const watched of [element, ...element.children]) watch.observe(watched);
    return () => watch.disconnect();
  }, []);
  const stop = scrolls ? { tabIndex: 0, role: "region" as const, "aria-label": props.label } : {};
  return (
    <div class="scroll" ref={place} {...stop}>
      {props.children}
    </div>
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
