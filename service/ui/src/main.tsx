/** The page: a layer's plan, time and verification; whole networks; the server. */

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";

import { Refusal, useKey } from "./api";
import { LayerView } from "./layer";
import { NetworksView } from "./networks";
import { ServerView } from "./server";
import "./style.css";
import "./charts.css";
import { choose, useScheme } from "./theme";

const VIEWS = { layer: "Layer", networks: "Networks", server: "Server" } as const;
type View = keyof typeof VIEWS;

const viewOf = (hash: string): View => {
  const name = hash.replace(/^#/, "");
  return Object.hasOwn(VIEWS, name) ? (name as View) : "layer";
};

function Page() {
  const [view, setView] = useState(viewOf(location.hash));
  const [asked, setAsked] = useState(false);
  const [entered, setEntered] = useState(0);
  const scheme = useScheme();
  useEffect(() => {
    const follow = () => setView(viewOf(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  useEffect(() => {
    document.title = `${VIEWS[view]} · convgrad`;
  }, [view]);
  const refused = (error: unknown) => {
    if (error instanceof Refusal && error.status === 401) setAsked(true);
  };
  return (
    <>
      <a
        class="skip"
        href="#main"
        onClick={(event) => {
          // The fragment of the address is the view's name.
          event.preventDefault();
          document.getElementById("main")?.focus();
        }}
      >
        Skip to the content
      </a>
      <header>
        <h1>convgrad</h1>
        <nav aria-label="Views">
          {Object.entries(VIEWS).map(([name, title]) => (
            <a href={`#${name}`} aria-current={name === view ? "page" : undefined}>
              {title}
            </a>
          ))}
          <a href="../docs">API</a>
        </nav>
        <button type="button" onClick={() => choose(scheme === "dark" ? "light" : "dark")}>
          {scheme === "dark" ? "Light colours" : "Dark colours"}
        </button>
      </header>
      {asked && (
        <KeyForm
          entered={() => {
            setAsked(false);
            setEntered(entered + 1);
          }}
        />
      )}
      <main id="main" tabIndex={-1} key={entered}>
        {view === "layer" && <LayerView refused={refused} />}
        {view === "networks" && <NetworksView />}
        {view === "server" && <ServerView refused={refused} />}
      </main>
    </>
  );
}

function KeyForm(props: { entered: () => void }) {
  const [value, setValue] = useState("");
  return (
    <form
      class="key panel"
      onSubmit={(event) => {
        event.preventDefault();
        useKey(value);
        props.entered();
      }}
    >
      <label>
        This server requires an API key. The page keeps it in memory only.
        <input
          type="password"
          autocomplete="off"
          autofocus
          value={value}
          onInput={(event) => setValue(event.currentTarget.value)}
        />
      </label>
      <button type="submit">Use this key</button>
    </form>
  );
}

const place = document.getElementById("page");
if (place) render(<Page />, place);
