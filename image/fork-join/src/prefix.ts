/**
 * Keeping a fork's request a continuation of the parent's, byte for byte, so that a
 * provider's prompt cache serves it. pi would otherwise append the fork's own prompt
 * and tool changes. Which headers and keys route a request to a warm cache is read from
 * pi-ai 1.6.0's adapters.
 */
import {
  type Api,
  getCurrentSystemMessage,
  type Message,
  type Model,
} from "@earendil-works/pi-ai";

/** A transcript message; pi has more roles than the provider-neutral ones. */
type Spoken = { readonly role: string };

export function countSystemMessages(messages: readonly Spoken[]): number {
  return messages.filter((message) => message.role === "system").length;
}

/**
 * Drops the system messages after the first `keep`: those a fork's own prompt and tool
 * set added. One is always kept, because without it a request has no prompt at all.
 */
export function keepSystemMessages<M extends Spoken>(
  messages: readonly M[],
  keep: number,
): M[] {
  let seen = 0;
  return messages.filter(
    (message) => message.role !== "system" || seen++ < Math.max(keep, 1),
  );
}

/** A prompt in pi's options: the preamble and the named sections after it. */
export interface ReplayedPrompt {
  readonly customPrompt: string;
  readonly sections: Record<string, string>;
}

/**
 * The system prompt the transcript has reached, as prompt options. With these a fork's
 * own prompt equals the parent's, so that a compaction inside the fork keeps the
 * parent's rules.
 */
export function replayPrompt(messages: readonly Spoken[]): ReplayedPrompt | undefined {
  const current = getCurrentSystemMessage(messages as readonly Message[]);
  const { preamble, ...rest } = current?.sections ?? {};
  if (typeof preamble !== "string") return undefined;
  const sections = Object.entries(rest).flatMap(([name, text]) =>
    typeof text === "string" ? [[name, unwrap(name, text)]] : [],
  );
  return { customPrompt: preamble, sections: Object.fromEntries(sections) };
}

/** pi wraps every section but the preamble in a tag of its name. */
function unwrap(name: string, text: string): string {
  const open = `<${name}>\n`;
  const close = `\n</${name}>`;
  const wrapped = text.startsWith(open) && text.endsWith(close);
  return wrapped ? text.slice(open.length, -close.length) : text;
}

/**
 * A prompt that an extension forced on the parent for this run: it is in the request
 * but not in the transcript. Undefined when the transcript's own prompt was sent.
 */
export function forcedPrompt(
  inForce: string,
  replayed: string,
  payload: unknown,
): string | undefined {
  if (inForce === replayed || payload === undefined) return undefined;
  const sent = JSON.stringify(payload).includes(JSON.stringify(inForce).slice(1, -1));
  return sent ? inForce : undefined;
}

/** `payload` with its cache routing key, if it has one, set to the parent's session. */
export function routePayload(payload: unknown, parentSession: string): unknown {
  if (!isRecord(payload)) return payload;
  const keys = ["prompt_cache_key", "promptCacheKey"].filter(
    (key) => payload[key] !== undefined,
  );
  if (keys.length === 0) return payload;
  // OpenAI takes 64 characters; pi cuts its own session id the same way.
  const value = Array.from(parentSession).slice(0, 64).join("");
  return { ...payload, ...Object.fromEntries(keys.map((key) => [key, value])) };
}

/**
 * The affinity headers pi's adapter would send for `model`, carrying the parent's
 * session.
 */
export function affinityHeaders(
  model: Model<Api>,
  parentSession: string,
): Record<string, string> {
  const names = AFFINITY[model.api]?.(model) ?? [];
  return Object.fromEntries(names.map((name) => [name, parentSession]));
}

interface AffinityCompat {
  readonly sendSessionAffinityHeaders?: boolean;
  readonly sessionAffinityFormat?: string;
}

type HeaderNames = (model: Model<Api>) => readonly string[];

/**
 * Codex is absent on purpose: its sockets are keyed by session, and sharing one between
 * forks would serialise them.
 */
const AFFINITY: Record<string, HeaderNames> = {
  "openai-completions": (model) => {
    const { send, format } = affinity(model, {
      send: isOpenRouter(model),
      format: "openai",
    });
    if (!send) return [];
    if (format === "openrouter") return ["x-session-id"];
    const common = ["x-client-request-id", "x-session-affinity"];
    return format === "openai" ? ["session_id", ...common] : common;
  },
  "openai-responses": (model) => {
    const { format } = affinity(model, { send: true, format: "openai" });
    if (format === "openrouter") return ["x-session-id"];
    const common = ["x-client-request-id"];
    return format === "openai" ? ["session-id", ...common] : common;
  },
  "anthropic-messages": (model) => {
    const { send, format } = affinity(model, { send: isOpenRouter(model), format: "" });
    if (!send) return [];
    return [format === "openrouter" ? "x-session-id" : "x-session-affinity"];
  },
  "mistral-conversations": () => ["x-affinity"],
};

function affinity(
  model: Model<Api>,
  fallback: { send: boolean; format: string },
): { send: boolean; format: string } {
  const compat = (model.compat ?? {}) as AffinityCompat;
  return {
    send: compat.sendSessionAffinityHeaders ?? fallback.send,
    format:
      compat.sessionAffinityFormat ??
      (isOpenRouter(model) ? "openrouter" : fallback.format),
  };
}

function isOpenRouter(model: Model<Api>): boolean {
  return model.provider === "openrouter" || model.baseUrl.includes("openrouter.ai");
}

/**
 * Whether a fork's first request continued the parent's last, and if not, where it left
 * it.
 */
export type PrefixCheck = "shared" | `diverged at ${string}` | "unchecked" | "lean";

/** Body keys that hold the conversation, one per API style. */
const CONVERSATIONS = ["messages", "input", "contents"];
/** Body keys that are no part of what a provider caches. */
const UNCACHED = new Set([
  "prompt_cache_key",
  "promptCacheKey",
  "max_tokens",
  "max_completion_tokens",
  "max_output_tokens",
  "maxTokens",
  "stream",
]);

/**
 * Compares two request bodies of one API style, the parent's last and a fork's first.
 */
export function comparePayloads(parent: unknown, fork: unknown): PrefixCheck {
  if (!isRecord(parent) || !isRecord(fork)) return "unchecked";
  const conversation = CONVERSATIONS.find((key) => Array.isArray(parent[key]));
  if (conversation === undefined) return "unchecked";
  const keys = new Set([...Object.keys(parent), ...Object.keys(fork)]);
  for (const key of keys) {
    if (key === conversation || UNCACHED.has(key)) continue;
    if (canonical(parent[key]) !== canonical(fork[key])) return `diverged at ${key}`;
  }
  const own = parent[conversation] as unknown[];
  const theirs = Array.isArray(fork[conversation]) ? fork[conversation] : [];
  const at = own.findIndex((message, index) => {
    const same = canonical(message) === canonical(theirs[index]);
    return !same && (index < own.length - 1 || !continues(message, theirs[index]));
  });
  return at < 0 ? "shared" : `diverged at ${conversation}[${at}]`;
}

/**
 * Whether `longer` is the same message with more content behind it: some styles merge
 * the fork's task into a user message that ends the shared part.
 */
function continues(message: unknown, longer: unknown): boolean {
  if (!isRecord(message) || !isRecord(longer) || message.role !== longer.role)
    return false;
  const [own, other] = [contentOf(message), contentOf(longer)];
  if (!own || !other || own.length === 0 || own.length > other.length) return false;
  return own.every((part, index) => canonical(part) === canonical(other[index]));
}

function contentOf(message: Record<string, unknown>): unknown[] | undefined {
  const content = message.content ?? message.parts;
  if (typeof content === "string") return [{ type: "text", text: content }];
  return Array.isArray(content) ? content : undefined;
}

/**
 * JSON without cache markers, which move to the newest message with every request, and
 * with a string content as the one text block that a marker turns it into.
 */
function canonical(value: unknown): string | undefined {
  return JSON.stringify(value, (key, item) => {
    if (key === "cache_control") return undefined;
    if (key === "content" && typeof item === "string")
      return [{ type: "text", text: item }];
    if (!Array.isArray(item)) return item;
    return item.filter((part) => !isRecord(part) || !("cachePoint" in part));
  });
}

function isRecord(value: unknown): value is Record<string, unknown> {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
