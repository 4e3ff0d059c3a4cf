// The job: all its rollouts in a table, and over time. Rows, order and filter stand in the address.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, type Columns, type Series } from "../api";
import { count } from "../format";
import { useKeys, usePoll } from "../hooks";
import { buckets, choices, filtered, MEASURES, newest, NO_FILTER, sorted, type Bucket, type Filter } from "../job-rows";
import { Plot } from "../parts/plot";
import { Problem, Waiting } from "../parts/small";
import { go, link, replace } from "../route";
import { job, jobError, loadJob, source } from "../state";
import { JobTable, SORT_KEYS } from "./job-table";

function filterOf(query: URLSearchParams): Filter {
  const text = (name: string) => query.get(name) ?? "";
  const at = (name: string) => (query.has(name) ? Number(query.get(name)) : null);
  return {
    text: text("q"), state: text("state"), mask: text("mask"), harness: text("harness"), group: text("group"), from: at("from"), to: at("to"),
  }; // prettier-ignore
}

function queryOf(filter: Filter, sort: string, down: boolean): string {
  const query = new URLSearchParams();
  const put = (name: string, value: string | number | null) => value !== "" && value !== null && query.set(name, String(value));
  put("q", filter.text);
  put("state", filter.state);
  put("mask", filter.mask);
  put("harness", filter.harness);
  put("group", filter.group);
  put("from", filter.from);
  put("to", filter.to);
  if (sort) query.set("sort", (down ? "-" : "") + sort);
  return query.toString();
}

export function JobView({ query }: { query: URLSearchParams }) {
  useEffect(() => void loadJob(), []);
  const all = job.value;
  usePoll(loadJob, 2000, (source.value?.live ?? false) || (all?.reading ?? false));
  if (all === null) return jobError.value ? <Problem error={jobError.value} /> : <Waiting what="the rollouts" />;
  return (
    <>
      {jobError.value && <Problem error={jobError.value} />}
      <Loaded columns={all.columns} query={query} unread={all.unread} />
    </>
  );
}

function Loaded({ columns, query, unread }: { columns: Columns; query: URLSearchParams; unread: number }) {
  const filter = useMemo(() => filterOf(query), [query.toString()]);
  const sortBy = query.get("sort") ?? "";
  const down = sortBy.startsWith("-");
  const sort = sortBy.replace(/^-/, "");
  const [at, setAt] = useState(0);
  const text = useRef<HTMLInputElement>(null);

  const rows = useMemo(() => {
    const key = SORT_KEYS[sort];
    const kept = filtered(columns, filter);
    return key ? sorted(kept, columns[key], down) : newest(kept, columns);
  }, [columns, filter, sortBy]);
  const change = (next: Partial<Filter>) => {
    setAt(0);
    replace(link.job(queryOf({ ...filter, ...next }, sort, down)));
  };
  const onSort = (name: string) => {
    setAt(0);
    replace(link.job(queryOf(filter, name, name === sort ? !down : !TEXTS.has(name))));
  };
  const row = rows[Math.min(at, rows.length - 1)];
  const move = (by: number) => setAt(Math.max(0, Math.min(rows.length - 1, at + by)));
  useKeys({
    ArrowDown: () => move(1),
    ArrowUp: () => move(-1),
    PageDown: () => move(20),
    PageUp: () => move(-20),
    Home: () => setAt(0),
    End: () => setAt(Math.max(0, rows.length - 1)),
    Enter: () => row !== undefined && go(link.rollout(columns.rollout[row] ?? "")),
    g: () => row !== undefined && columns.group[row] && go(link.group(columns.group[row])),
    f: () => text.current?.focus(),
    ...(query.toString() ? { Escape: () => replace(link.job()) } : {}),
  });
  return (
    <div class="job">
      <Plots columns={columns} onRange={(from, to) => change({ from, to })} />
      <Filters columns={columns} filter={filter} change={change} input={text} shown={rows.length} unread={unread} />
      <JobTable columns={columns} rows={rows} selected={Math.min(at, Math.max(0, rows.length - 1))} sort={sort} down={down} onSort={onSort} onSelect={setAt} />
    </div>
  );
}

const TEXTS = new Set(["rollout", "group", "state", "mask", "harness"]);

interface FiltersProps {
  columns: Columns;
  filter: Filter;
  change: (next: Partial<Filter>) => void;
  input: { current: HTMLInputElement | null };
  shown: number;
  /** Rollouts of which it is not known yet whether they are masked. */
  unread: number;
}

function Filters({ columns, filter, change, input, shown, unread }: FiltersProps) {
  const options = useMemo(
    () => ({ state: choices(columns.state), mask: choices(columns.mask_reason), harness: choices(columns.harness) }),
    [columns],
  );
  const any = Object.values(filter).some((value) => value !== "" && value !== null);
  return (
    <form class="filters" onSubmit={(event) => event.preventDefault()} aria-label="Filter the rollouts">
      <input
        ref={input}
        type="search"
        aria-label="Filter by text"
        placeholder="Filter: rollout, group, reason  f"
        value={filter.text}
        onInput={(event) => change({ text: event.currentTarget.value })}
      />
      <Choice name="state" value={filter.state} options={options.state} change={(state) => change({ state })} />
      <Choice name="mask" value={filter.mask} options={["masked", "unmasked", ...options.mask]} change={(mask) => change({ mask })} />
      <Choice name="harness" value={filter.harness} options={options.harness} change={(harness) => change({ harness })} />
      {filter.group && (
        <button type="button" class="chip" onClick={() => change({ group: "" })}>
          group {filter.group} ✕
        </button>
      )}
      {filter.from !== null && (
        <button type="button" class="chip" onClick={() => change({ from: null, to: null })}>
          time range ✕
        </button>
      )}
      {any && (
        <button type="button" class="quiet" onClick={() => change(NO_FILTER)}>
          Clear
        </button>
      )}
      <span class="shown" role="status">
        {shown === columns.rollout.length ? `${count(shown)} rollouts` : `${count(shown)} of ${count(columns.rollout.length)} rollouts`}
        {unread > 0 && `, ${count(unread)} still being read`}
      </span>
    </form>
  );
}

function Choice({ name, value, options, change }: { name: string; value: string; options: string[]; change: (value: string) => void }) {
  return (
    <select aria-label={name} value={value} class={value ? "set" : ""} onChange={(event) => change(event.currentTarget.value)}>
      <option value="">{name}: any</option>
      {options.map((option) => (
        <option key={option} value={option}>
          {option}
        </option>
      ))}
    </select>
  );
}

interface Drawn {
  name: string;
  title: string;
  unit: string;
  axis: "time" | "step";
  spread: boolean;
  data: Bucket[];
}

/** Drawn after the table is there, one measure at a time, so that neither waits for the other. */
function Plots({ columns, onRange }: { columns: Columns; onRange: (from: number, to: number) => void }) {
  const [drawn, setDrawn] = useState<Drawn[] | null>(null);
  const [trainer, setTrainer] = useState<Drawn[]>([]);
  useEffect(() => {
    let left = MEASURES.slice();
    const ready: Drawn[] = [];
    const step = () => {
      const measure = left.shift();
      if (!measure) return setDrawn(ready);
      const y = columns.rollout.map((_, row) => measure.of(columns, row));
      const data = buckets(columns.finished_at, y, 60);
      if (data.length > 1) ready.push({ ...measure, axis: "time", data });
      timer = window.setTimeout(step);
    };
    let timer = window.setTimeout(step);
    return () => clearTimeout(timer);
  }, [columns]);
  useEffect(() => {
    get<Series>("series").then(
      ({ series }) =>
        setTrainer(
          Object.entries(series).map(([name, one]) => ({
            name,
            title: one.title || name,
            unit: one.unit ?? "",
            spread: false,
            axis: one.axis === "time" ? "time" : "step",
            data: buckets(one.x, one.y, Math.min(60, one.x.length)),
          })),
        ),
      () => {}, // a source without a trainer
    );
  }, []);
  const [open] = useState(localStorage.getItem(FOLDED) !== "yes" && window.innerHeight > 600);
  if (drawn === null) return <div class="plots-place" />;
  if (drawn.length + trainer.length === 0) return null;
  return (
    <details
      class="plots"
      open={open}
      onToggle={(event) => localStorage.setItem(FOLDED, event.currentTarget.open ? "no" : "yes")}
    >
      <summary>Over time</summary>
      <div class="plot-grid">
        {[...drawn, ...trainer].map((plot) => (
          <Plot key={plot.name} {...plot} onRange={plot.axis === "time" ? onRange : undefined} />
        ))}
      </div>
    </details>
  );
}

const FOLDED = "gym-capture-plots-folded";
