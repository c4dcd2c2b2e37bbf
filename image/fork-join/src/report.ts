/**
 * What a fork came to: its status from its own messages, its usage, and the text the
 * parent reads. Only entries the fork added itself are looked at; the seeded prefix is
 * the parent's and is neither paid nor reported twice.
 */
import type { AssistantMessage, Usage } from "@earendil-works/pi-ai";
import type { SessionEntry } from "@earendil-works/pi-coding-agent";

export type ForkStatus = "ok" | "failed" | "cancelled" | "timeout";

/** Why a fork was told to stop, if it was. */
export type Stop = "cancelled" | "timeout" | undefined;

export interface Verdict {
  readonly status: ForkStatus;
  /** The final report, or what there is of it. */
  readonly report: string;
  /** One sentence on why the status is not `ok`. */
  readonly error?: string;
}

/** Facts on a fork's run that cost nothing to keep in the tool result's details. */
export interface Tally {
  readonly turns: number;
  readonly toolCalls: number;
  readonly stopReason?: string;
  readonly usage: Usage;
}

/** The last assistant message among `fresh`, the entries a fork added to its seed. */
export function lastReply(
  fresh: readonly SessionEntry[],
): AssistantMessage | undefined {
  return replies(fresh).at(-1);
}

function replies(fresh: readonly SessionEntry[]): AssistantMessage[] {
  return fresh.flatMap((entry) =>
    entry.type === "message" && entry.message.role === "assistant"
      ? [entry.message]
      : [],
  );
}

/**
 * The status of a run. pi's `prompt()` resolves on provider errors, so the last reply
 * decides; `thrown` is what it rejected with, if it did. A reply that was complete
 * before the stop counts as complete.
 */
export function judge(
  reply: AssistantMessage | undefined,
  stop: Stop,
  thrown?: string,
): Verdict {
  const report = reply ? replyText(reply) : "";
  const finished = reply?.stopReason === "stop" || reply?.stopReason === "length";
  if (stop && !finished) return { status: stop, report, error: STOPPED[stop] };
  if (thrown !== undefined) return { status: "failed", report, error: short(thrown) };
  if (!reply) return { status: "failed", report, error: "the fork never got a reply" };
  const error = failure(reply, report);
  return error === undefined
    ? { status: "ok", report }
    : { status: "failed", report, error };
}

const STOPPED = {
  cancelled: "cancelled with the main session's call",
  timeout: "stopped by forkTimeoutSeconds",
} as const;

function failure(reply: AssistantMessage, report: string): string | undefined {
  switch (reply.stopReason) {
    case "stop":
      return report.trim() ? undefined : "empty report";
    case "length":
      return "stopped by the model's output limit; the report is incomplete";
    case "error":
      return short(reply.errorMessage ?? "the provider failed without a message");
    case "toolUse":
      return "ended after a tool call, without a report";
    default:
      return `ended without a report (${reply.stopReason})`;
  }
}

/** Some providers answer with a whole page of HTML. */
function short(message: string): string {
  return clip(message, 2048);
}

function replyText(reply: AssistantMessage): string {
  const texts = reply.content.flatMap((block) =>
    block.type === "text" ? [block.text] : [],
  );
  return texts.join("\n\n").trim();
}

export function tally(fresh: readonly SessionEntry[]): Tally {
  const answers = replies(fresh);
  const calls = answers.flatMap((reply) =>
    reply.content.filter((block) => block.type === "toolCall"),
  );
  const stopReason = answers.at(-1)?.stopReason;
  return {
    turns: answers.length,
    toolCalls: calls.length,
    ...(stopReason ? { stopReason } : {}),
    usage: sumUsage(fresh.flatMap(entryUsage)),
  };
}

/**
 * Every usage an entry stands for: replies, tools that called models, summaries,
 * warming.
 */
function entryUsage(entry: SessionEntry): Usage[] {
  const usage =
    entry.type === "message"
      ? "usage" in entry.message && entry.message.usage
      : "usage" in entry && entry.usage;
  return usage ? [usage] : [];
}

export function noUsage(): Usage {
  const cost = { input: 0, output: 0, cacheRead: 0, cacheWrite: 0, total: 0 };
  return { input: 0, output: 0, cacheRead: 0, cacheWrite: 0, totalTokens: 0, cost };
}

export function sumUsage(parts: readonly Usage[]): Usage {
  const sum = noUsage();
  for (const part of parts) {
    sum.input += part.input;
    sum.output += part.output;
    sum.cacheRead += part.cacheRead;
    sum.cacheWrite += part.cacheWrite;
    sum.totalTokens += part.totalTokens;
    if (part.cacheWrite1h)
      sum.cacheWrite1h = (sum.cacheWrite1h ?? 0) + part.cacheWrite1h;
    if (part.reasoning) sum.reasoning = (sum.reasoning ?? 0) + part.reasoning;
    for (const key of [
      "input",
      "output",
      "cacheRead",
      "cacheWrite",
      "total",
    ] as const) {
      sum.cost[key] += part.cost[key];
    }
  }
  return sum;
}

/** One fork as the parent reads it. `notes` are lines on its worktree. */
export interface ForkReport extends Verdict {
  readonly id: string;
  readonly notes: readonly string[];
}

export interface Caps {
  /** Bytes of one report; 0 is no limit. */
  readonly reportMaxBytes: number;
  /** Bytes of the whole text; 0 is no limit. */
  readonly totalMaxBytes: number;
}

/** Stores a full report outside the tool result and returns its path. */
export type Spill = (id: string, text: string) => string | undefined;

/** Kept free for the line that says where the rest of a cut report is. */
const CUT_NOTE_BYTES = 240;

/** The tool result: one block per fork, in the order given, within the caps. */
export function assemble(
  forks: readonly ForkReport[],
  caps: Caps,
  spill: Spill,
): string {
  const heads = forks.map(head);
  const fixed = heads.reduce((sum, text) => sum + bytes(text) + CUT_NOTE_BYTES, 0);
  const room =
    caps.totalMaxBytes === 0 ? Infinity : Math.max(0, caps.totalMaxBytes - fixed);
  const sizes = forks.map((fork) => bytes(fork.report));
  const wanted = sizes.map((size) => Math.min(size, caps.reportMaxBytes || Infinity));
  const granted = share(room, wanted);
  const blocks = forks.map((fork, index) =>
    [heads[index], body(fork, granted[index] ?? 0, spill)].filter(Boolean).join("\n"),
  );
  return blocks.join("\n\n");
}

function head(fork: ForkReport): string {
  const error = fork.error === undefined ? [] : [`Error: ${fork.error}`];
  return [`## ${fork.id} [${fork.status}]`, ...error, ...fork.notes].join("\n");
}

function body(fork: ForkReport, limit: number, spill: Spill): string {
  const size = bytes(fork.report);
  if (size <= limit) return fork.report;
  const path = spill(fork.id, fork.report);
  const rest = path ? `the whole report is in ${path}` : "the rest is lost";
  return `${clip(fork.report, limit)}\n[cut at ${limit} of ${size} bytes; ${rest}]`;
}

/**
 * Splits `room` so that small wishes are met and large ones get equal parts of the
 * rest.
 */
export function share(room: number, wanted: readonly number[]): number[] {
  const granted = new Array<number>(wanted.length).fill(0);
  const order = wanted.map((_, index) => index);
  order.sort((a, b) => (wanted[a] ?? 0) - (wanted[b] ?? 0));
  let left = room;
  order.forEach((index, rank) => {
    const part = Math.floor(left / (order.length - rank));
    granted[index] = Math.min(wanted[index] ?? 0, part);
    left -= granted[index] ?? 0;
  });
  return granted;
}

function bytes(text: string): number {
  return Buffer.byteLength(text);
}

/** The first `limit` bytes of `text`, never half a character. */
export function clip(text: string, limit: number): string {
  const buffer = Buffer.from(text);
  if (buffer.length <= limit) return text;
  let end = limit;
  while (end > 0 && ((buffer[end] ?? 0) & 0xc0) === 0x80) end--;
  return buffer.toString("utf8", 0, end);
}
