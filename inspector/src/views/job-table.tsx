// The table of rollouts. Only the rows in sight are in the document, and only the columns in which there is something.
import type { Columns } from "../api";
import { count, number, time, versions } from "../format";
import { memo } from "../hooks";
import { Rows } from "../parts/rows";
import { State } from "../parts/small";
import { link } from "../route";
import type { ComponentChild } from "preact";
import { useMemo } from "preact/hooks";

interface Column {
  name: string;
  title: string;
  about: string;
  sort: keyof Columns;
  numeric: boolean;
  cell: (columns: Columns, row: number) => ComponentChild;
}

function text(name: string, sort: keyof Columns, about: string, cell?: Column["cell"]): Column {
  return { name, title: name, about, sort, numeric: false, cell: cell ?? ((columns, row) => columns[sort][row] ?? "") };
}

function figure(name: string, title: string, sort: keyof Columns, about: string, cell?: Column["cell"]): Column {
  return { name, title, about, sort, numeric: true, cell: cell ?? ((columns, row) => count(columns[sort][row] as number | null)) };
}

const TABLE: Column[] = [
  text("rollout", "rollout", "Enter opens it", (c, row) => <a href={link.rollout(c.rollout[row] ?? "")} tabIndex={-1}>{c.rollout[row]}</a>),
  text("state", "state", "live, finished or failed", (c, row) => <State state={c.state[row] ?? null} />),
  figure("reward", "reward", "reward", "what the environment gave", (c, row) => number(c.reward[row])),
  text("mask", "mask_reason", "why it is not trained; gym-capture explain says more"),
  figure("turns", "turns", "turns", "turns of the main chain"),
  figure("calls", "calls", "calls", "all model calls"),
  figure("chains", "chains", "chains", "trajectories that its calls make"),
  figure("trained", "trained", "trained_tokens", "generated tokens that are trained"),
  figure("generated", "generated", "generated_tokens", "generated tokens"),
  figure("exact", "exact", "exact_links", "links that continue the exact ids, of those that could", (c, row) => <Exact exact={c.exact_links[row]} of={c.eligible_links[row]} />),
  figure("diff", "|Δ log p|", "logprob_diff", "mean difference of log probabilities, engine against trainer", (c, row) => number(c.logprob_diff[row])),
  figure("version", "weights", "weight_version_max", "weight versions that sampled it", (c, row) => versions(c.weight_version_min[row], c.weight_version_max[row])),
  figure("stale", "stale", "staleness", "versions behind the trainer's"),
  figure("put", "put ms", "put_ms", "milliseconds to make a record durable", (c, row) => number(c.put_ms[row])),
  figure("attempt", "attempt", "attempt", "1: played once"),
  text("harness", "harness", "what played it"),
  text("group", "group", "its group; g opens it", (c, row) => c.group[row] && <a href={link.group(c.group[row])} tabIndex={-1}>{c.group[row]}</a>),
  text("finished", "finished_at", "when it was over", (c, row) => time(c.finished_at[row])),
]; // prettier-ignore

const ALWAYS = new Set(["rollout", "state"]);

function filled(columns: Columns): Column[] {
  const said = (value: number | string | null) => value !== null && value !== "";
  return TABLE.filter((column) => ALWAYS.has(column.name) || columns[column.sort].some(said));
}

export const SORT_KEYS: Record<string, keyof Columns> = Object.fromEntries(TABLE.map((column) => [column.name, column.sort]));

function Exact({ exact, of }: { exact: number | null | undefined; of: number | null | undefined }) {
  if (exact == null || of == null) return null;
  return (
    <span class={exact < of ? "short" : ""}>
      {exact} / {of}
    </span>
  );
}

interface Props {
  columns: Columns;
  rows: number[];
  selected: number;
  sort: string;
  down: boolean;
  onSort: (name: string) => void;
  onSelect: (index: number) => void;
}

const ROW = 28;

export function JobTable({ columns, rows, selected, sort, down, onSort, onSelect }: Props) {
  const table = useMemo(() => filled(columns), [columns]);
  const head = (
    <div class="job-row job-head" role="row">
      {table.map((column) => (
        <div
          key={column.name}
          class={`cell c-${column.name}${column.numeric ? " num" : ""}`}
          role="columnheader"
          aria-sort={column.name !== sort ? "none" : down ? "descending" : "ascending"}
        >
          <button type="button" title={column.about} onClick={() => onSort(column.name)}>
            {column.title}
            <span aria-hidden="true">{column.name !== sort ? "" : down ? " ↓" : " ↑"}</span>
          </button>
        </div>
      ))}
    </div>
  );
  return (
    <Rows
      class="job-table"
      role="grid"
      label="Rollouts"
      count={rows.length}
      height={ROW}
      headHeight={30}
      selected={rows.length ? selected : null}
      active={rows.length ? `row-${selected}` : undefined}
      head={head}
      row={(index) => (
        <Row table={table} columns={columns} row={rows[index] ?? 0} index={index} selected={index === selected} onSelect={onSelect} />
      )}
    />
  );
}

interface RowProps {
  table: Column[];
  columns: Columns;
  row: number;
  index: number;
  selected: boolean;
  onSelect: (index: number) => void;
}

const Row = memo(function row({ table, columns, row, index, selected, onSelect }: RowProps) {
  return (
    <div
      id={`row-${index}`}
      class={`job-row${selected ? " selected" : ""}${columns.mask_reason[row] ? " masked" : ""}`}
      role="row"
      aria-rowindex={index + 2}
      aria-selected={selected}
      onClick={() => onSelect(index)}
      onDblClick={() => (location.hash = link.rollout(columns.rollout[row] ?? ""))}
    >
      {table.map((column) => (
        <div key={column.name} class={`cell c-${column.name}${column.numeric ? " num" : ""}`} role="gridcell">
          {column.cell(columns, row)}
        </div>
      ))}
    </div>
  );
});
