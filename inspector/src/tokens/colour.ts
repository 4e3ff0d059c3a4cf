// What a token's colour says. A class for each step, so that themes choose the colours; underlines say it a second time.
import type { Source } from "../api";
import { number, percent } from "../format";
import type { Chunk, TokenStore } from "./store";

export interface Step {
  class: string;
  words: string;
}

export interface Scale {
  name: string;
  title: string;
  legend: Step[];
  /** The class of a token of a chunk. */
  of: (chunk: Chunk, index: number) => string;
}

const KIND_WORDS: Record<string, string> = {
  prompt: "prompt",
  trained: "generated, trained",
  not_trained: "generated, not trained",
  inserted_close: "inserted close",
  not_told: "prompt, or generated and not trained: not told",
};

export function kindWords(kind: string | undefined): string {
  return kind === undefined ? "" : (KIND_WORDS[kind] ?? kind.replaceAll("_", " "));
}

function byKind(source: Source | null): Scale {
  const kinds = source?.kinds ?? [];
  const classes = kinds.map((kind) => (kind in KIND_WORDS ? `kind-${kind}` : "kind-other"));
  return {
    name: "kind",
    title: "kind",
    legend: kinds.map((kind, index) => ({ class: classes[index] ?? "", words: kindWords(kind) })),
    of: (chunk, index) => classes[chunk.tokens.kinds[index] ?? -1] ?? "",
  };
}

const PROBABILITIES = [0.9, 0.5, 0.1, 0.01, 0.001];
const LOG_EDGES = PROBABILITIES.map((p) => -Math.log(p));

const BY_LOGPROB: Scale = {
  name: "logprob",
  title: "log probability",
  legend: [
    { class: "seq-0", words: "over 90 %" },
    { class: "seq-1", words: "over 50 %" },
    { class: "seq-2", words: "over 10 %" },
    { class: "seq-3", words: "over 1 %" },
    { class: "seq-4", words: "over 0.1 %" },
    { class: "seq-5", words: "less" },
  ],
  of: (chunk, index) => {
    const value = chunk.tokens.logprobs[index];
    return value == null ? "none" : `seq-${stepOf(-value, LOG_EDGES)}`;
  },
};

function stepOf(value: number, edges: number[]): number {
  let step = 0;
  while (step < edges.length && value >= (edges[step] ?? Infinity)) step++;
  return step;
}

function byVersion(store: TokenStore): Scale {
  const seen = new Set<string>();
  for (const chunk of store.loaded()) for (const version of chunk.tokens.versions) if (version != null) seen.add(String(version));
  const versions = [...seen].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const classes = new Map(versions.map((version, index) => [version, `cat-${index % 4}`]));
  return {
    name: "version",
    title: "weight version",
    legend: [...classes].map(([version, name]) => ({ class: name, words: version })),
    of: (chunk, index) => {
      const version = chunk.tokens.versions[index];
      return (version != null && classes.get(String(version))) || "none";
    },
  };
}

/** Steps at parts of the values that were read: a few that are far out do not hide the rest. */
function byValues(name: string, store: TokenStore): Scale {
  const sizes: number[] = [];
  let negative = false;
  for (const chunk of store.loaded()) {
    for (const value of chunk.tokens.overlays[name] ?? []) {
      if (value == null) continue;
      negative ||= value < 0;
      sizes.push(Math.abs(value));
    }
  }
  sizes.sort((a, b) => a - b);
  const parts = negative ? [0.25, 0.6, 0.9] : [0.2, 0.5, 0.8, 0.95, 0.99];
  const edges = [...new Set(parts.map((part) => sizes[Math.floor(part * (sizes.length - 1))] ?? 0))];
  const values = (chunk: Chunk) => chunk.tokens.overlays[name];
  if (!negative) {
    return {
      name,
      title: name,
      legend: [
        { class: "seq-0", words: `under ${number(edges[0])}` },
        ...edges.map((edge, step) => ({ class: `seq-${step + 1}`, words: `${number(edge)} and more` })),
      ],
      of: (chunk, index) => {
        const value = values(chunk)?.[index];
        return value == null ? "none" : `seq-${stepOf(value, edges)}`;
      },
    };
  }
  const far = edges.map((edge, step) => ({ class: `div-p${step + 1}`, words: `+${number(edge)}` }));
  const low = edges.map((edge, step) => ({ class: `div-n${step + 1}`, words: `−${number(edge)}` })).reverse();
  return {
    name,
    title: name,
    legend: [...low, { class: "div-0", words: "about 0" }, ...far],
    of: (chunk, index) => {
      const value = values(chunk)?.[index];
      if (value == null) return "none";
      const step = stepOf(Math.abs(value), edges);
      return step === 0 ? "div-0" : `div-${value < 0 ? "n" : "p"}${step}`;
    },
  };
}

export function scaleNames(store: TokenStore): string[] {
  const overlays = new Set<string>();
  for (const chunk of store.loaded()) for (const name of Object.keys(chunk.tokens.overlays)) overlays.add(name);
  return ["kind", "logprob", "version", ...[...overlays].sort()];
}

export function scaleOf(name: string, source: Source | null, store: TokenStore): Scale {
  if (name === "kind") return byKind(source);
  if (name === "logprob") return BY_LOGPROB;
  if (name === "version") return byVersion(store);
  return byValues(name, store);
}

export function scaleTitle(name: string): string {
  return name === "logprob" ? "log probability" : name === "version" ? "weight version" : name.replaceAll("_", " ");
}

export function probability(logprob: number | null | undefined): string {
  return logprob == null ? "" : `${percent(Math.exp(logprob))} (log ${number(logprob)})`;
}
