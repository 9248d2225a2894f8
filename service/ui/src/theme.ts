/** Light or dark: what the system says, unless the reader chose. */

import { useEffect, useState } from "preact/hooks";

export type Scheme = "light" | "dark";

const system = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set<() => void>();
let chosen: Scheme | null = null;

export const scheme = (): Scheme => chosen ?? (system.matches ? "dark" : "light");

function show(): void {
  document.documentElement.dataset.scheme = scheme();
  for (const listener of listeners) listener();
}

system.addEventListener("change", show);
show();

export function choose(value: Scheme): void {
  chosen = value;
  show();
}

export function useScheme(): Scheme {
  const [value, set] = useState(scheme());
  useEffect(() => {
    const listener = () => set(scheme());
    listeners.add(listener);
    return () => void listeners.delete(listener);
  }, []);
  return value;
}
