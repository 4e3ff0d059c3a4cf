// Values and notes that a trainer or a person added to a call or a token. They are added, never changed.
import { useEffect, useState } from "preact/hooks";
import { get, post, type Annotation } from "../api";
import { number, readable, time } from "../format";
import { say, source } from "../state";

const BY = "gym-capture-by";

/** Notes of a rollout, and how one is added. */
export function useNotes(rollout: string): { notes: Annotation[]; add: (call: string, token: number | null, text: string) => Promise<void> } {
  const [notes, setNotes] = useState<Annotation[]>([]);
  const shows = source.value?.shows.annotations ?? false;
  const load = async () => {
    const answer = await get<{ annotations: Annotation[] } | Annotation[]>(`annotations?rollout=${encodeURIComponent(rollout)}`);
    setNotes(Array.isArray(answer) ? answer : answer.annotations);
  };
  useEffect(() => {
    setNotes([]);
    if (shows) load().catch(() => {}); // the view is of use without
  }, [rollout, shows]);
  const add = async (call: string, token: number | null, text: string) => {
    const by = localStorage.getItem(BY) || "inspector";
    await post("annotations", { rollout, call, ...(token === null ? {} : { token }), name: "note", note: text, by });
    await load();
    say("Note added");
  };
  return { notes, add };
}

export function NoteList({ notes }: { notes: Annotation[] }) {
  if (notes.length === 0) return null;
  return (
    <ul class="notes">
      {notes.map((note, index) => (
        <li key={index}>
          {saidBy(note)}
          <span class="muted">
            {" "}
            {note.by} {time(note.at)}
          </span>
        </li>
      ))}
    </ul>
  );
}

function saidBy({ name, note, value, values }: Annotation): string {
  const label = name === "note" ? "" : `${name}: `;
  if (note != null) return label + readable(note);
  if (value != null) return label + number(value);
  const known = (values ?? []).filter((one) => one !== null);
  const mean = known.reduce((sum, one) => sum + one, 0) / (known.length || 1);
  return `${label}${known.length} values, mean ${number(mean)}`;
}

export function NoteForm({ what, add }: { what: string; add: (text: string) => Promise<void> }) {
  const [text, setText] = useState("");
  const [error, setError] = useState<string | null>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    if (text.trim() === "") return;
    try {
      await add(text.trim());
      setText("");
      setError(null);
    } catch (problem) {
      setError(problem instanceof Error ? problem.message : String(problem)); // what was typed stays
    }
  };
  return (
    <form class="note-form" onSubmit={submit}>
      <input
        aria-label={`Note on ${what}`}
        placeholder={`Note on ${what}`}
        value={text}
        maxLength={2000}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <button type="submit" disabled={text.trim() === ""}>
        Add
      </button>
      {error && (
        <p class="problem" role="alert">
          {error}
        </p>
      )}
    </form>
  );
}

export function byName(): string {
  return localStorage.getItem(BY) ?? "";
}

export function setByName(name: string): void {
  localStorage.setItem(BY, name);
}
