// Permanent links: the part of the address behind `#` says what is shown, down to a token.
import { signal } from "@preact/signals";

export type Route =
  | { view: "job"; query: URLSearchParams }
  | { view: "search"; query: URLSearchParams }
  | { view: "group"; group: string }
  | { view: "rollout"; rollout: string; call: string | null }
  | { view: "trajectory"; rollout: string; trajectory: number; token: number | null; splits: boolean }
  | { view: "unknown"; path: string };

export function parse(hash: string): Route {
  const [path = "", search = ""] = hash.replace(/^#/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  const [view, id, part, of, token, at] = parts;
  if (view === undefined) return { view: "job", query: new URLSearchParams(search) };
  if (view === "search") return { view: "search", query: new URLSearchParams(search) };
  if (view === "group" && id !== undefined) return { view: "group", group: id };
  if (view === "rollout" && id !== undefined) {
    if (part === undefined) return { view: "rollout", rollout: id, call: null };
    if (part === "call" && of !== undefined) return { view: "rollout", rollout: id, call: of };
    if (part === "trajectory" && Number.isInteger(Number(of))) {
      const number = token === "token" && at !== undefined ? Number.parseInt(at, 10) : Number.NaN;
      return {
        view: "trajectory",
        rollout: id,
        trajectory: Number(of),
        token: Number.isNaN(number) ? null : number,
        splits: token === "splits",
      };
    }
  }
  return { view: "unknown", path };
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a lone `%` that somebody typed
  }
}

const enc = encodeURIComponent;

export const link = {
  job: (query = "") => `#/${query && `?${query}`}`,
  search: (query: string, where: string) => `#/search?${new URLSearchParams({ q: query, where })}`,
  group: (group: string) => `#/group/${enc(group)}`,
  rollout: (rollout: string) => `#/rollout/${enc(rollout)}`,
  call: (rollout: string, call: string) => `#/rollout/${enc(rollout)}/call/${enc(call)}`,
  trajectory: (rollout: string, trajectory: number) => `#/rollout/${enc(rollout)}/trajectory/${trajectory}`,
  splits: (rollout: string, trajectory: number) => `#/rollout/${enc(rollout)}/trajectory/${trajectory}/splits`,
  token: (rollout: string, trajectory: number, token: number) =>
    `#/rollout/${enc(rollout)}/trajectory/${trajectory}/token/${token}`,
};

export const route = signal<Route>(parse(location.hash));

window.addEventListener("hashchange", () => {
  route.value = parse(location.hash);
});

export function go(hash: string): void {
  location.hash = hash;
}

/** Changes the address without a step in the history: for what moves with each key. */
export function replace(hash: string): void {
  if (location.hash === hash) return;
  history.replaceState(null, "", hash);
  route.value = parse(hash);
}

/** The address of this page at another place in it, to be sent to somebody. */
export function permanent(hash: string): string {
  return new URL(hash, location.href).href;
}
