// The tokens of a trajectory in chunks, read when they come in sight, and how they break into lines.
//
// Invariant: a chunk begins a line, so does a turn, and a line break in a token ends one. So how a chunk breaks depends on
// nothing but the chunk, the turns and the width; of a chunk that was not read yet, the number of lines is estimated.
import { signal } from "@preact/signals";
import { get, pathOf, type Tokens } from "../api";
import { columnsOf, shown, visible } from "../format";
import type { Turns } from "./turns";

export const CHUNK = 2048;
const KEPT = 96; // chunks in memory: about 200,000 tokens

export interface Chunk {
  from: number;
  tokens: Tokens;
  /** What stands for a token in its line: up to its last line break, if it has one. */
  shown: string[];
  /** What follows a token's last line break, and begins the next line: indentation, as a rule. */
  tails: Map<number, string>;
  columns: Uint16Array;
}

/** A line of tokens; or the heading of what begins there. */
export interface Line {
  from: number;
  to: number;
  heading: boolean;
}

export class TokenStore {
  /** Changes with each chunk that was read. */
  readonly version = signal(0);
  readonly error = signal<string | null>(null);
  readonly chunkCount: number;
  private readonly chunks = new Map<number, Chunk>();
  private readonly wanted = new Set<number>();
  /** Chunks as they were when there were fewer tokens: shown until they are read again. */
  private readonly stale = new Set<number>();

  constructor(
    private readonly rollout: string,
    private readonly trajectory: number,
    readonly total: number,
    before: TokenStore | null = null,
  ) {
    this.chunkCount = Math.max(1, Math.ceil(total / CHUNK));
    for (const [index, chunk] of before?.chunks ?? []) {
      if (chunk.from + chunk.shown.length > total) continue;
      this.chunks.set(index, chunk);
      this.stale.add(index);
    }
  }

  chunk(index: number): Chunk | undefined {
    return this.chunks.get(index);
  }

  loaded(): Iterable<Chunk> {
    return this.chunks.values();
  }

  /** The chunk of a token, and where in it. */
  at(token: number): { chunk: Chunk; index: number } | null {
    const chunk = this.chunks.get(Math.floor(token / CHUNK));
    const index = token - (chunk?.from ?? 0);
    return chunk && index >= 0 && index < chunk.shown.length ? { chunk, index } : null;
  }

  want(index: number): void {
    if (index < 0 || index >= this.chunkCount || this.wanted.has(index)) return;
    if (this.chunks.has(index) && !this.stale.has(index)) return;
    this.wanted.add(index);
    const path = `${pathOf("rollouts", this.rollout, "trajectories", this.trajectory)}/tokens`;
    get<Tokens>(`${path}?from=${index * CHUNK}&to=${Math.min(this.total, (index + 1) * CHUNK)}`)
      .then(
        (tokens) => {
          this.keep(index, tokens);
          this.error.value = null;
        },
        (error: Error) => (this.error.value = error.message),
      )
      .finally(() => {
        this.wanted.delete(index);
        this.version.value++;
      });
  }

  private keep(index: number, tokens: Tokens): void {
    const tails = new Map<number, string>();
    const texts = tokens.ids.map((_, at) => {
      const text = tokens.texts[at] ?? null;
      const end = text === null ? -1 : text.lastIndexOf("\n") + 1;
      if (text === null || end <= 0 || end === text.length || at === tokens.ids.length - 1) return shown(text);
      tails.set(at, visible(text.slice(end)));
      return shown(text.slice(0, end));
    });
    const columns = Uint16Array.from(texts, (text) => Math.min(columnsOf(text), 0xffff));
    this.chunks.set(index, { from: index * CHUNK, tokens, shown: texts, tails, columns });
    this.stale.delete(index);
    for (const old of this.chunks.keys()) {
      if (this.chunks.size <= KEPT) break;
      if (Math.abs(old - index) > 2) this.chunks.delete(old);
    }
  }
}

/** Where the lines of all chunks are, for one width. */
export class Layout {
  private readonly lines = new Map<number, Line[]>();
  private readonly brokenOf = new Map<number, Chunk>();
  private starts: number[] = [0];

  constructor(
    private readonly store: TokenStore,
    private readonly columns: number,
    private readonly turns: Turns,
  ) {
    this.refresh();
  }

  /** Reads which chunks are there now. */
  refresh(): void {
    let known = 0;
    let tokens = 0;
    for (let index = 0; index < this.store.chunkCount; index++) {
      const chunk = this.store.chunk(index);
      if (chunk && this.brokenOf.get(index) !== chunk) {
        this.brokenOf.set(index, chunk);
        this.lines.set(index, broken(chunk, this.columns, this.turns));
      }
      const lines = this.lines.get(index);
      if (lines) {
        known += lines.length;
        tokens += chunk?.shown.length ?? Math.min(CHUNK, this.store.total - index * CHUNK);
      }
    }
    const perToken = tokens ? known / tokens : 1 / Math.max(4, this.columns / 5);
    let start = 0;
    this.starts = [0];
    for (let index = 0; index < this.store.chunkCount; index++) {
      const size = Math.min(CHUNK, this.store.total - index * CHUNK);
      start += this.lines.get(index)?.length ?? Math.max(1, Math.ceil(size * perToken));
      this.starts.push(start);
    }
  }

  get count(): number {
    return this.starts[this.starts.length - 1] ?? 0;
  }

  /** Whether the lines of a chunk are known, and not estimated. */
  isKnown(chunk: number): boolean {
    return this.lines.has(chunk);
  }

  startOf(chunk: number): number {
    return this.starts[chunk] ?? 0;
  }

  chunkAt(line: number): number {
    let low = 0;
    let high = this.starts.length - 2;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if ((this.starts[middle] ?? 0) <= line) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** The line, or null: its chunk is not there. */
  line(line: number): { chunk: Chunk; line: Line } | null {
    const index = this.chunkAt(line);
    const chunk = this.store.chunk(index);
    const found = this.lines.get(index)?.[line - this.startOf(index)];
    return chunk && found ? { chunk, line: found } : null;
  }

  /** The line of a token; estimated, if its chunk was not read. */
  lineOf(token: number): { line: number; exact: boolean } {
    const index = Math.min(this.store.chunkCount - 1, Math.floor(token / CHUNK));
    const start = this.startOf(index);
    const lines = this.lines.get(index);
    if (!lines) {
      const part = (token - index * CHUNK) / CHUNK;
      return { line: start + Math.floor(part * (this.startOf(index + 1) - start)), exact: false };
    }
    let at = lines.length - 1;
    while (at > 0 && ((lines[at]?.from ?? 0) > token || lines[at]?.heading)) at--;
    return { line: start + at, exact: true };
  }
}

function broken({ from, tokens, columns, tails }: Chunk, width: number, turns: Turns): Line[] {
  const lines: Line[] = [];
  let begin = 0;
  let used = 0;
  const end = (at: number) => {
    if (at > begin) lines.push({ from: from + begin, to: from + at, heading: false });
    begin = at;
    used = 0;
  };
  for (let at = 0; at < columns.length; at++) {
    const size = (columns[at] ?? 0) + 0.25; // the gap between tokens
    if (turns.headings.has(from + at)) {
      end(at);
      lines.push({ from: from + at, to: from + at, heading: true });
    } else if (used + size > width) end(at);
    used += size;
    if (tokens.texts[at]?.includes("\n")) {
      end(at + 1);
      used = columnsOf(tails.get(at) ?? "");
    }
  }
  end(columns.length);
  return lines;
}
