// Loading, keys and sizes, as hooks; and components that render again only if a property changed.
import { Component, type ComponentChild, type ComponentClass } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { RefObject } from "preact";

export interface Loaded<T> {
  data: T | null;
  error: string | null;
}

/** What `load` gave for these dependencies; nothing, while they are new. */
export function useLoad<T>(load: (signal: AbortSignal) => Promise<T>, dependencies: unknown[]): Loaded<T> {
  const [state, setState] = useState<Loaded<T>>({ data: null, error: null });
  useEffect(() => {
    const control = new AbortController();
    setState({ data: null, error: null });
    load(control.signal).then(
      (data) => control.signal.aborted || setState({ data, error: null }),
      (error: Error) => control.signal.aborted || setState({ data: null, error: error.message }),
    );
    return () => control.abort();
  }, dependencies);
  return state;
}

/** Calls again and again while the page is looked at; the next wait begins when the last answer is there. */
export function usePoll(poll: () => Promise<unknown>, milliseconds: number, on: boolean): void {
  const latest = useRef(poll);
  latest.current = poll;
  useEffect(() => {
    if (!on) return;
    let timer = 0;
    let over = false;
    const turn = async () => {
      if (!document.hidden) await latest.current();
      if (!over) timer = window.setTimeout(turn, milliseconds);
    };
    timer = window.setTimeout(turn, milliseconds);
    return () => {
      over = true;
      clearTimeout(timer);
    };
  }, [on, milliseconds]);
}

// --- keys ---

export type Keys = Record<string, (event: KeyboardEvent) => void>;
const active: { current: Keys }[] = [];

/** Keys of a view while it is there; those of the view that came last win. */
export function useKeys(keys: Keys): void {
  const latest = useRef(keys);
  latest.current = keys;
  useLayoutEffect(() => {
    active.push(latest);
    return () => void active.splice(active.indexOf(latest), 1);
  }, []);
}

function typing(target: EventTarget | null): boolean {
  return target instanceof HTMLElement && (target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName));
}

const ALIAS: Record<string, string> = { j: "ArrowDown", k: "ArrowUp", h: "ArrowLeft", l: "ArrowRight" };

window.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (document.querySelector("dialog[open]")) return; // it has keys of its own
  if (typing(event.target)) {
    if (event.key === "Escape") (event.target as HTMLElement).blur();
    return;
  }
  if (event.key === "Enter" && event.target instanceof HTMLElement && /^(A|BUTTON|SUMMARY)$/.test(event.target.tagName)) return;
  for (const key of [event.key, ALIAS[event.key]]) {
    const found = key === undefined ? undefined : active.findLast((keys) => key in keys.current);
    if (found && key !== undefined) {
      event.preventDefault();
      found.current[key]?.(event);
      return;
    }
  }
});

/** The same function for ever, which does what the latest one does: for `memo`. */
export function useStable<A extends unknown[]>(act: (...args: A) => void): (...args: A) => void {
  const latest = useRef(act);
  latest.current = act;
  return useRef((...args: A) => latest.current(...args)).current;
}

// --- sizes ---

export interface Size {
  width: number;
  height: number;
}

export function useSize(ref: RefObject<HTMLElement | null>): Size {
  const [size, setSize] = useState<Size>({ width: 0, height: 0 });
  useLayoutEffect(() => {
    const element = ref.current;
    if (!element) return;
    const measure = () => setSize({ width: element.clientWidth, height: element.clientHeight });
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return size;
}

// --- render less ---

function differ(a: Record<string, unknown>, b: Record<string, unknown>): boolean {
  for (const name in a) if (a[name] !== b[name]) return true;
  for (const name in b) if (!(name in a)) return true;
  return false;
}

/** A component that reads its properties only. */
export function memo<P extends object>(render: (props: P) => ComponentChild): ComponentClass<P> {
  return class Memo extends Component<P> {
    override shouldComponentUpdate(next: P): boolean {
      return differ(this.props as Record<string, unknown>, next as Record<string, unknown>);
    }
    override render(): ComponentChild {
      return render(this.props as P);
    }
  };
}
