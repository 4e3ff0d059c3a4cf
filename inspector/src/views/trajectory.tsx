// A trajectory: its tokens, coloured by one measure; one token's facts beside them; where links were split. While its
// rollout is live it grows, and what is in sight stays there.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, pathOf, type Rollout, type Trajectory } from "../api";
import { count, number } from "../format";
import { useKeys, usePoll, useStable, type Loaded } from "../hooks";
import { useNotes } from "../parts/notes";
import { SideBySide } from "../parts/sides";
import { Fact, Problem, Reason, Waiting } from "../parts/small";
import { go, link, permanent, replace } from "../route";
import { copy, lastHits, say, source } from "../state";
import { scaleNames, scaleOf, scaleTitle, type Scale } from "../tokens/colour";
import { Overview } from "../tokens/overview";
import { TokenPane } from "../tokens/pane";
import { TokenPanel } from "../tokens/panel";
import { TokenStore } from "../tokens/store";
import { Turns } from "../tokens/turns";

interface Props {
  rollout: string;
  trajectory: number;
  token: number | null;
  splits: boolean;
}

export function TrajectoryView({ rollout, trajectory, token, splits }: Props) {
  const { data, error } = useTrajectories(rollout);
  if (error && !data) return <Problem error={error} />;
  if (!data) return <Waiting what="the trajectory" />;
  const one = data[trajectory];
  if (!one) return <Problem error={`Rollout ${rollout} has ${data.length} trajectories: there is no number ${trajectory}.`} />;
  return (
    <div class="trajectory">
      <Summary rollout={rollout} index={trajectory} one={one} splits={splits} />
      {error && <Problem error={error} />}
      {splits ? <Splits rollout={rollout} index={trajectory} one={one} /> : <TokensView rollout={rollout} index={trajectory} one={one} token={token} />}
    </div>
  );
}

/** A rollout's trajectories, read again when more is recorded of it. */
function useTrajectories(rollout: string): Loaded<Trajectory[]> {
  const [state, setState] = useState<Loaded<Trajectory[]>>({ data: null, error: null });
  const [live, setLive] = useState(false);
  const cursor = useRef<Rollout["cursor"]>(null);
  const path = pathOf("rollouts", rollout);
  const load = async () => {
    try {
      const since = cursor.current === null ? "" : `?since=${encodeURIComponent(cursor.current)}`;
      const news = await get<Rollout>(path + since);
      const data = news.unchanged ? null : await get<Trajectory[]>(`${path}/trajectories`);
      cursor.current = news.cursor;
      setState((before) => ({ data: data ?? before.data, error: null }));
      setLive(news.state === "live");
    } catch (problem) {
      const error = problem instanceof Error ? problem.message : String(problem);
      setState((before) => ({ data: before.data, error }));
    }
  };
  useEffect(() => void load(), []);
  usePoll(load, 1000, live);
  return state;
}

function Summary({ rollout, index, one, splits }: { rollout: string; index: number; one: Trajectory; splits: boolean }) {
  return (
    <header class="summary">
      <dl class="facts">
        <Fact name="tokens">{count(one.tokens)}</Fact>
        <Fact name="trained">{count(one.trained_tokens)}</Fact>
        <Fact name="calls">{count(one.calls.length)}</Fact>
        <Fact name="reward">{number(one.reward)}</Fact>
        <Fact name="advantage">{number(one.advantage)}</Fact>
        {one.mask_reason && (
          <Fact name="masked">
            <Reason reason={one.mask_reason} />
          </Fact>
        )}
      </dl>
      <nav class="choices" aria-label="Views of the trajectory">
        <a href={link.trajectory(rollout, index)} aria-current={splits ? undefined : "page"}>
          Tokens
        </a>
        <a href={link.splits(rollout, index)} aria-current={splits ? "page" : undefined}>
          Splits ({one.splits.length})
        </a>
      </nav>
    </header>
  );
}

function TokensView({ rollout, index, one, token }: { rollout: string; index: number; one: Trajectory; token: number | null }) {
  const last = useRef<TokenStore | null>(null);
  const store = useMemo(() => (last.current = new TokenStore(rollout, index, one.tokens, last.current)), [rollout, index, one]);
  const [mode, setMode] = useState("kind");
  const [hovered, setHovered] = useState<number | null>(null);
  const [view, setView] = useState<[number, number]>([0, 0]);
  const vertical = useRef((at: number, by: number) => at + by);
  const turns = useMemo(() => new Turns(one), [one]);
  const segments = useMemo(() => one.segments ?? turns.segments(source.value?.kinds ?? []), [one, turns]);
  const version = store.version.value;
  const names = scaleNames(store);
  // Its steps are those of what was read when it was chosen: they do not move while one scrolls.
  const scale = useMemo(() => scaleOf(mode, source.value, store), [mode, store, mode === "version" || mode === "kind" ? version : version > 0]);

  const selected = token === null ? null : Math.max(0, Math.min(one.tokens - 1, token));
  const select = useStable((at: number) => replace(link.token(rollout, index, Math.max(0, Math.min(one.tokens - 1, at)))));
  const here = selected ?? view[0];
  const move = (by: number) => select(selected === null ? view[0] : selected + by);
  const hits = lastHits.value.filter((hit) => hit.rollout === rollout && hit.trajectory === index && hit.token !== null);
  const toHit = (by: 1 | -1) => {
    const places = hits.map((hit) => hit.token as number).sort((a, b) => a - b);
    const next = by > 0 ? places.find((at) => at > here) : places.findLast((at) => at < here);
    if (next === undefined) say(places.length ? "No further hit" : "Search first: /");
    else select(next);
  };
  useKeys({
    ArrowRight: () => move(1),
    ArrowLeft: () => move(-1),
    ArrowDown: () => select(selected === null ? view[0] : vertical.current(selected, 1)),
    ArrowUp: () => select(selected === null ? view[0] : vertical.current(selected, -1)),
    PageDown: () => select(vertical.current(here, 20)),
    PageUp: () => select(vertical.current(here, -20)),
    Home: () => select(0),
    End: () => select(one.tokens - 1),
    "]": () => select(turns.after(here)?.from ?? here),
    "[": () => select(turns.before(here)?.from ?? here),
    n: () => toHit(1),
    N: () => toHit(-1),
    m: () => setMode(names[(names.indexOf(mode) + 1) % names.length] ?? "kind"),
    s: () => go(link.splits(rollout, index)),
    c: () => void copy(permanent(selected === null ? link.trajectory(rollout, index) : link.token(rollout, index, selected))),
  });
  const { notes, add } = useNotes(rollout);
  const marked = useMemo(() => new Set(notes.map((note) => turns.tokenOf(note.call, note.token ?? null)).filter((at) => at !== null)), [notes, turns]);
  const shown = hovered ?? selected;
  const inside = shown === null ? undefined : turns.at(shown);
  const place = shown === null || !inside ? null : { call: inside.call, token: shown - inside.from };
  return (
    <>
      <div class="toolbar">
        <label>
          Colour{" "}
          <select aria-label="Colour by" value={mode} onChange={(event) => setMode(event.currentTarget.value)}>
            {names.map((name) => (
              <option key={name} value={name}>
                {scaleTitle(name)}
              </option>
            ))}
          </select>
        </label>
        <Legend scale={scale} />
        <Jump total={one.tokens} go={select} />
      </div>
      <Overview segments={segments} total={one.tokens} view={view} selected={selected} go={select} />
      {store.error.value && <Problem error={store.error.value} />}
      <div class="panes">
        <TokenPane
          store={store}
          turns={turns}
          scale={scale}
          selected={selected}
          marked={marked}
          onSelect={select}
          onHover={setHovered}
          onView={useStable((from: number, to: number) => setView([from, to]))}
          vertical={vertical}
        />
        <aside class={`panel${shown === null ? " empty" : ""}`} aria-label="Token" aria-live="polite">
          <TokenPanel
            store={store}
            rollout={rollout}
            number={index}
            trajectory={one}
            token={shown}
            passing={hovered !== null && hovered !== selected}
            notes={place ? notes.filter((note) => note.call === place.call && note.token === place.token) : []}
            canNote={place !== null && (source.value?.shows.annotations ?? false)}
            addNote={(note) => (place ? add(place.call, place.token, note) : Promise.resolve())}
          />
        </aside>
      </div>
    </>
  );
}

function Legend({ scale }: { scale: Scale }) {
  return (
    <ul class="legend" aria-label="Legend">
      {scale.legend.map((step) => (
        <li key={step.class + step.words}>
          <span class={`t ${step.class}`} aria-hidden="true">
            abc
          </span>{" "}
          {step.words}
        </li>
      ))}
    </ul>
  );
}

function Jump({ total, go }: { total: number; go: (token: number) => void }) {
  return (
    <form
      class="jump"
      onSubmit={(event) => {
        event.preventDefault();
        const input = event.currentTarget.elements.namedItem("token") as HTMLInputElement;
        if (input.value !== "") go(Number(input.value));
        input.blur();
      }}
    >
      <label>
        Go to token <input name="token" type="number" min={0} max={total - 1} placeholder={`0-${total - 1}`} />
      </label>
    </form>
  );
}

function Splits({ rollout, index, one }: { rollout: string; index: number; one: Trajectory }) {
  const back = () => go(link.trajectory(rollout, index));
  useKeys({ Escape: back, s: back, c: () => void copy(permanent(link.splits(rollout, index))) });
  return (
    <div class="page">
      {one.splits.length === 0 && <p>Every link of this trajectory continues the exact ids of the call before.</p>}
      {one.splits.map((split) => (
        <section key={split.call} class="split">
          <h2>
            <a href={link.call(rollout, split.call)}>{split.call}</a> does not continue{" "}
            {split.parent ? <a href={link.call(rollout, split.parent)}>{split.parent}</a> : "an earlier call"}
          </h2>
          {split.reason && <Reason reason={split.reason} words={split.words} open />}
          {!split.reason && split.words && <p>{split.words}</p>}
          <p>The two part at token {count(split.at)}.</p>
          <SideBySide at={split.at} a={split.a} b={split.b} aTitle="as it was sampled" bTitle="as the template writes it" />
        </section>
      ))}
    </div>
  );
}
