// Numbers, times and texts as people read them. What a token holds is always shown whole, control characters included.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function count(value: number | null | undefined): string {
  return value == null ? "" : whole.format(value);
}

export function number(value: number | null | undefined): string {
  if (value == null) return "";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1);
  if (Number.isInteger(value)) return whole.format(value);
  return size < 10 ? value.toFixed(3).replace(/\.?0+$/, "") : value.toFixed(1);
}

export function percent(value: number | null | undefined): string {
  if (value == null) return "";
  return `${value > 0.9995 && value < 1 ? ">99.9" : (100 * value).toFixed(value < 0.1 ? 2 : 1)} %`;
}

export function seconds(value: number | null | undefined): string {
  if (value == null) return "";
  return value < 10 ? `${value.toFixed(2)} s` : value < 120 ? `${value.toFixed(0)} s` : `${(value / 60).toFixed(1)} min`;
}

export function time(value: number | null | undefined): string {
  if (value == null) return "";
  const at = new Date(value * 1000);
  const pad = (part: number) => String(part).padStart(2, "0");
  return `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}`;
}

type Version = string | number | null | undefined;

export function versions(low: Version, high: Version): string {
  if (low == null && high == null) return "";
  return low == null || high == null || low === high ? String(high ?? low) : `${low}-${high}`;
}

// Control characters, and those that turn text around, join it or have no width.
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g;
const NAMED: Record<string, string> = { "\n": "⏎", "\t": "⇥", "\r": "␍", " ": "·", "\u007f": "␡" };

function sign(character: string): string {
  const code = character.charCodeAt(0);
  return NAMED[character] ?? (code < 32 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16).toUpperCase()}⟩`);
}

/** A token's text in a line: nothing in it breaks the line, turns it around or stays unseen. */
export function shown(text: string | null): string {
  if (text === null || text === "") return "∅";
  if (/^ +$/.test(text)) return "·".repeat(text.length);
  return visible(text);
}

/** Text with a sign for each character that cannot be seen, save spaces. */
export function visible(text: string): string {
  return text.replace(HIDDEN, sign);
}

/** A text of several lines, with a sign for all else that cannot be seen. */
export function readable(text: string): string {
  return text.replace(HIDDEN, (character) => (character === "\n" || character === "\t" ? character : sign(character)));
}

/** Text with each character that cannot be seen given by its number, between quotes. */
export function quoted(text: string): string {
  return `"${text.replace(/[\\"]/g, "\\$&").replace(HIDDEN, escaped)}"`;
}

function escaped(character: string): string {
  const short: Record<string, string> = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };
  return short[character] ?? `\\u{${character.charCodeAt(0).toString(16)}}`;
}

/** How many columns of a fixed-width font a text takes: 2 for East Asian letters and pictures. */
export function columnsOf(text: string): number {
  let columns = 0;
  for (const character of text) {
    const code = character.codePointAt(0) ?? 0;
    columns += code >= 0x1100 && WIDE.test(character) ? 2 : 1;
  }
  return columns;
}

const WIDE =
  /[\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6]|\p{Emoji_Presentation}|[\u{20000}-\u{3fffd}]/u;
