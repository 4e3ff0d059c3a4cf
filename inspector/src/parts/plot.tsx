// A small plot: the mean as a line, what most values lie between as a band. Drawn once; only its cross hair moves.
import { signal } from "@preact/signals";
import { useRef } from "preact/hooks";
import { memo } from "../hooks";
import { number, time } from "../format";
import type { Bucket } from "../job-rows";

/** Where on the axis the pointer is: one cross hair over all plots of the same axis. */
export const crossAt = signal<{ axis: string; x: number } | null>(null);

interface Props {
  title: string;
  unit: string;
  axis: "time" | "step";
  spread: boolean;
  data: Bucket[];
  /** Called with a range of the axis that was drawn with the pointer. */
  onRange?: ((from: number, to: number) => void) | undefined;
}

const WIDTH = 200;
const HEIGHT = 48;

export function Plot({ title, unit, axis, spread, data, onRange }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const began = useRef<number | null>(null);
  const first = data[0];
  const last = data[data.length - 1];
  if (!first || !last) return null;
  // What does not spread is drawn from zero: a share that moves by a hundredth looks like it.
  const low = spread ? Math.min(...data.map((bucket) => bucket.low)) : Math.min(0, ...data.map((bucket) => bucket.mean));
  const high = Math.max(...data.map((bucket) => (spread ? bucket.high : bucket.mean)));
  const at = (event: PointerEvent) => {
    const bounds = box.current?.getBoundingClientRect();
    const part = bounds ? Math.min(1, Math.max(0, (event.clientX - bounds.left) / bounds.width)) : 0;
    return first.from + part * (last.to - first.from);
  };
  const cross = crossAt.value?.axis === axis ? crossAt.value.x : null;
  const near = cross === null ? null : nearest(data, cross);
  return (
    <figure class="plot">
      <figcaption>
        <span class="plot-title">{title}</span>
        <span class="plot-value">
          {near ? `${number(near.mean)} ${unit}` : `${number(last.mean)} ${unit}`}
          {near && <span class="muted"> {axis === "time" ? time(near.from).slice(11, 16) : `step ${number(near.from)}`}</span>}
        </span>
      </figcaption>
      <div
        ref={box}
        class="plot-box"
        role="img"
        aria-label={`${title}: ${number(first.mean)} at first, ${number(last.mean)} at last, from ${number(low)} to ${number(high)} ${unit}`}
        onPointerMove={(event) => (crossAt.value = { axis, x: at(event) })}
        onPointerLeave={() => (crossAt.value = null)}
        onPointerDown={(event) => (began.current = at(event))}
        onPointerUp={(event) => {
          const [from, to] = [began.current ?? 0, at(event)].sort((a, b) => a - b) as [number, number];
          if (began.current !== null && to - from > (last.to - first.from) / 50) onRange?.(from, to);
          began.current = null;
        }}
      >
        <Curve data={data} low={low} high={high} spread={spread} />
        {cross !== null && (
          <svg class="cross" viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
            <line x1={xOf(data, cross)} x2={xOf(data, cross)} y1="0" y2={HEIGHT} />
          </svg>
        )}
        <span class="plot-high" aria-hidden="true">
          {number(high)}
        </span>
        <span class="plot-low" aria-hidden="true">
          {number(low)}
        </span>
      </div>
    </figure>
  );
}

function nearest(data: Bucket[], x: number): Bucket | null {
  let best: Bucket | null = null;
  let distance = Infinity;
  for (const bucket of data) {
    const away = Math.abs((bucket.from + bucket.to) / 2 - x);
    if (away < distance) [best, distance] = [bucket, away];
  }
  return best;
}

function xOf(data: Bucket[], x: number): number {
  const first = data[0]?.from ?? 0;
  const last = data[data.length - 1]?.to ?? 1;
  return ((x - first) / (last - first || 1)) * WIDTH;
}

const Curve = memo(function curve({ data, low, high, spread }: { data: Bucket[]; low: number; high: number; spread: boolean }) {
  const y = (value: number) => (HEIGHT - 3 - ((value - low) / (high - low || 1)) * (HEIGHT - 6)).toFixed(1);
  const x = (bucket: Bucket) => xOf(data, (bucket.from + bucket.to) / 2).toFixed(1);
  const line = data.map((bucket) => `${x(bucket)},${y(Math.min(high, Math.max(low, bucket.mean)))}`).join(" ");
  const over = data.map((bucket) => `${x(bucket)},${y(bucket.high)}`);
  const under = data.map((bucket) => `${x(bucket)},${y(bucket.low)}`).reverse();
  return (
    <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" aria-hidden="true">
      {spread && <polygon class="band" points={[...over, ...under].join(" ")} />}
      <polyline class="line" points={line} />
    </svg>
  );
});
