// Small things that all views use: reasons in words, facts, errors, links to copy.
import type { ComponentChild } from "preact";
import { permanent } from "../route";
import { copy, source } from "../state";

/** The name of a reason, without what it is about: `parent_missing:call-3` is `parent_missing`. */
export function reasonName(reason: string): string {
  return reason.split(":", 1)[0] ?? reason;
}

interface ReasonProps {
  reason: string;
  words?: string | null | undefined;
  /** What is known of it beyond its name. */
  said?: string[] | undefined;
  open?: boolean;
}

/** A reason: its name, and on demand what is known of it here, what it means and what to do. */
export function Reason({ reason, words, said = [], open }: ReasonProps) {
  const text = source.value?.reasons[reasonName(reason)];
  // What it is about may be a reason itself: `incomplete:call_timeout`.
  const about = source.value?.reasons[reason.split(":")[1] ?? ""];
  const means = text?.meaning ?? text?.means;
  return (
    <details class="reason" open={open}>
      <summary>
        <code>{reason}</code>
      </summary>
      {said.slice(0, MOST_SAID).map((each, at) => (
        <p key={at} class="known">
          {each}
        </p>
      ))}
      {said.length > MOST_SAID && <p class="muted">and {said.length - MOST_SAID} more</p>}
      {words && words !== means && <p>{words}</p>}
      {means && (
        <p>
          <Words text={means} />
        </p>
      )}
      {about && (
        <p>
          <Words text={about.meaning ?? about.means ?? ""} />
        </p>
      )}
      {(about ?? text)?.what_to_do && (
        <p>
          <b>What to do:</b> <Words text={(about ?? text)?.what_to_do ?? ""} />
        </p>
      )}
      {!text && !words && <p>No words for this reason: it was written by something else.</p>}
    </details>
  );
}

const MOST_SAID = 3;

/** What stands between backticks is what one types. */
function Words({ text }: { text: string }) {
  return <>{text.split("`").map((part, at) => (at % 2 ? <code key={at}>{part}</code> : part))}</>;
}

export function Fact({ name, children }: { name: string; children: ComponentChild }) {
  if (children === "" || children === null || children === undefined) return null;
  return (
    <div class="fact">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

export function Problem({ error }: { error: string }) {
  return (
    <p class="problem" role="alert">
      {error}
    </p>
  );
}

export function Waiting({ what }: { what: string }) {
  return (
    <p class="waiting" role="status">
      Reading {what}…
    </p>
  );
}

export function CopyLink({ hash }: { hash: string }) {
  return (
    <button type="button" class="quiet" title="Copy a permanent link (c)" onClick={() => void copy(permanent(hash))}>
      Copy link
    </button>
  );
}

const STATE_SIGN: Record<string, string> = { live: "●", finished: "✓", failed: "✕" };

export function State({ state }: { state: string | null }) {
  if (state === null) return null;
  return (
    <span class={`state state-${state}`}>
      <span aria-hidden="true">{STATE_SIGN[state] ?? "·"}</span> {state}
    </span>
  );
}
