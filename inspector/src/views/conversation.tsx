// A call as its agent saw it: the conversation before it, its answer, what was asked of the engine.
import { useState } from "preact/hooks";
import { get, pathOf, type Annotation, type Call, type CallDetail, type Message, type Trajectory } from "../api";
import { count, readable, seconds, time } from "../format";
import { useLoad } from "../hooks";
import { NoteForm, NoteList } from "../parts/notes";
import { CopyLink, Fact, Problem, Reason, Waiting } from "../parts/small";
import { link } from "../route";
import { source } from "../state";
import { ROLE } from "./tree";

interface Props {
  rollout: string;
  call: Call;
  trajectories: Trajectory[];
  notes: Annotation[];
  addNote: (text: string) => Promise<void>;
}

export function Conversation({ rollout, call, trajectories, notes, addNote }: Props) {
  const { data, error } = useLoad(
    (signal) => get<CallDetail>(pathOf("rollouts", rollout, "calls", call.call), signal),
    [rollout, call.call],
  );
  return (
    <section class="conversation" aria-label={`Call ${call.number}`}>
      <header>
        <h2>
          Call {call.number} <span class="muted">{ROLE[call.role]}</span>
        </h2>
        <Places rollout={rollout} call={call.call} trajectories={trajectories} />
        <CopyLink hash={link.call(rollout, call.call)} />
      </header>
      {call.link.reason ? (
        <Reason reason={call.link.reason} words={call.link.words} open={call.link.kind !== "exact"} />
      ) : (
        call.link.words && <p class="muted">{call.link.words}</p>
      )}
      {call.excluded && (
        <div class="excluded">
          Not trained: <Reason reason={call.excluded} words={call.excluded_words} />
        </div>
      )}
      {data?.notes?.map((note, index) => (
        <p key={index} class="muted">
          {typeof note === "string" ? note : note.words}
        </p>
      ))}
      <dl class="facts">
        <Fact name="prompt">{count(call.prompt_tokens)}</Fact>
        <Fact name="supplied">{count(call.supplied_tokens)}</Fact>
        <Fact name="generated">{count(call.generated_tokens)}</Fact>
        <Fact name="finish">{call.finish}</Fact>
        <Fact name="weights">{call.weight_versions.join(", ")}</Fact>
        <Fact name="took">{seconds(call.seconds)}</Fact>
        <Fact name="began">{time(call.started_at)}</Fact>
        <Fact name="dialect">{call.dialect}</Fact>
        {Object.entries(data?.sampling ?? {}).map(([name, value]) => (
          <Fact key={name} name={name}>
            {typeof value === "object" ? JSON.stringify(value) : String(value)}
          </Fact>
        ))}
        <Fact name="id">
          <code>{call.call}</code>
        </Fact>
      </dl>
      <NoteList notes={notes} />
      {error && <Problem error={error} />}
      {!data && !error && <Waiting what={`call ${call.number}`} />}
      {data && <Messages detail={data} />}
      {source.value?.shows.annotations && <NoteForm what={`call ${call.number}`} add={addNote} />}
    </section>
  );
}

function Places({ rollout, call, trajectories }: { rollout: string; call: string; trajectories: Trajectory[] }) {
  return (
    <>
      {trajectories.map((trajectory, number) => {
        const at = trajectory.calls.indexOf(call);
        if (at < 0) return null;
        const token = trajectory.generated?.[call]?.[0];
        const hash = token === undefined ? link.trajectory(rollout, number) : link.token(rollout, number, token);
        return (
          <a key={number} class="button" href={hash}>
            Its tokens{trajectories.length > 1 && ` in trajectory ${number}`}
          </a>
        );
      })}
    </>
  );
}

function Messages({ detail }: { detail: CallDetail }) {
  const firstNew = detail.messages.findIndex((message) => message.new);
  return (
    <ol class="messages">
      {detail.messages.map((message, index) => (
        <li key={index}>
          {index === firstNew && index > 0 && <p class="divider">new in this call</p>}
          <One message={message} />
        </li>
      ))}
      {detail.reply && (
        <li key="reply">
          <p class="divider">its answer</p>
          <One message={detail.reply} />
        </li>
      )}
    </ol>
  );
}

function One({ message }: { message: Message }) {
  const old = message.new === false;
  return (
    <article class={`message from-${message.role}${old ? " old" : ""}`}>
      <h3>
        {message.role}
        {message.tool_result_of && <code class="muted">{message.tool_result_of}</code>}
      </h3>
      {message.reasoning && (
        <details class="reasoning">
          <summary>reasoning</summary>
          <Text text={message.reasoning} short={false} />
        </details>
      )}
      {message.text == null && message.tokens != null && (
        <p class="muted">
          {count(message.tokens)} tokens; their text needs the tokenizer: <code>gym-capture ui ... --model FOLDER</code>
        </p>
      )}
      {message.text && <Text text={message.text} short={old || message.role === "tool"} />}
      {message.tool_calls?.map((call, index) => (
        <div key={index} class="tool-call">
          <b>{call.name}</b> <code>{readable(call.arguments)}</code>
        </div>
      ))}
    </article>
  );
}

const LONG = 1200;
const VERY_LONG = 20_000;

/** A long text is cut, and shown whole on demand: a page of a hundred tool results opens at once. */
function Text({ text, short }: { text: string; short: boolean }) {
  const [whole, setWhole] = useState(false);
  const limit = short ? LONG : VERY_LONG;
  const cut = !whole && text.length > limit;
  return (
    <>
      <pre class="text">{readable(cut ? text.slice(0, limit) : text)}</pre>
      {cut && (
        <button type="button" class="quiet" onClick={() => setWhole(true)}>
          Show all {count(text.length)} characters
        </button>
      )}
    </>
  );
}
