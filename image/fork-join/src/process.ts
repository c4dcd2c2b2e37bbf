/**
 * State that belongs to the process and not to one copy of this module: pi may load the
 * extension more than once, and several sessions may share a process.
 */
import { Slots } from "./pool.ts";
import { MAX_CONCURRENCY } from "./settings.ts";

interface ProcessState {
  /** The limit over all calls. */
  readonly slots: Slots;
  /** Session ids of running forks; a fork_join called in one of them is refused. */
  readonly forks: Set<string>;
  /** How often each call tag was given out. */
  readonly tags: Map<string, number>;
}

const KEY = Symbol.for("pi-fork-join.process");

export function processState(): ProcessState {
  const holder = globalThis as { [KEY]?: ProcessState };
  holder[KEY] ??= {
    slots: new Slots(MAX_CONCURRENCY),
    forks: new Set(),
    tags: new Map(),
  };
  return holder[KEY];
}

/**
 * A short name for a call, for branches and for the gate's meter. Providers reuse call
 * ids, so a second call of the same id in this process gets a number.
 */
export function callTag(toolCallId: string): string {
  // OpenAI's Responses style joins two ids with a bar; the first one names the call.
  const plain = (toolCallId.split("|")[0] ?? "").replace(/[^A-Za-z0-9_-]+/g, "-");
  const tag = plain.slice(-40) || "call";
  const count = (processState().tags.get(tag) ?? 0) + 1;
  processState().tags.set(tag, count);
  return count === 1 ? tag : `${tag}-${count}`;
}
