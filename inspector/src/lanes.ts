// The tree of calls as lanes beside the list: a chain keeps its lane from the call that it left to its last call.
//
// Rows are calls in the order in which they were made. A lane is free again when its chain is over, so a rollout with
// a hundred side calls, one after the other, takes two lanes.
import type { Call, Role } from "./api";

export interface LaneRow {
  /** Where the call's sign stands. */
  lane: number;
  /** A line from above, and one to below, in its own lane. */
  above: boolean;
  below: boolean;
  /** Lanes that pass by. */
  passing: number[];
  /** Lanes that begin at this call. */
  forks: number[];
}

export interface Lanes {
  rows: LaneRow[];
  width: number;
}

interface Chain {
  from: number; // the row of the call that it left, or of its first
  first: number;
  last: number;
  parent: number | null;
  lane: number;
}

const CONTINUES: ReadonlySet<Role> = new Set(["main", "only"]);

/** Of the calls that continue one, that which stays in its lane: of the main chain, or of the same role. */
function heir(calls: Call[], parent: number, children: number[]): number | undefined {
  const role = calls[parent]?.role;
  return children.find((child) => CONTINUES.has(calls[child]!.role)) ?? children.find((child) => calls[child]!.role === role);
}

export function lanes(calls: Call[]): Lanes {
  const rowOf = new Map(calls.map((call, row) => [call.call, row]));
  const children = new Map<number, number[]>();
  const parentOf = calls.map((call, row) => {
    const parent = call.parent === null ? undefined : rowOf.get(call.parent);
    if (parent === undefined || parent >= row) return null;
    children.set(parent, [...(children.get(parent) ?? []), row]);
    return parent;
  });
  const chains: Chain[] = [];
  const chainOf: Chain[] = [];
  calls.forEach((_, row) => {
    const parent = parentOf[row] ?? null;
    const before = parent === null ? undefined : chainOf[parent];
    if (parent !== null && before && heir(calls, parent, children.get(parent) ?? []) === row) {
      before.last = row;
      chainOf[row] = before;
    } else {
      const chain = { from: parent ?? row, first: row, last: row, parent, lane: 0 };
      chains.push(chain);
      chainOf[row] = chain;
    }
  });
  const busyUntil: number[] = [];
  for (const chain of chains.sort((a, b) => a.from - b.from || a.first - b.first)) {
    let lane = busyUntil.findIndex((until) => until < chain.from);
    if (lane < 0) lane = busyUntil.length;
    chain.lane = lane;
    busyUntil[lane] = chain.last;
  }
  const rows: LaneRow[] = calls.map((_, row) => {
    const chain = chainOf[row]!;
    const above = row > chain.first || chain.parent !== null;
    return { lane: chain.lane, above, below: row < chain.last, passing: [], forks: [] };
  });
  for (const chain of chains) {
    if (chain.parent !== null) rows[chain.parent]!.forks.push(chain.lane);
    for (let row = chain.from + 1; row < chain.last; row++) {
      if (chainOf[row] !== chain) rows[row]!.passing.push(chain.lane);
    }
  }
  return { rows, width: Math.max(1, busyUntil.length) };
}
