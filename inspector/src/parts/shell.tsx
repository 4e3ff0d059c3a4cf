// What stands around every view: title, search, theme, keys, the question for a token.
import { useSignal } from "@preact/signals";
import type { ComponentChild } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { giveToken, tokenWanted } from "../api";
import { useKeys } from "../hooks";
import { go, link, route } from "../route";
import { applyTheme, said, source, theme, type Theme } from "../state";
import { byName, setByName } from "./notes";

const NEXT: Record<Theme, Theme> = { auto: "dark", dark: "light", light: "auto" };
const SIGN: Record<Theme, string> = { auto: "◐", dark: "●", light: "○" };

export function Shell({ children }: { children: ComponentChild }) {
  const help = useSignal(false);
  const search = useRef<HTMLInputElement>(null);
  useKeys({
    "?": () => (help.value = true),
    "/": () => search.current?.focus(),
    Escape: up,
  });
  const info = source.value;
  return (
    <>
      <header class="top">
        <a class="brand" href={link.job()} title="All rollouts">
          <span class="mark" aria-hidden="true" />
          <span>{info?.title ?? "gym-capture"}</span>
        </a>
        {info && (
          <span class="kind">
            {info.kind}
            {info.live && <span class="state-live"> ● live</span>}
          </span>
        )}
        <Crumbs />
        <Search input={search} />
        <button type="button" class="icon" aria-label={`Theme: ${theme.value}`} title={`Theme: ${theme.value}`} onClick={() => applyTheme(NEXT[theme.value])}>
          {SIGN[theme.value]}
        </button>
        <button type="button" class="icon" aria-label="Keys" title="Keys (?)" onClick={() => (help.value = true)}>
          ?
        </button>
      </header>
      <main>{children}</main>
      <p class="said" role="status" aria-live="polite">
        {said.value}
      </p>
      {help.value && <Help close={() => (help.value = false)} />}
      {tokenWanted.value && <TokenQuestion />}
    </>
  );
}

/** Escape goes from the part to the whole. */
function up(): void {
  const at = route.value;
  if (at.view === "trajectory") go(link.rollout(at.rollout));
  else if (at.view !== "job") go(link.job());
}

function Crumbs() {
  const at = route.value;
  const parts: [string, string][] = [];
  if (at.view === "group") parts.push([at.group, link.group(at.group)]);
  if (at.view === "rollout" || at.view === "trajectory") parts.push([at.rollout, link.rollout(at.rollout)]);
  if (at.view === "trajectory") parts.push([`trajectory ${at.trajectory}`, link.trajectory(at.rollout, at.trajectory)]);
  if (parts.length === 0) return <nav class="crumbs" />;
  return (
    <nav class="crumbs" aria-label="Where you are">
      <a href={link.job()}>rollouts</a>
      {parts.map(([name, hash]) => (
        <a key={hash} href={hash}>
          {name}
        </a>
      ))}
    </nav>
  );
}

function Search({ input }: { input: { current: HTMLInputElement | null } }) {
  const where = useRef<HTMLSelectElement>(null);
  const submit = (event: Event) => {
    event.preventDefault();
    const text = input.current?.value.trim() ?? "";
    if (text !== "") go(link.search(text, where.current?.value ?? "text"));
    input.current?.blur();
  };
  return (
    <form class="search" role="search" onSubmit={submit}>
      <select ref={where} aria-label="Search in">
        <option value="text">text</option>
        <option value="id">ids</option>
        <option value="reason">reasons</option>
      </select>
      <input ref={input} type="search" aria-label="Search" placeholder="Search  /" enterkeyhint="search" />
    </form>
  );
}

const KEYS: [string, string][] = [
  ["j k ↓ ↑", "down, up: rows, calls, lines of tokens"],
  ["h l ← →", "token before, token after"],
  ["[ ]", "turn before, turn after"],
  ["n N", "next, previous hit of the last search"],
  ["Enter", "open; in a rollout: its trajectory"],
  ["Esc", "leave the field; then one level up"],
  ["/", "search"],
  ["f", "filter the rollouts"],
  ["g", "the rollout's group"],
  ["m", "colour tokens by the next measure"],
  ["s", "splits of the trajectory, and back"],
  ["c", "copy a permanent link"],
  ["?", "this list"],
];

function Help({ close }: { close: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="help-title">
      <h2 id="help-title">Keys</h2>
      <dl class="keys">
        {KEYS.map(([keys, what]) => (
          <div key={keys}>
            <dt>
              {keys.split(" ").map((key) => (
                <kbd key={key}>{key}</kbd>
              ))}
            </dt>
            <dd>{what}</dd>
          </div>
        ))}
      </dl>
      <label class="by">
        Your name on notes
        <input value={byName()} placeholder="inspector" onInput={(event) => setByName(event.currentTarget.value)} />
      </label>
      <form method="dialog">
        <button type="submit">Close</button>
      </form>
      <p class="muted">gym-capture {source.value?.version}. Offline: this page asks nobody but its own server.</p>
    </dialog>
  );
}

function TokenQuestion() {
  const dialog = useRef<HTMLDialogElement>(null);
  const input = useRef<HTMLInputElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  const submit = (event: Event) => {
    event.preventDefault();
    const token = input.current?.value.trim() ?? "";
    if (token !== "") giveToken(token);
  };
  return (
    <dialog ref={dialog} aria-labelledby="token-title" onCancel={(event) => event.preventDefault()}>
      <h2 id="token-title">This graph asks for a token</h2>
      <p>
        <code>gym-capture token --read</code> prints the one that may read records. It stays in this tab.
      </p>
      <form onSubmit={submit} class="note-form">
        <input ref={input} type="password" aria-label="Token" autoComplete="off" />
        <button type="submit">Open</button>
      </form>
    </dialog>
  );
}
