// All that is known of one token, and why it was not trained.
import type { Annotation, Trajectory } from "../api";
import { number, quoted } from "../format";
import { NoteForm, NoteList } from "../parts/notes";
import { CopyLink, Fact, Reason } from "../parts/small";
import { link } from "../route";
import { source } from "../state";
import { kindWords, probability, scaleTitle } from "./colour";
import type { TokenStore } from "./store";

interface Props {
  store: TokenStore;
  rollout: string;
  number: number;
  trajectory: Trajectory;
  token: number | null;
  /** Shown because the pointer is on it, not because it was chosen. */
  passing: boolean;
  notes: Annotation[];
  canNote: boolean;
  addNote: (text: string) => Promise<void>;
}

export function TokenPanel({ store, rollout, number: index, trajectory, token, passing, notes, canNote, addNote }: Props) {
  const found = token === null ? null : store.at(token);
  if (token === null || !found) {
    return <p class="muted">{token === null ? "Point at a token, or choose one: a click, or the arrow keys." : `Reading token ${token}…`}</p>;
  }
  const { tokens } = found.chunk;
  const at = found.index;
  const text = tokens.texts[at] ?? null;
  const call = tokens.calls[at] ?? -1;
  const callId = call < 0 ? undefined : trajectory.calls[call];
  const why = tokens.why[at];
  const reason = why == null || why < 0 ? undefined : tokens.whys[why];
  return (
    <>
      <h2>
        Token {number(token)}
        {!passing && <CopyLink hash={link.token(rollout, index, token)} />}
      </h2>
      <pre class="token-text">{text === null ? "not known without the tokenizer" : quoted(text)}</pre>
      <dl class="facts column">
        <Fact name="id">
          <code>{tokens.ids[at]}</code>
        </Fact>
        <Fact name="kind">{kindWords(source.value?.kinds[tokens.kinds[at] ?? -1])}</Fact>
        <Fact name="probability">{probability(tokens.logprobs[at])}</Fact>
        <Fact name="call">{callId && <a href={link.call(rollout, callId)}>{callId}</a>}</Fact>
        <Fact name="weights">{tokens.versions[at]}</Fact>
        {Object.entries(tokens.overlays).map(([name, values]) => (
          <Fact key={name} name={scaleTitle(name)}>
            {number(values[at])}
          </Fact>
        ))}
      </dl>
      {reason && (
        <section class="why">
          <h3>Why it was not trained</h3>
          <Reason reason={reason} open />
        </section>
      )}
      <NoteList notes={notes} />
      {canNote && !passing && <NoteForm key={token} what={`token ${token}`} add={addNote} />}
    </>
  );
}
