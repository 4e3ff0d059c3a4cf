// The server's answers, and how they are asked for. Addresses are relative: the page may lie behind a graph's `/inspect/`.
import { signal } from "@preact/signals";

export interface ReasonText {
  meaning?: string;
  means?: string;
  what_to_do?: string;
}

export interface Source {
  title: string;
  kind: string;
  live: boolean;
  shows: { records: boolean; trajectories: boolean; job: boolean; annotations: boolean; texts?: boolean };
  reasons: Record<string, ReasonText>;
  kinds: string[];
  version: string;
}

type Texts = (string | null)[];
type Numbers = (number | null)[];
type Versions = (string | number | null)[];

/** A row is an index into all of these. */
export interface Columns {
  rollout: string[];
  group: Texts;
  state: Texts;
  mask_reason: Texts;
  harness: Texts;
  sample: Numbers;
  attempt: Numbers;
  reward: Numbers;
  calls: Numbers;
  turns: Numbers;
  chains: Numbers;
  prompt_tokens: Numbers;
  generated_tokens: Numbers;
  trained_tokens: Numbers;
  eligible_links: Numbers;
  exact_links: Numbers;
  put_ms: Numbers;
  logprob_diff: Numbers;
  weight_version_min: Versions;
  weight_version_max: Versions;
  staleness: Numbers;
  finished_at: Numbers;
}

export interface Rollouts {
  cursor: string | number | null;
  columns: Partial<Columns>;
  /** The answer is the whole table, not what changed. */
  is_all?: boolean;
  /** Rollouts that are there no more. */
  gone?: string[];
  complete?: boolean;
  /** Rollouts of which some columns are still being read. */
  unread?: number;
  /** Why the source cannot be read now. */
  problem?: string | null;
}

export interface Series {
  series: Record<string, { x: number[]; y: Numbers; unit?: string | null; title?: string | null; axis?: string | null }>;
}

export type Role = "main" | "branch" | "sub_agent" | "side" | "retry" | "aborted" | "unresolved" | "only" | "open";

export interface Link {
  kind: "exact" | "rendered" | "split" | "none";
  reason: string | null;
  words: string | null;
}

export interface Call {
  call: string;
  number: number;
  parent: string | null;
  role: Role;
  link: Link;
  dialect: string | null;
  started_at: number | null;
  seconds: number | null;
  prompt_tokens: number | null;
  supplied_tokens: number | null;
  generated_tokens: number | null;
  finish: string | null;
  weight_versions: string[];
  excluded?: string | null;
  excluded_words?: string | null;
  preview: string | null;
}

export interface Rollout {
  rollout: string;
  group: string | null;
  state: string | null;
  reward: number | null;
  mask_reason: string | null;
  mask_reasons: string[];
  /** By reason, what is known of it beyond its name. */
  mask_details: Record<string, string[]>;
  attempt: number | null;
  harness: string | null;
  cursor: string | number | null;
  calls: Call[];
  unchanged?: boolean;
}

export interface Message {
  role: string;
  text: string | null;
  reasoning?: string | null;
  tool_calls?: { name: string; arguments: string }[] | null;
  tool_result_of?: string | null;
  new?: boolean;
  tokens?: number | null;
}

export interface CallDetail {
  call: string;
  messages: Message[];
  reply: Message | null;
  sampling: Record<string, unknown> | null;
  tokens: { prompt: number | null; generated: number | null } | null;
  notes?: (string | { name: string; words: string })[];
}

export interface Piece {
  ids: number[];
  texts: (string | null)[] | null;
  /** What the ids were taken from, in words. */
  from?: string | null;
}

export interface Split {
  call: string;
  parent: string | null;
  reason: string | null;
  words: string | null;
  at: number | null;
  a: Piece;
  b: Piece;
}

/** From, to, index of the call in the trajectory's calls (-1: none), index of the kind. */
export type Segment = [number, number, number, number];

export interface Trajectory {
  calls: string[];
  /** Where in the trajectory what each call generated stands. */
  generated?: Record<string, [number, number]>;
  /** False: shown, because no trajectory that is delivered has its calls. */
  delivered?: boolean;
  tokens: number;
  trained_tokens: number | null;
  mask_reason: string | null;
  reward: number | null;
  advantage: number | null;
  splits: Split[];
  segments?: Segment[];
}

export interface Tokens {
  from: number;
  to: number;
  total: number;
  ids: number[];
  texts: Texts;
  kinds: number[];
  calls: number[];
  logprobs: Numbers;
  versions: Versions;
  why: Numbers;
  whys: string[];
  overlays: Record<string, Numbers>;
}

export interface Group {
  group: string;
  rollouts: {
    rollout: string;
    sample: number | null;
    reward: number | null;
    advantage: number | null;
    mask_reason: string | null;
    first_prompt: { tokens: number | null; text: string | null } | null;
  }[];
  first_prompts_equal: boolean | null;
  differences: { rollout: string; at: number; a: Piece; b: Piece }[];
}

export interface Hit {
  rollout: string;
  trajectory: number | null;
  token: number | null;
  call: string | null;
  excerpt: string | null;
}

export interface Annotation {
  rollout: string;
  call: string | null;
  token?: number | null;
  name: string;
  value?: number | null;
  /** One for each token that the call generated. */
  values?: Numbers | null;
  note?: string | null;
  by?: string | null;
  at?: number | null;
}

/** What the server said no to, in its own words. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

const TOKEN = "gym-capture-token";

/** True while a request waits for a token that may read. */
export const tokenWanted = signal(false);
let tokenGiven: Promise<void> | null = null;
let give: () => void = () => {};

export function giveToken(token: string): void {
  sessionStorage.setItem(TOKEN, token);
  tokenWanted.value = false;
  tokenGiven = null;
  give();
}

function askForToken(): Promise<void> {
  tokenWanted.value = true;
  tokenGiven ??= new Promise((resolve) => (give = resolve));
  return tokenGiven;
}

async function request<T>(path: string, init: RequestInit): Promise<T> {
  for (;;) {
    const token = sessionStorage.getItem(TOKEN);
    const headers = new Headers(init.headers);
    if (token) headers.set("Authorization", `Bearer ${token}`);
    let response: Response;
    try {
      response = await fetch(`./api/${path}`, { ...init, headers });
    } catch (error) {
      if (init.signal?.aborted) throw error;
      throw new ApiError(0, "The server does not answer. Is gym-capture ui, or the graph, still running?");
    }
    if (response.status === 401 || response.status === 403) {
      await askForToken();
      continue;
    }
    if (!response.ok) throw new ApiError(response.status, await saidOf(response));
    return (await response.json()) as T;
  }
}

async function saidOf(response: Response): Promise<string> {
  try {
    const body: unknown = await response.json();
    if (typeof body === "object" && body !== null) {
      const { error } = body as { error?: { message?: unknown } };
      if (typeof error?.message === "string") return error.message;
    }
  } catch {
    // No JSON: the status says enough.
  }
  return `${response.status} ${response.statusText}`;
}

export function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return request<T>(path, signal ? { signal } : {});
}

export function post<T>(path: string, body: unknown): Promise<T> {
  return request<T>(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
}

/** A path of the API with its parts escaped. */
export function pathOf(...parts: (string | number)[]): string {
  return parts.map((part) => encodeURIComponent(part)).join("/");
}
