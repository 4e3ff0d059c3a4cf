// A rollout: the tree of its calls beside the conversation of one. While it is live it grows, and the newest call is shown.
import { useEffect, useState } from "preact/hooks";
import { get, pathOf, type Call, type Rollout, type Trajectory } from "../api";
import { count, number } from "../format";
import { useKeys, usePoll, useStable } from "../hooks";
import { useNotes } from "../parts/notes";
import { Fact, Problem, Reason, State, Waiting } from "../parts/small";
import { go, link, permanent, replace } from "../route";
import { copy } from "../state";
import { Conversation } from "./conversation";
import { Tree } from "./tree";

/** What was known, with the calls that are new or changed. */
function grown(before: Rollout, news: Rollout): Rollout {
  if (news.unchanged || news.calls.length === 0) return { ...before, cursor: news.cursor, state: news.state };
  const calls = new Map<string, Call>(before.calls.map((call) => [call.call, call]));
  for (const call of news.calls) calls.set(call.call, call);
  return { ...news, calls: [...calls.values()].sort((a, b) => a.number - b.number) };
}

export function RolloutView({ rollout, call }: { rollout: string; call: string | null }) {
  const [data, setData] = useState<Rollout | null>(null);
  const [error, setError] = useState<string | null>(null);
  const [trajectories, setTrajectories] = useState<Trajectory[]>([]);
  const { notes, add } = useNotes(rollout);
  const path = pathOf("rollouts", rollout);

  const load = async () => {
    try {
      const since = data?.cursor == null ? "" : `?since=${encodeURIComponent(data.cursor)}`;
      const news = await get<Rollout>(path + since);
      setData(data ? grown(data, news) : news);
      setError(null);
    } catch (problem) {
      setError(problem instanceof Error ? problem.message : String(problem));
    }
  };
  useEffect(() => void load(), []);
  const live = data?.state === "live";
  usePoll(load, 1000, live);
  useEffect(() => {
    if (data === null) return;
    get<Trajectory[]>(`${path}/trajectories`).then(setTrajectories, () => {}); // the calls are of use without
  }, [data === null, data?.cursor]);

  const calls = data?.calls ?? [];
  // Without a call in the address: the last of the main chain, which is the newest while the rollout is live.
  const latest = calls.findLastIndex((one) => one.role === "main" || one.role === "only");
  const chosen = call === null ? (latest >= 0 ? latest : calls.length - 1) : calls.findIndex((one) => one.call === call);
  const shownCall = calls[chosen];
  const select = useStable((index: number) => {
    const next = calls[Math.max(0, Math.min(calls.length - 1, index))];
    if (next) replace(link.call(rollout, next.call));
  });
  const hash = shownCall && call !== null ? link.call(rollout, shownCall.call) : link.rollout(rollout);
  useKeys({
    ArrowDown: () => select(chosen + 1),
    ArrowUp: () => select(chosen - 1),
    Home: () => select(0),
    End: () => replace(link.rollout(rollout)),
    Enter: () => trajectories.length > 0 && go(trajectoryOf(rollout, trajectories, shownCall)),
    g: () => data?.group && go(link.group(data.group)),
    c: () => void copy(permanent(hash)),
  });
  if (error && data === null) return <Problem error={error} />;
  if (data === null) return <Waiting what={`rollout ${rollout}`} />;
  return (
    <div class="rollout">
      <Summary data={data} trajectories={trajectories} />
      {error && <Problem error={error} />}
      {call !== null && chosen < 0 && <Problem error={`This rollout has no call ${call}.`} />}
      <div class="panes">
        <Tree calls={calls} selected={chosen < 0 ? null : chosen} onSelect={select} follow={live && call === null} />
        <div class="pane" tabIndex={0} role="region" aria-label="Conversation">
          {shownCall && (
            <Conversation
              key={shownCall.call}
              rollout={rollout}
              call={shownCall}
              trajectories={trajectories}
              notes={notes.filter((note) => note.call === shownCall.call && note.token == null)}
              addNote={(note) => add(shownCall.call, null, note)}
            />
          )}
          {calls.length === 0 && <p class="waiting">{data.state === "live" ? "No call yet." : "No call of it is on record here."}</p>}
        </div>
      </div>
    </div>
  );
}

/** Where a call's tokens begin; the first trajectory, if it is in none. */
function trajectoryOf(rollout: string, trajectories: Trajectory[], call: Call | undefined): string {
  for (const [number, trajectory] of trajectories.entries()) {
    const at = call ? trajectory.calls.indexOf(call.call) : -1;
    const token = call && trajectory.generated?.[call.call]?.[0];
    if (token !== undefined) return link.token(rollout, number, token);
    if (at >= 0) return link.trajectory(rollout, number);
  }
  return link.trajectory(rollout, 0);
}

/** A file that is damaged may have a reason for each of its lines. */
const MOST_REASONS = 4;

function Summary({ data, trajectories }: { data: Rollout; trajectories: Trajectory[] }) {
  return (
    <header class="summary">
      <h1>{data.rollout}</h1>
      <dl class="facts">
        <Fact name="state">
          <State state={data.state} />
        </Fact>
        <Fact name="reward">{number(data.reward)}</Fact>
        <Fact name="calls">{count(data.calls.length)}</Fact>
        <Fact name="attempt">{data.attempt}</Fact>
        <Fact name="harness">{data.harness}</Fact>
        <Fact name="group">{data.group && <a href={link.group(data.group)}>{data.group}</a>}</Fact>
        {data.mask_reasons.length > 0 && (
          <Fact name="masked">
            {data.mask_reasons.slice(0, MOST_REASONS).map((reason) => (
              <Reason key={reason} reason={reason} said={data.mask_details[reason]} open={data.calls.length === 0} />
            ))}
            {data.mask_reasons.length > MOST_REASONS && <i class="muted">and {data.mask_reasons.length - MOST_REASONS} more</i>}
          </Fact>
        )}
      </dl>
      <nav class="trajectories" aria-label="Trajectories">
        {trajectories.map((trajectory, index) => (
          <a key={index} class="button" href={link.trajectory(data.rollout, index)}>
            Trajectory {index}: {count(trajectory.trained_tokens)} of {count(trajectory.tokens)} tokens trained
            {trajectory.delivered === false && <i class="muted"> · not delivered</i>}
            {trajectory.splits.length > 0 && <b> · {trajectory.splits.length} {trajectory.splits.length === 1 ? "split" : "splits"}</b>}
          </a>
        ))}
      </nav>
    </header>
  );
}
