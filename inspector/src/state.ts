// What all views share: the source, the job's rows, the theme, what was copied.
import { signal } from "@preact/signals";
import { get, type Columns, type Hit, type Rollouts, type Source } from "./api";

export const source = signal<Source | null>(null);
export const sourceError = signal<string | null>(null);

/** The job's rows. A new object each time that one changes; the columns in it are never changed in place. */
export interface Job {
  columns: Columns;
  cursor: string | number | null;
  /** There is more to come, though nothing is live: the source is still being read. */
  reading: boolean;
  /** Rollouts of which some columns are still being read. */
  unread: number;
}
export const job = signal<Job | null>(null);
export const jobError = signal<string | null>(null);

/** Hits of the last search, so that `n` and `N` go through them in a trajectory. */
export const lastHits = signal<Hit[]>([]);

export const NAMES: (keyof Columns)[] = [
  "rollout", "group", "state", "mask_reason", "harness", "sample", "attempt", "reward", "calls", "turns", "chains",
  "prompt_tokens", "generated_tokens", "trained_tokens", "eligible_links", "exact_links", "put_ms", "logprob_diff",
  "weight_version_min", "weight_version_max", "staleness", "finished_at",
]; // prettier-ignore

export async function loadSource(): Promise<void> {
  try {
    source.value = await get<Source>("source");
    sourceError.value = null;
    document.title = `${source.value.title} · gym-capture`;
  } catch (error) {
    sourceError.value = String(error instanceof Error ? error.message : error);
  }
}

/** Asks for all rows the first time, then for those that are new or changed. */
export async function loadJob(): Promise<void> {
  const before = job.value;
  try {
    const since = before?.cursor == null ? "" : `?since=${encodeURIComponent(before.cursor)}`;
    const answer = await get<Rollouts>(`rollouts${since}`);
    const { cursor, gone = [] } = answer;
    const kept = answer.is_all ? undefined : before?.columns;
    const same = kept !== undefined && gone.length === 0 && !answer.columns.rollout?.length;
    const unread = answer.unread ?? 0;
    const reading = answer.complete === false || unread > 0;
    job.value = { columns: same ? kept : merged(kept && without(kept, gone), answer.columns), cursor, reading, unread };
    jobError.value = answer.problem ?? null;
  } catch (error) {
    jobError.value = String(error instanceof Error ? error.message : error);
  }
}

/** Rows that are known take the new values; the others come behind. */
export function merged(before: Columns | undefined, news: Partial<Columns>): Columns {
  const rows = news.rollout ?? [];
  const rowOf = new Map((before?.rollout ?? []).map((rollout, row) => [rollout, row]));
  for (const rollout of rows) if (!rowOf.has(rollout)) rowOf.set(rollout, rowOf.size);
  const columns = {} as Record<string, unknown[]>;
  for (const name of NAMES) {
    const column: unknown[] = before?.[name].slice() ?? [];
    const values = news[name];
    rows.forEach((rollout, at) => (column[rowOf.get(rollout)!] = values?.[at] ?? null));
    columns[name] = column;
  }
  return columns as unknown as Columns;
}

function without(columns: Columns, gone: string[]): Columns {
  if (gone.length === 0) return columns;
  const names = new Set(gone);
  const kept = columns.rollout.map((rollout) => !names.has(rollout));
  const left = NAMES.map((name) => [name, (columns[name] as unknown[]).filter((_, row) => kept[row])]);
  return Object.fromEntries(left) as Columns;
}

// --- light and dark ---

export type Theme = "auto" | "light" | "dark";
const THEME = "gym-capture-theme";

function stored(): Theme {
  const value = localStorage.getItem(THEME);
  return value === "light" || value === "dark" ? value : "auto";
}

export const theme = signal<Theme>(stored());

const systemDark = matchMedia("(prefers-color-scheme: dark)");

/** Which of the two it is now. */
export const look = signal<"light" | "dark">("light");

function show(): void {
  look.value = theme.value !== "auto" ? theme.value : systemDark.matches ? "dark" : "light";
  document.documentElement.dataset.theme = look.value;
}
systemDark.addEventListener("change", show);

export function applyTheme(next: Theme): void {
  theme.value = next;
  if (next === "auto") localStorage.removeItem(THEME);
  else localStorage.setItem(THEME, next);
  show();
}

// --- said once, to eyes and screen readers ---

export const said = signal("");
let saidTimer = 0;

export function say(text: string): void {
  said.value = text;
  clearTimeout(saidTimer);
  saidTimer = window.setTimeout(() => (said.value = ""), 2500);
}

export async function copy(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // no clipboard without HTTPS, except on this very machine
  }
  say("Copied");
}

function copyBySelection(text: string): void {
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "off-screen";
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}
