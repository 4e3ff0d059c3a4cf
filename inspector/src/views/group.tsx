// A group: what its rollouts got, and whether they began from one prompt.
import { get, pathOf, type Group } from "../api";
import { count, number } from "../format";
import { useKeys, useLoad } from "../hooks";
import { SideBySide } from "../parts/sides";
import { Problem, Reason, Waiting } from "../parts/small";
import { go, link } from "../route";
import { useState } from "preact/hooks";

export function GroupView({ group }: { group: string }) {
  const { data, error } = useLoad((signal) => get<Group>(pathOf("groups", group), signal), [group]);
  const [at, setAt] = useState(0);
  const rows = data?.rollouts ?? [];
  useKeys({
    ArrowDown: () => setAt(Math.min(rows.length - 1, at + 1)),
    ArrowUp: () => setAt(Math.max(0, at - 1)),
    Enter: () => rows[at] && go(link.rollout(rows[at].rollout)),
  });
  if (error) return <Problem error={error} />;
  if (!data) return <Waiting what={`group ${group}`} />;
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const most = Math.max(1e-9, ...rows.map((row) => Math.abs(row.advantage ?? 0)));
  const mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
  const spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : null;
  const first = rows.find((row) => row.first_prompt?.text)?.first_prompt;
  return (
    <div class="page">
      <h1>
        <span class="muted">Group</span> {group}
      </h1>
      <p>
        {rows.length === 1 ? "1 rollout" : `${rows.length} rollouts`}, {mean === null ? "no reward on record" : `mean reward ${number(mean)}`}.{" "}
        {spread === 0 && rows.length > 1 && <b>All rewards are equal: there is nothing to learn from this group.</b>}
      </p>
      <div class="wide">
        <table class="plain">
          <thead>
            <tr>
              <th>rollout</th>
              <th class="num">sample</th>
              <th class="num">reward</th>
              <th class="num">advantage</th>
              <th aria-hidden="true" />
              <th class="num">first prompt</th>
              <th>masked</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row, index) => (
              <tr key={row.rollout} class={index === at ? "selected" : ""}>
                <td>
                  <a href={link.rollout(row.rollout)}>{row.rollout}</a>
                </td>
                <td class="num">{count(row.sample)}</td>
                <td class="num">{number(row.reward)}</td>
                <td class="num">{number(row.advantage)}</td>
                <td>
                  <Bar part={(row.advantage ?? 0) / most} />
                </td>
                <td class="num">{count(row.first_prompt?.tokens)}</td>
                <td>{row.mask_reason && <Reason reason={row.mask_reason} />}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <h2>First prompts</h2>
      {data.first_prompts_equal ? (
        rows.length > 1 && <p>All are the same, id for id.</p>
      ) : (
        data.differences.map((difference) => (
          <section key={difference.rollout}>
            <p>
              <b>{difference.rollout}</b> parts from the others at token {count(difference.at)}.
            </p>
            <SideBySide at={difference.at} a={difference.a} b={difference.b} aTitle="the others" bTitle={difference.rollout} />
          </section>
        ))
      )}
      {first?.text && <pre class="prompt-text">{first.text}</pre>}
    </div>
  );
}

/** From the middle: to the left what is below the mean, to the right what is above. */
function Bar({ part }: { part: number }) {
  const width = Math.abs(part) * 40;
  return (
    <svg class="bar" viewBox="0 0 80 10" aria-hidden="true">
      <line x1="40" x2="40" y1="0" y2="10" />
      <rect class={part < 0 ? "below" : "above"} x={part < 0 ? 40 - width : 40} y="2" width={width} height="6" />
    </svg>
  );
}
