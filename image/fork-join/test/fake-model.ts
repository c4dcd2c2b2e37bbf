/**
 * A model server on loopback for two API styles, with a simulation of prompt caching.
 * What it answers is scripted: `script(steps)` gives a token to put into a user
 * message, and the n-th reply after that message is the n-th step.
 */
import { createHash } from "node:crypto";
import {
  createServer,
  type IncomingMessage,
  type Server,
  type ServerResponse,
} from "node:http";
import type { AddressInfo } from "node:net";

export type Style = "openai-completions" | "anthropic-messages";
export const STYLES: readonly Style[] = ["openai-completions", "anthropic-messages"];

export interface ToolUse {
  readonly name: string;
  readonly args: unknown;
  readonly id?: string;
}

export interface Step {
  readonly text?: string;
  readonly thinking?: string;
  readonly tools?: readonly ToolUse[];
  readonly delayMs?: number;
  /** An HTTP status other than 200. */
  readonly status?: number;
  readonly stop?: "length";
  /** Never answers. */
  readonly hang?: true;
  /** Answers only when so many requests wait for this step. */
  readonly together?: number;
  /** Given one time only, whatever the conversation looks like then. */
  readonly once?: true;
  /** Input tokens to report instead of the simulated ones. */
  readonly input?: number;
}

export interface ModelRequest {
  readonly style: Style;
  readonly headers: IncomingMessage["headers"];
  readonly raw: string;
  /** Whatever the style sends. */
  readonly body: any;
  /** Text of the last message a user wrote. */
  readonly lastUser: string;
  readonly at: number;
  /** Forks' requests being answered when this one came, itself included if a fork's. */
  readonly inFlight: number;
  /** The client hung up before the answer. */
  gone: boolean;
  /** Tokens of every kind in the answer's usage. */
  billed: number;
}

interface Answer {
  readonly status: number;
  readonly text: string;
}

const EMPTY: Step = { text: "nothing scripted" };

export class FakeModel {
  readonly requests: ModelRequest[] = [];
  /** What a request without tools gets: pi asks for its summaries that way. */
  summary: Step = { text: "SUMMARY" };
  /** When set, what every request gets, whatever it says. */
  always: Step | undefined;
  url = "";
  readonly #scripts = new Map<string, readonly Step[]>();
  readonly #caches = {
    "openai-completions": openaiCache(),
    "anthropic-messages": anthropicCache(),
  };
  readonly #given = new Set<Step>();
  readonly #waiting = new Map<Step, (() => void)[]>();
  #server: Server | undefined;
  #inFlight = 0;
  #calls = 0;

  async start(): Promise<this> {
    this.#server = createServer(
      (request, response) => void this.#serve(request, response),
    );
    await new Promise<void>((done) => this.#server?.listen(0, "127.0.0.1", done));
    this.url = `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
    return this;
  }

  stop(): void {
    this.#server?.closeAllConnections();
    this.#server?.close();
  }

  script(steps: readonly Step[]): string {
    const token = `@@${this.#scripts.size}@@`;
    this.#scripts.set(token, steps);
    return token;
  }

  /** Forgets requests and cached prefixes. */
  reset(): void {
    this.requests.length = 0;
    this.#caches["openai-completions"] = openaiCache();
    this.#caches["anthropic-messages"] = anthropicCache();
  }

  /** Requests whose last user message contains `text`. */
  about(text: string): ModelRequest[] {
    return this.requests.filter((request) => request.lastUser.includes(text));
  }

  async #serve(incoming: IncomingMessage, response: ServerResponse): Promise<void> {
    const raw = await read(incoming);
    const style: Style = incoming.url?.includes("/chat/") ? STYLES[0]! : STYLES[1]!;
    const body = JSON.parse(raw);
    const written = lastUser(body.messages);
    const weight = written.startsWith("You are fork") ? 1 : 0;
    this.#inFlight += weight;
    const request: ModelRequest = {
      style,
      raw,
      body,
      headers: incoming.headers,
      lastUser: written,
      at: performance.now(),
      inFlight: this.#inFlight,
      gone: false,
      billed: 0,
    };
    this.requests.push(request);
    response.on("close", () => {
      request.gone = !response.writableEnded;
      if (request.gone) this.#inFlight -= weight;
    });
    const step = this.#step(request);
    if (step.hang) return;
    const { status, text } = await this.#answer(request, step);
    if (request.gone) return;
    // Counted as done before the client can know, so that its next request is not one
    // too many.
    this.#inFlight -= weight;
    const type = status === 200 ? "text/event-stream" : "application/json";
    response.writeHead(status, { "content-type": type });
    response.end(text);
  }

  #step(request: ModelRequest): Step {
    if (!request.body.tools) return this.summary;
    const token = request.lastUser.match(/@@\d+@@/g)?.at(-1);
    const { messages } = request.body;
    const from = messages.findLastIndex((message: any) => isWritten(message));
    const replies = messages
      .slice(from)
      .filter((message: any) => message.role === "assistant");
    const step =
      this.always ?? this.#scripts.get(token ?? "")?.[replies.length] ?? EMPTY;
    if (step.once && this.#given.has(step)) return EMPTY;
    this.#given.add(step);
    return step;
  }

  async #answer(request: ModelRequest, step: Step): Promise<Answer> {
    if (step.together) await this.#meeting(step, step.together);
    // A prefix can be read from the moment its own request begins to be answered, no
    // sooner.
    const { usage, remember } = this.#caches[request.style](request.body);
    await new Promise((done) => setTimeout(done, step.delayMs ?? 0));
    if (step.status) {
      const error = { message: `scripted ${step.status}`, type: "bad" };
      return { status: step.status, text: JSON.stringify({ error }) };
    }
    remember();
    const events =
      request.style === "openai-completions" ? openaiEvents : anthropicEvents;
    const counted = step.input === undefined ? usage : { ...usage, input: step.input };
    const { input, cacheRead, cacheWrite } = counted;
    request.billed = input + cacheRead + cacheWrite + outputTokens(step);
    return { status: 200, text: events(step, counted, ++this.#calls) };
  }

  #meeting(step: Step, size: number): Promise<void> {
    return new Promise((go) => {
      const waiting = [...(this.#waiting.get(step) ?? []), go];
      this.#waiting.set(step, waiting);
      if (waiting.length < size) return;
      this.#waiting.delete(step);
      for (const release of waiting) release();
    });
  }
}

async function read(incoming: IncomingMessage): Promise<string> {
  const chunks: Buffer[] = [];
  for await (const chunk of incoming) chunks.push(chunk);
  return Buffer.concat(chunks).toString();
}

function isWritten(message: any): boolean {
  if (message.role !== "user") return false;
  if (typeof message.content === "string") return true;
  return !message.content.some((block: any) => block.type === "tool_result");
}

export function textOf(message: any): string {
  if (typeof message.content === "string") return message.content;
  return (message.content ?? []).map((block: any) => block.text ?? "").join("\n");
}

function lastUser(messages: any[]): string {
  const message = messages.findLast(isWritten);
  return message ? textOf(message) : "";
}

// ---- Replies ------------------------------------------------------------------------

interface CacheUsage {
  readonly input: number;
  readonly cacheRead: number;
  readonly cacheWrite: number;
}

const outputTokens = (step: Step) =>
  tokens(JSON.stringify([step.text, step.thinking, step.tools]));

function openaiEvents(step: Step, usage: CacheUsage, n: number): string {
  const calls = (step.tools ?? []).map((tool, index) => ({
    ...{ index, id: tool.id ?? `call_${n}_${index}`, type: "function" },
    function: { name: tool.name, arguments: JSON.stringify(tool.args) },
  }));
  const delta = {
    ...(step.thinking ? { reasoning_content: step.thinking } : {}),
    ...(step.text ? { content: step.text } : {}),
    ...(calls.length ? { tool_calls: calls } : {}),
  };
  const finish_reason = step.stop ?? (calls.length ? "tool_calls" : "stop");
  const prompt_tokens = usage.input + usage.cacheRead;
  const completion_tokens = outputTokens(step);
  const chunks = [
    {
      choices: [
        { index: 0, delta: { role: "assistant", ...delta }, finish_reason: null },
      ],
    },
    { choices: [{ index: 0, delta: {}, finish_reason }] },
    {
      choices: [],
      usage: {
        ...{
          prompt_tokens,
          completion_tokens,
          total_tokens: prompt_tokens + completion_tokens,
        },
        prompt_tokens_details: { cached_tokens: usage.cacheRead },
      },
    },
  ].map((chunk) => ({
    id: `chat_${n}`,
    object: "chat.completion.chunk",
    model: "m",
    ...chunk,
  }));
  return [...chunks.map((chunk) => JSON.stringify(chunk)), "[DONE]"]
    .map((data) => `data: ${data}\n\n`)
    .join("");
}

function anthropicEvents(step: Step, usage: CacheUsage, n: number): string {
  const blocks = [
    ...(step.thinking ? [thinkingBlock(step.thinking)] : []),
    ...(step.text ? [textBlock(step.text)] : []),
    ...(step.tools ?? []).map((tool, index) => toolBlock(tool, `toolu_${n}_${index}`)),
  ];
  const stop_reason = step.stop
    ? "max_tokens"
    : step.tools?.length
      ? "tool_use"
      : "end_turn";
  const message = {
    ...{ id: `msg_${n}`, type: "message", role: "assistant", model: "m", content: [] },
    usage: {
      ...{ input_tokens: usage.input, output_tokens: 1 },
      cache_read_input_tokens: usage.cacheRead,
      cache_creation_input_tokens: usage.cacheWrite,
    },
  };
  const events: any[] = [
    { type: "message_start", message },
    ...blocks.flatMap(({ content_block, deltas }, index) => [
      { type: "content_block_start", index, content_block },
      ...deltas.map((delta) => ({ type: "content_block_delta", index, delta })),
      { type: "content_block_stop", index },
    ]),
    {
      type: "message_delta",
      delta: { stop_reason },
      usage: { output_tokens: outputTokens(step) },
    },
    { type: "message_stop" },
  ];
  return events.map((e) => `event: ${e.type}\ndata: ${JSON.stringify(e)}\n\n`).join("");
}

interface Block {
  readonly content_block: unknown;
  readonly deltas: readonly unknown[];
}

function thinkingBlock(thinking: string): Block {
  const deltas = [
    { type: "thinking_delta", thinking },
    { type: "signature_delta", signature: `sig-${thinking.length}` },
  ];
  return { content_block: { type: "thinking", thinking: "", signature: "" }, deltas };
}

function textBlock(text: string): Block {
  return {
    content_block: { type: "text", text: "" },
    deltas: [{ type: "text_delta", text }],
  };
}

function toolBlock(tool: ToolUse, id: string): Block {
  const partial_json = JSON.stringify(tool.args);
  return {
    content_block: { type: "tool_use", id: tool.id ?? id, name: tool.name, input: {} },
    deltas: [{ type: "input_json_delta", partial_json }],
  };
}

// ---- Prompt caching, as the two providers document it -------------------------------

/**
 * Usage of one request against what is cached now, and a way to add it to the cache.
 */
type Cache = (body: any) => { usage: CacheUsage; remember: () => void };

const MIN_TOKENS = 1024;

function tokens(text: string): number {
  return Math.ceil(text.length / 4);
}

/**
 * OpenAI: the longest prefix shared with an earlier request, tools first, from 1,024
 * tokens on in steps of 128. Writing costs nothing.
 */
function openaiCache(): Cache {
  const seen: string[] = [];
  return (body) => {
    const text = [body.tools ?? [], body.messages]
      .map((part) => JSON.stringify(part))
      .join("");
    const shared = Math.max(
      0,
      ...seen.map((other) => Math.floor(common(text, other) / 4)),
    );
    const cacheRead = shared < MIN_TOKENS ? 0 : shared - (shared % 128);
    const usage = { input: tokens(text) - cacheRead, cacheRead, cacheWrite: 0 };
    return { usage, remember: () => void seen.push(text) };
  };
}

/** The length of the common start, by halving: comparing slices is fast. */
function common(a: string, b: string): number {
  let [same, end] = [0, Math.min(a.length, b.length)];
  while (same < end) {
    const middle = Math.ceil((same + end) / 2);
    if (a.slice(same, middle) === b.slice(same, middle)) same = middle;
    else end = middle - 1;
  }
  return same;
}

/**
 * Anthropic: blocks in the order tools, system, messages. Every block with a
 * cache_control ends an entry; a request reads the longest entry found at or up to 20
 * blocks before one of its own marks, and writes from there to its last mark.
 */
function anthropicCache(): Cache {
  const entries = new Set<string>();
  return (body) => {
    const blocks = anthropicBlocks(body);
    const marks = blocks.flatMap((block, index) => (block.marked ? [index] : []));
    const last = marks.at(-1);
    const write = last === undefined ? 0 : upTo(blocks, last);
    const read = Math.max(0, ...marks.map((mark) => longestHit(blocks, mark, entries)));
    const total = upTo(blocks, blocks.length - 1);
    const usage = { input: total - write, cacheRead: read, cacheWrite: write - read };
    const add = (mark: number) =>
      upTo(blocks, mark) >= MIN_TOKENS && entries.add(hashAt(blocks, mark));
    return { usage, remember: () => marks.forEach(add) };
  };
}

interface Cached {
  readonly hash: string;
  readonly until: number;
  readonly marked: boolean;
}

const upTo = (blocks: Cached[], index: number) => blocks[index]?.until ?? 0;
const hashAt = (blocks: Cached[], index: number) => blocks[index]?.hash ?? "";

function longestHit(blocks: Cached[], mark: number, entries: Set<string>): number {
  for (let index = mark; index >= Math.max(0, mark - 20); index--) {
    if (entries.has(hashAt(blocks, index))) return upTo(blocks, index);
  }
  return 0;
}

function anthropicBlocks(body: any): Cached[] {
  const contents = body.messages.flatMap((message: any) => {
    const parts =
      typeof message.content === "string"
        ? [{ type: "text", text: message.content }]
        : message.content;
    return parts.map((part: any) => ({ role: message.role, ...part }));
  });
  let hash = "";
  let until = 0;
  return [...(body.tools ?? []), ...(body.system ?? []), ...contents].map(
    (block: any) => {
      const { cache_control, ...rest } = block;
      const text = JSON.stringify(rest);
      hash = createHash("sha256").update(hash).update(text).digest("hex");
      until += tokens(text);
      return { hash, until, marked: cache_control !== undefined };
    },
  );
}
