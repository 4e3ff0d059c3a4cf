// The whole trajectory as a strip: where its turns are, and which part is in sight. A click goes there.
import { useEffect, useRef } from "preact/hooks";
import type { Segment } from "../api";
import { useSize } from "../hooks";
import { look, source } from "../state";

interface Props {
  segments: Segment[];
  total: number;
  view: [number, number];
  selected: number | null;
  go: (token: number) => void;
}

export function Overview({ segments, total, view, selected, go }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const canvas = useRef<HTMLCanvasElement>(null);
  const size = useSize(box);
  const kinds = source.value?.kinds;
  const colours = look.value;
  useEffect(() => paint(canvas.current, segments, total, kinds ?? []), [segments, total, size.width, colours, kinds]);
  const x = (token: number) => (token / Math.max(1, total)) * size.width;
  return (
    <div
      ref={box}
      class="overview"
      title="Go to this place"
      aria-hidden="true"
      onClick={(event) => go(Math.min(total - 1, Math.floor((event.offsetX / size.width) * total)))}
    >
      <canvas ref={canvas} />
      <div class="overview-view" style={{ transform: `translateX(${x(view[0])}px)`, width: `${Math.max(3, x(view[1]) - x(view[0]))}px` }} />
      {selected !== null && <div class="overview-token" style={{ transform: `translateX(${x(selected)}px)` }} />}
    </div>
  );
}

function paint(canvas: HTMLCanvasElement | null, segments: Segment[], total: number, kinds: string[]): void {
  const drawing = canvas?.getContext("2d");
  if (!canvas || !drawing) return;
  const scale = devicePixelRatio || 1;
  const width = (canvas.width = Math.max(1, canvas.clientWidth * scale));
  const height = (canvas.height = Math.max(1, canvas.clientHeight * scale));
  const style = getComputedStyle(canvas);
  const colours = kinds.map((kind) => style.getPropertyValue(`--strip-${kind}`).trim());
  for (const [from, to, , kind] of segments) {
    const colour = colours[kind];
    if (!colour) continue;
    drawing.fillStyle = colour;
    drawing.fillRect((from / total) * width, 0, Math.max(1, ((to - from) / total) * width), height);
  }
}
