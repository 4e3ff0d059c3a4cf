// A list of any length of which only the rows in sight are in the document. All rows have one height.
import type { ComponentChild } from "preact";
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { useSize } from "../hooks";

const STEP = 4; // rows are added in steps, so that most scroll events render nothing

interface Props {
  count: number;
  height: number;
  /** The row that is kept in sight. */
  selected: number | null;
  row: (index: number) => ComponentChild;
  head?: ComponentChild;
  headHeight?: number;
  class?: string;
  label: string;
  role: "grid" | "tree" | "listbox";
  active?: string | undefined;
  /** True: new rows at the end are followed while the end is in sight. */
  follow?: boolean;
}

export function Rows(props: Props) {
  const { count, height, selected, headHeight = 0 } = props;
  const box = useRef<HTMLDivElement>(null);
  const size = useSize(box);
  const [top, setTop] = useState(0);
  const atEnd = useRef(true);
  const first = Math.max(0, Math.floor(top / height / STEP) * STEP - STEP);
  const shown = Math.ceil(size.height / height) + 3 * STEP;
  const last = Math.min(count, first + shown);

  useLayoutEffect(() => {
    const element = box.current;
    if (!element || selected === null || size.height === 0) return;
    const y = selected * height;
    const inner = element.clientHeight - headHeight;
    if (y < element.scrollTop) element.scrollTop = y;
    else if (y + height > element.scrollTop + inner) element.scrollTop = y + height - inner;
  }, [selected, size.height > 0]);

  useLayoutEffect(() => {
    const element = box.current;
    if (props.follow && atEnd.current && element) element.scrollTop = element.scrollHeight;
  }, [count]);

  const onScroll = () => {
    const element = box.current;
    if (!element) return;
    atEnd.current = element.scrollTop + element.clientHeight >= element.scrollHeight - height;
    const next = Math.floor(element.scrollTop / height / STEP) * STEP * height;
    if (next !== top) setTop(next);
  };

  // Keys of rows repeat, so that a row that leaves on one side comes in again on the other: no element is made anew.
  const pool = Math.max(1, shown);
  const rows: ComponentChild[] = [];
  for (let index = first; index < last; index++) {
    rows.push(
      <div key={index % pool} class="row-place" role="presentation" style={{ top: `${index * height}px`, height: `${height}px` }}>
        {props.row(index)}
      </div>,
    );
  }
  return (
    <div
      ref={box}
      class={`rows ${props.class ?? ""}`}
      role={props.role}
      aria-label={props.label}
      aria-rowcount={props.role === "grid" ? count + 1 : undefined}
      aria-activedescendant={props.active}
      tabIndex={0}
      onScroll={onScroll}
    >
      {props.head}
      <div class="rows-all" role="presentation" style={{ height: `${count * height}px` }}>
        {rows}
      </div>
    </div>
  );
}
