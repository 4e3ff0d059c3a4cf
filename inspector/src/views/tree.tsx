// The calls of a rollout as a tree: lanes on the left, beside each call what it is and how it continues the one before.
import { useMemo } from "preact/hooks";
import type { Call, Link, Role } from "../api";
import { count, seconds, shown } from "../format";
import { memo } from "../hooks";
import { lanes, type LaneRow } from "../lanes";
import { Rows } from "../parts/rows";

export const ROLE: Record<Role, string> = {
  main: "main chain",
  only: "only call",
  branch: "branch",
  sub_agent: "sub-agent",
  side: "side call",
  retry: "retry",
  aborted: "aborted",
  unresolved: "unresolved",
  open: "no record yet",
};

const LINK: Record<Link["kind"], [string, string]> = {
  exact: ["═", "continues the exact ids"],
  rendered: ["↻", "rendered again"],
  split: ["≠", "split"],
  none: ["", ""],
};

const ROW = 46;
const STEP = 14;
const MOST_LANES = 6;

interface Props {
  calls: Call[];
  selected: number | null;
  onSelect: (index: number) => void;
  follow: boolean;
}

export function Tree({ calls, selected, onSelect, follow }: Props) {
  const drawn = useMemo(() => lanes(calls), [calls]);
  const width = Math.min(drawn.width, MOST_LANES) * STEP + 6;
  return (
    <Rows
      class="tree"
      role="tree"
      label="Calls"
      count={calls.length}
      height={ROW}
      selected={selected}
      active={selected === null ? undefined : `call-${selected}`}
      follow={follow}
      row={(index) => {
        const call = calls[index];
        const row = drawn.rows[index];
        return call && row && <Item call={call} row={row} width={width} index={index} selected={index === selected} onSelect={onSelect} />;
      }}
    />
  );
}

interface ItemProps {
  call: Call;
  row: LaneRow;
  width: number;
  index: number;
  selected: boolean;
  onSelect: (index: number) => void;
}

const Item = memo(function item({ call, row, width, index, selected, onSelect }: ItemProps) {
  return (
    <div
      id={`call-${index}`}
      class={`call role-${call.role}${selected ? " selected" : ""}`}
      role="treeitem"
      aria-level={row.lane + 1}
      aria-selected={selected}
      onClick={() => onSelect(index)}
    >
      <Lane row={row} role={call.role} width={width} />
      <div class="call-text">
        <div class="call-line">
          <span class="call-number">{call.number}</span>
          {call.role !== "main" && call.role !== "only" && <span class={`role`}>{ROLE[call.role]}</span>}
          <span class="call-preview">{call.preview ? shown(call.preview) : <i>{call.role === "open" ? "under way, or lost" : "no text"}</i>}</span>
        </div>
        <div class="call-line muted">
          <LinkSign link={call.link} role={call.role} />
          {call.excluded && <span class="link">not trained: {call.excluded}</span>}
          <span class="call-size">
            {count(call.prompt_tokens)} → {count(call.generated_tokens)} {seconds(call.seconds)}
          </span>
        </div>
      </div>
    </div>
  );
});

export function LinkSign({ link, role }: { link: Link; role: Role }) {
  if (link.kind === "none") {
    return <span class="link">{link.reason ? `? ${link.reason}` : role === "unresolved" ? "?" : "begins a conversation"}</span>;
  }
  const [sign, words] = LINK[link.kind];
  return (
    <span class={`link link-${link.kind}`} title={link.words ?? words}>
      {sign} {link.kind === "exact" ? "exact" : `${words}${link.reason ? `: ${link.reason}` : ""}`}
    </span>
  );
}

function Lane({ row, role, width }: { row: LaneRow; role: Role; width: number }) {
  const x = (lane: number) => Math.min(lane, MOST_LANES - 1) * STEP + 10;
  const own = x(row.lane);
  const middle = ROW / 2;
  return (
    <svg class="lanes" width={width} height={ROW} viewBox={`0 0 ${width} ${ROW}`} aria-hidden="true">
      {row.passing.map((lane) => (
        <line key={lane} x1={x(lane)} x2={x(lane)} y1={0} y2={ROW} />
      ))}
      {row.above && <line x1={own} x2={own} y1={0} y2={middle} />}
      {row.below && <line x1={own} x2={own} y1={middle} y2={ROW} />}
      {row.forks.map((lane) => (
        <path key={`fork-${lane}`} d={`M${own} ${middle} C${x(lane)} ${middle} ${x(lane)} ${middle + 6} ${x(lane)} ${ROW}`} />
      ))}
      <Sign role={role} x={own} y={middle} />
    </svg>
  );
}

/** Each role has a shape of its own, so that nothing hangs on colour. */
function Sign({ role, x, y }: { role: Role; x: number; y: number }) {
  switch (role) {
    case "main":
    case "only":
      return <circle class="sign full" cx={x} cy={y} r={4.5} />;
    case "branch":
      return <circle class="sign" cx={x} cy={y} r={4.5} />;
    case "sub_agent":
      return <rect class="sign full" x={x - 4} y={y - 4} width={8} height={8} />;
    case "side":
      return <path class="sign" d={`M${x} ${y - 5} l5 5 l-5 5 l-5 -5 z`} />;
    case "retry":
      return <path class="sign" d={`M${x - 5} ${y + 4} h10 l-5 -9 z`} />;
    case "aborted":
      return <path class="sign cross-out" d={`M${x - 4} ${y - 4} l8 8 m0 -8 l-8 8`} />;
    case "unresolved":
    case "open":
      return <circle class="sign dashed" cx={x} cy={y} r={4.5} />;
  }
}
