// Hits in the texts of tokens, in ids, in reasons; each leads to its place.
import { useEffect, useState } from "preact/hooks";
import { get, type Hit } from "../api";
import { shown } from "../format";
import { useKeys, useLoad } from "../hooks";
import { Problem, Waiting } from "../parts/small";
import { go, link } from "../route";
import { lastHits, say } from "../state";

const WHERE = ["text", "id", "reason"] as const;

interface Hits {
  hits: Hit[];
  complete: boolean;
  /** Where the search goes on, if it is not complete. */
  after?: string | null;
}

export function placeOf(hit: Hit): string {
  if (hit.trajectory !== null && hit.token !== null) return link.token(hit.rollout, hit.trajectory, hit.token);
  if (hit.call !== null) return link.call(hit.rollout, hit.call);
  if (hit.trajectory !== null) return link.trajectory(hit.rollout, hit.trajectory);
  return link.rollout(hit.rollout);
}

export function SearchView({ query }: { query: URLSearchParams }) {
  const text = query.get("q") ?? "";
  const where = query.get("where") ?? "text";
  const [at, setAt] = useState(0);
  const found = useLoad(
    (signal) => get<Hits>(`search?${new URLSearchParams({ q: text, where, limit: "200" })}`, signal),
    [text, where],
  );
  const [more, setMore] = useState<Hits[]>([]);
  const answers = found.data ? [found.data, ...more] : [];
  const last = answers[answers.length - 1];
  const hits = answers.flatMap((answer) => answer.hits);
  useEffect(() => {
    setAt(0);
    setMore([]);
  }, [found.data]);
  useEffect(() => {
    if (found.data) lastHits.value = hits;
  }, [found.data, more]);
  const goOn = async () => {
    const next = await get<Hits>(`search?${new URLSearchParams({ q: text, where, limit: "200", after: last?.after ?? "" })}`);
    setMore([...more, next]);
  };
  useKeys({
    ArrowDown: () => setAt(Math.min(hits.length - 1, at + 1)),
    ArrowUp: () => setAt(Math.max(0, at - 1)),
    Enter: () => hits[at] && go(placeOf(hits[at])),
  });
  return (
    <div class="page">
      <h1>
        <span class="muted">Search for</span> {shown(text)}
      </h1>
      <div class="choices" role="group" aria-label="Search in">
        {WHERE.map((one) => (
          <a key={one} href={link.search(text, one)} aria-current={one === where ? "true" : undefined}>
            {one}
          </a>
        ))}
      </div>
      {found.error && <Problem error={found.error} />}
      {!found.data && !found.error && <Waiting what="tokens" />}
      {found.data && (
        <p class="muted" role="status">
          {hits.length} {hits.length === 1 ? "hit" : "hits"}
          {last && !last.complete && ", and there may be more "}
          {last && !last.complete && last.after != null && (
            <button type="button" onClick={() => void goOn().catch((error: Error) => say(error.message))}>
              Search on
            </button>
          )}
        </p>
      )}
      <ol class="hits">
        {hits.map((hit, index) => (
          <li key={index} class={index === at ? "selected" : ""}>
            <a href={placeOf(hit)}>
              <span class="hit-where">
                {hit.rollout}
                {hit.token !== null && ` · token ${hit.token}`}
                {hit.call !== null && ` · ${hit.call}`}
              </span>
              <code>
                <Marked text={shown(hit.excerpt)} part={shown(text)} />
              </code>
            </a>
          </li>
        ))}
      </ol>
    </div>
  );
}

function Marked({ text, part }: { text: string; part: string }) {
  const at = part === "" ? -1 : text.toLowerCase().indexOf(part.toLowerCase());
  if (at < 0) return <>{text}</>;
  return (
    <>
      {text.slice(0, at)}
      <mark>{text.slice(at, at + part.length)}</mark>
      {text.slice(at + part.length)}
    </>
  );
}
