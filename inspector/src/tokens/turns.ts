// Where in a trajectory what each call generated stands.
import type { Segment, Trajectory } from "../api";

export interface Turn {
  call: string;
  from: number;
  to: number;
}

export class Turns {
  /** In their order. */
  readonly all: readonly Turn[];
  /** What begins at a token: what a call generated, or (null) the prompt of the next. */
  readonly headings: ReadonlyMap<number, Turn | null>;

  constructor(trajectory: Trajectory) {
    this.all = Object.entries(trajectory.generated ?? {})
      .map(([call, [from, to]]) => ({ call, from, to }))
      .sort((a, b) => a.from - b.from);
    const headings = new Map<number, Turn | null>([[0, null]]);
    for (const turn of this.all) if (turn.to < trajectory.tokens) headings.set(turn.to, null);
    for (const turn of this.all) headings.set(turn.from, turn);
    this.headings = headings;
  }

  /** The turn that a token was generated in. */
  at(token: number): Turn | undefined {
    return this.all.find((turn) => turn.from <= token && token < turn.to);
  }

  after(token: number): Turn | undefined {
    return this.all.find((turn) => turn.from > token);
  }

  before(token: number): Turn | undefined {
    return this.all.findLast((turn) => turn.from < token);
  }

  /** The trajectory's token for one of a call's generated tokens. */
  tokenOf(call: string | null, token: number | null): number | null {
    const turn = this.all.find((one) => one.call === call);
    return turn === undefined || token === null ? null : turn.from + token;
  }

  /** For the overview, where the server says nothing finer. */
  segments(kinds: string[]): Segment[] {
    const trained = kinds.indexOf("trained");
    return this.all.map((turn, index) => [turn.from, turn.to, index, trained]);
  }
}
