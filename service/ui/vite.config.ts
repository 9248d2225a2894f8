import { defineConfig } from "vite";

// Relative addresses, so that the page works behind any path; nothing inline, as the page's
// Content-Security-Policy allows no inline script or style.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../convgrad_service/http_api/page",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 300,
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  // `npm run dev` beside `convgrad serve`
  server: { proxy: { "^/(?!src|node_modules|@|index.html)": "http://127.0.0.1:8000" } },
});
