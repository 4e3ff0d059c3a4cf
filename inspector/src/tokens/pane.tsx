// Tokens as text, line by line; only the lines in sight are in the document.
import { useLayoutEffect, useMemo, useRef, useState } from "preact/hooks";
import type { JSX } from "preact";
import { memo, useSize } from "../hooks";
import type { Scale } from "./colour";
import { kindWords } from "./colour";
import { CHUNK, Layout, type Chunk, type Line, type TokenStore } from "./store";
import type { Turns } from "./turns";
import { source } from "../state";

export const LINE = 22;
const STEP = 4;

interface Props {
  store: TokenStore;
  turns: Turns;
  scale: Scale;
  selected: number | null;
  marked: ReadonlySet<number>;
  onSelect: (token: number) => void;
  onHover: (token: number | null) => void;
  onView: (from: number, to: number) => void;
  /** Set by the pane: the token above or below, in the same column as far as there is one. */
  vertical: { current: (token: number, by: number) => number };
}

export function TokenPane({ store, turns, scale, selected, marked, onSelect, onHover, onView, vertical }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const probe = useRef<HTMLSpanElement>(null);
  const size = useSize(box);
  const [top, setTop] = useState(0);
  const [letter, setLetter] = useState(0);
  const version = store.version.value;
  useLayoutEffect(() => setLetter((probe.current?.getBoundingClientRect().width ?? 0) / 100), [size.width]);
  const gutter = size.width < 600 ? 8 : 70;
  const columns = letter ? Math.max(12, Math.floor((size.width - gutter - 24) / letter)) : 0;
  const layout = useMemo(() => new Layout(store, columns || 80, turns), [store, columns, turns]);

  // What is in sight stays in sight when a chunk above turns out longer or shorter than was thought.
  const before = { chunk: layout.chunkAt(Math.floor(top / LINE)), starts: layout.startOf(layout.chunkAt(Math.floor(top / LINE))) };
  const linesBefore = layout.startOf(before.chunk + 1) - before.starts;
  const wasKnown = layout.isKnown(before.chunk);
  useMemo(() => layout.refresh(), [layout, version]);
  const anchored = useRef<{ chunk: number; part: number; pixels: number } | null>(null);
  if (layout.startOf(before.chunk) !== before.starts || layout.startOf(before.chunk + 1) - layout.startOf(before.chunk) !== linesBefore) {
    const offset = top - before.starts * LINE;
    const same = wasKnown || layout.startOf(before.chunk + 1) - layout.startOf(before.chunk) === linesBefore;
    anchored.current = { chunk: before.chunk, part: same ? 0 : offset / (linesBefore * LINE), pixels: same ? offset : 0 };
  }
  useLayoutEffect(() => {
    const anchor = anchored.current;
    if (!anchor || !box.current) return;
    anchored.current = null;
    const lines = layout.startOf(anchor.chunk + 1) - layout.startOf(anchor.chunk);
    box.current.scrollTop = layout.startOf(anchor.chunk) * LINE + anchor.pixels + anchor.part * lines * LINE;
    setTop(box.current.scrollTop);
  });

  // A token that was chosen comes in sight: near at once, exactly when its chunk is there.
  const sought = useRef<number | null>(null);
  const guessed = useRef(false);
  const seekNow = () => {
    const element = box.current;
    if (!element || sought.current === null || columns === 0) return;
    const { line, exact } = layout.lineOf(sought.current);
    const y = line * LINE;
    if (guessed.current || y < element.scrollTop + LINE || y + 2 * LINE > element.scrollTop + element.clientHeight) {
      const above = y < element.scrollTop + LINE;
      const far = (above ? element.scrollTop - y : y - element.scrollTop - element.clientHeight) > 4 * LINE;
      element.scrollTop = far || guessed.current ? y - element.clientHeight / 3 : above ? y - LINE : y + 2 * LINE - element.clientHeight;
    }
    guessed.current = !exact;
    if (exact) sought.current = null;
    if (element.scrollTop !== top) setTop(element.scrollTop);
  };
  useLayoutEffect(() => {
    sought.current = selected;
    seekNow();
  }, [selected, columns]); // not when it grows: who has scrolled away from it stays there
  useLayoutEffect(seekNow, [version, size.height]);

  vertical.current = (token, by) => {
    const { line } = layout.lineOf(token);
    const here = layout.line(line);
    const offset = here ? columnsBefore(here.chunk, here.line, token) : 0;
    for (let next = line + by; next >= 0 && next < layout.count; next += Math.sign(by)) {
      const found = layout.line(next);
      if (!found) return Math.max(0, Math.min(store.total - 1, token + by * 12));
      if (!found.line.heading) return tokenAt(found.chunk, found.line, offset);
    }
    return token;
  };

  const first = Math.max(0, Math.floor(top / LINE / STEP) * STEP - STEP);
  const last = Math.min(layout.count, first + Math.ceil(size.height / LINE) + 3 * STEP);
  useLayoutEffect(() => {
    const element = box.current;
    if (columns === 0 || !element) return;
    const line = Math.floor(element.scrollTop / LINE); // where it is now, be it drawn or not
    const end = layout.chunkAt(line + Math.ceil(size.height / LINE) + STEP);
    for (let chunk = layout.chunkAt(Math.max(0, line - STEP)); chunk <= end; chunk++) store.want(chunk);
  });
  const onScroll = () => {
    const element = box.current;
    if (!element) return;
    if (Math.floor(element.scrollTop / LINE / STEP) !== Math.floor(top / LINE / STEP)) setTop(element.scrollTop);
    const shown = layout.line(Math.floor(element.scrollTop / LINE));
    const end = layout.line(Math.floor((element.scrollTop + element.clientHeight) / LINE) - 1);
    if (shown) onView(shown.line.from, end?.line.to ?? shown.line.from + CHUNK);
  };
  const tokenOf = (event: Event) => {
    const value = (event.target as HTMLElement).dataset?.t;
    return value === undefined ? null : Number(value);
  };
  const pool = last - first;
  const lines: JSX.Element[] = [];
  for (let index = first; index < last; index++) {
    const found = layout.line(index);
    const inside = selected !== null && found && !found.line.heading && selected >= found.line.from && selected < found.line.to;
    lines.push(
      <div key={index % pool} class="line-place" role="presentation" style={{ top: `${index * LINE}px` }}>
        {found ? (
          <TokenLine {...found} scale={scale} selected={inside ? selected : null} turns={turns} marked={marked} />
        ) : (
          <div class="line-waiting" aria-hidden="true" />
        )}
      </div>,
    );
  }
  return (
    <div
      ref={box}
      class="tokens"
      role="listbox"
      aria-label="Tokens"
      aria-activedescendant={selected === null ? undefined : `t${selected}`}
      tabIndex={0}
      onScroll={onScroll}
      onPointerOver={(event) => event.pointerType === "mouse" && onHover(tokenOf(event))}
      onPointerLeave={() => onHover(null)}
      onClick={(event) => {
        const token = tokenOf(event);
        if (token !== null) onSelect(token);
      }}
    >
      <span ref={probe} class="probe" aria-hidden="true">
        {"0".repeat(100)}
      </span>
      <div class="rows-all" role="presentation" style={{ height: `${layout.count * LINE + LINE}px` }}>
        {lines}
      </div>
    </div>
  );
}

function columnsBefore(chunk: Chunk, line: Line, token: number): number {
  let columns = 0;
  for (let at = line.from; at < token; at++) columns += chunk.columns[at - chunk.from] ?? 0;
  return columns + (chunk.columns[token - chunk.from] ?? 0) / 2;
}

function tokenAt(chunk: Chunk, line: Line, offset: number): number {
  let columns = 0;
  for (let at = line.from; at < line.to; at++) {
    columns += chunk.columns[at - chunk.from] ?? 0;
    if (columns >= offset) return at;
  }
  return line.to - 1;
}

interface LineProps {
  chunk: Chunk;
  line: Line;
  scale: Scale;
  selected: number | null;
  turns: Turns;
  marked: ReadonlySet<number>;
}

const TokenLine = memo(function tokenLine({ chunk, line, scale, selected, turns, marked }: LineProps) {
  if (line.heading) {
    const turn = turns.headings.get(line.from);
    const kind = source.peek()?.kinds[chunk.tokens.kinds[line.from - chunk.from] ?? -1];
    return (
      <div class="heading" role="presentation">
        <span>{turn ? `turn ${turns.all.indexOf(turn) + 1}` : "prompt"}</span>
        {turn && <span class="muted">{kindWords(kind)}</span>}
        {turn && <code class="muted">{turn.call}</code>}
      </div>
    );
  }
  const spans: JSX.Element[] = [];
  const before = line.from - chunk.from - 1;
  const tail = turns.headings.has(line.from) ? undefined : chunk.tails.get(before);
  if (tail !== undefined) {
    spans.push(
      <span data-t={line.from - 1} aria-hidden="true" class={`t ${scale.of(chunk, before)}`}>
        {tail}
      </span>,
    );
  }
  for (let token = line.from; token < line.to; token++) {
    const index = token - chunk.from;
    const on = token === selected;
    spans.push(
      <span
        id={`t${token}`}
        data-t={token}
        role="option"
        aria-selected={on || undefined}
        class={`t ${scale.of(chunk, index)}${on ? " on" : ""}${marked.has(token) ? " noted" : ""}`}
      >
        {chunk.shown[index]}
      </span>,
    );
  }
  return (
    <div class="line" role="presentation">
      <span class="gutter" aria-hidden="true">
        {line.from}
      </span>
      {spans}
    </div>
  );
});
