// Which rows of the job are shown, in which order; and the job over time, in steps.
import type { Columns } from "./api";

export interface Filter {
  text: string;
  state: string;
  mask: string;
  harness: string;
  group: string;
  from: number | null;
  to: number | null;
}

export const NO_FILTER: Filter = { text: "", state: "", mask: "", harness: "", group: "", from: null, to: null };

/** `masked` and `unmasked` stand for any reason and none. */
function maskFits(mask: string | null, wanted: string): boolean {
  if (wanted === "masked") return mask !== null;
  if (wanted === "unmasked") return mask === null;
  return mask !== null && mask.split(":", 1)[0] === wanted;
}

export function filtered(columns: Columns, filter: Filter): number[] {
  const text = filter.text.trim().toLowerCase();
  const rows: number[] = [];
  for (let row = 0; row < columns.rollout.length; row++) {
    if (filter.state && columns.state[row] !== filter.state) continue;
    if (filter.mask && !maskFits(columns.mask_reason[row] ?? null, filter.mask)) continue;
    if (filter.harness && columns.harness[row] !== filter.harness) continue;
    if (filter.group && columns.group[row] !== filter.group) continue;
    const at = columns.finished_at[row];
    if (filter.from !== null && (at == null || at < filter.from)) continue;
    if (filter.to !== null && (at == null || at > filter.to)) continue;
    if (text && !textOf(columns, row).includes(text)) continue;
    rows.push(row);
  }
  return rows;
}

function textOf(columns: Columns, row: number): string {
  return `${columns.rollout[row]} ${columns.group[row] ?? ""} ${columns.mask_reason[row] ?? ""} ${columns.harness[row] ?? ""}`.toLowerCase();
}

/** Rows without a value come last, whichever the direction; equal ones stay as they came. */
export function sorted(rows: number[], column: (number | string | null)[], down: boolean): number[] {
  const sign = down ? -1 : 1;
  return rows.slice().sort((a, b) => {
    const x = column[a] ?? null;
    const y = column[b] ?? null;
    if (x === y) return a - b;
    if (x === null) return 1;
    if (y === null) return -1;
    return (x < y ? -1 : 1) * sign;
  });
}

/** What is live first, then what was over last. */
export function newest(rows: number[], columns: Columns): number[] {
  const at = (row: number) => (columns.state[row] === "live" ? Infinity : (columns.finished_at[row] ?? 0));
  return rows.slice().sort((a, b) => (at(a) === at(b) ? a - b : at(b) - at(a)));
}

export function choices(column: (string | null)[]): string[] {
  return [...new Set(column.filter((value) => value !== null).map((value) => value.split(":", 1)[0] ?? ""))].sort();
}

// --- over time ---

export interface Bucket {
  from: number;
  to: number;
  mean: number;
  low: number;
  high: number;
  count: number;
}

/** The mean, and what lies between the tenth and the ninetieth of a hundred, in equal steps of `x`. */
export function buckets(x: (number | null)[], y: (number | null)[], steps: number): Bucket[] {
  let first = Infinity;
  let last = -Infinity;
  for (let at = 0; at < x.length; at++) {
    const value = x[at];
    if (value == null || y[at] == null) continue;
    if (value < first) first = value;
    if (value > last) last = value;
  }
  if (first > last) return [];
  const width = (last - first) / steps || 1;
  const values: number[][] = Array.from({ length: steps }, () => []);
  for (let at = 0; at < x.length; at++) {
    const value = x[at];
    const measured = y[at];
    if (value == null || measured == null) continue;
    values[Math.min(steps - 1, Math.floor((value - first) / width))]?.push(measured);
  }
  return values.flatMap((all, step) => {
    if (all.length === 0) return [];
    all.sort((a, b) => a - b);
    const at = (part: number) => all[Math.min(all.length - 1, Math.floor(part * all.length))] ?? 0;
    const mean = all.reduce((sum, value) => sum + value, 0) / all.length;
    return [{ from: first + step * width, to: first + (step + 1) * width, mean, low: at(0.1), high: at(0.9), count: all.length }];
  });
}

export interface Measure {
  name: string;
  title: string;
  unit: string;
  /** Its values spread: a band shows between what. Of a share, the mean says all. */
  spread: boolean;
  of: (columns: Columns, row: number) => number | null;
}

const ratio = (part: number | null | undefined, all: number | null | undefined) => (part == null || !all ? null : part / all);

/** Versions are names; one that is a number can be drawn. */
function counted(version: string | number | null | undefined): number | null {
  const value = version == null || version === "" ? Number.NaN : Number(version);
  return Number.isFinite(value) ? value : null;
}

export const MEASURES: Measure[] = [
  { name: "reward", title: "reward", unit: "", spread: true, of: (c, row) => c.reward[row] ?? null },
  { name: "contiguity", title: "exact / eligible links", unit: "", spread: false, of: (c, row) => ratio(c.exact_links[row], c.eligible_links[row]) },
  { name: "masked", title: "masked", unit: "", spread: false, of: (c, row) => (c.state[row] === "live" ? null : c.mask_reason[row] == null ? 0 : 1) },
  { name: "logprob_diff", title: "|log prob difference|", unit: "", spread: true, of: (c, row) => c.logprob_diff[row] ?? null },
  { name: "generated", title: "generated tokens", unit: "", spread: true, of: (c, row) => c.generated_tokens[row] ?? null },
  { name: "turns", title: "turns", unit: "", spread: true, of: (c, row) => c.turns[row] ?? null },
  { name: "put_ms", title: "put latency", unit: "ms", spread: true, of: (c, row) => c.put_ms[row] ?? null },
  { name: "weight_version", title: "weight version", unit: "", spread: false, of: (c, row) => counted(c.weight_version_max[row]) },
  { name: "staleness", title: "staleness", unit: "versions", spread: false, of: (c, row) => c.staleness[row] ?? null },
];
