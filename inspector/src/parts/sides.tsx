// Two sequences of ids side by side, from where they part.
import type { Piece } from "../api";
import { quoted, shown } from "../format";

interface Props {
  at: number | null;
  a: Piece;
  b: Piece;
  aTitle: string;
  bTitle: string;
}

export function SideBySide({ at, a, b, aTitle, bTitle }: Props) {
  const rows = Math.max(a.ids.length, b.ids.length);
  return (
    <div class="wide">
      <table class="plain sides">
        <thead>
          <tr>
            <th class="num">token</th>
            <th colSpan={2}>
              {aTitle}
              {a.from && <span class="muted"> {a.from}</span>}
            </th>
            <th class="parts" aria-label="equal or not" />
            <th colSpan={2}>
              {bTitle}
              {b.from && <span class="muted"> {b.from}</span>}
            </th>
          </tr>
        </thead>
        <tbody>
          {Array.from({ length: rows }, (_, index) => {
            const equal = a.ids[index] === b.ids[index];
            return (
              <tr key={index} class={equal ? "" : "differs"}>
                <td class="num">{(at ?? 0) + index}</td>
                <Side piece={a} index={index} />
                <td class="parts">{equal ? "=" : "≠"}</td>
                <Side piece={b} index={index} />
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function Side({ piece, index }: { piece: Piece; index: number }) {
  const id = piece.ids[index];
  const text = piece.texts?.[index];
  if (id === undefined) return <td colSpan={2} class="muted">-</td>;
  return (
    <>
      <td class="num id">{id}</td>
      <td>
        <code title={text == null ? undefined : quoted(text)}>{text == null ? "" : shown(text)}</code>
      </td>
    </>
  );
}
