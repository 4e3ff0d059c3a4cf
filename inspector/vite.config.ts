import { defineConfig } from "vite";

// Fixed names and relative addresses: the same files work at `/` and behind a graph's `/inspect/`, and a commit shows what
// changed. Nothing is inlined: the page's Content-Security-Policy is `default-src 'self'`.
export default defineConfig({
  base: "./",
  build: {
    outDir: process.env.INSPECTOR_OUT ?? "../gym_capture/inspector/static",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: false,
    assetsInlineLimit: 0,
    rollupOptions: {
      output: { entryFileNames: "app.js", chunkFileNames: "[name].js", assetFileNames: "app[extname]" },
    },
  },
  // `npm run dev` beside `python -m tests.inspector.fake`, or beside `gym-capture ui --port 8765`.
  server: { proxy: { "/api": "http://127.0.0.1:8765" } },
});
