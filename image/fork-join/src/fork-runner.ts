/**
 * One fork from its seed to its result: a child session in this process, seeded with a
 * clone of C0, bounded by the tool policy, watched by the self-check.
 */
import { randomUUID } from "node:crypto";
import { resolve } from "node:path";
import { getCurrentTools, type Message, type Tool } from "@earendil-works/pi-ai";
import {
  type AgentSession,
  CURRENT_SESSION_VERSION,
  createAgentSession,
  DefaultResourceLoader,
  type ExtensionAPI,
  type FileEntry,
  type SessionEntry,
  SessionManager,
  SettingsManager,
  type ToolDefinition,
} from "@earendil-works/pi-coding-agent";
import { type Check, hookFork } from "./hooks.ts";
import { childExtensionPaths, type ForkHost } from "./host.ts";
import { missingWriteTools, type ToolPolicy, toolPolicy } from "./policy.ts";
import type { PrefixCheck } from "./prefix.ts";
import { processState } from "./process.ts";
import {
  judge,
  lastReply,
  type Stop,
  type Tally,
  tally,
  type Verdict,
} from "./report.ts";
import { type ForkTask, forkMessage } from "./request.ts";
import {
  createWorktree,
  type Exported,
  exportWorktree,
  type Worktree,
} from "./worktree.ts";

export interface ForkResult extends Verdict, Tally {
  readonly id: string;
  readonly kind: ForkTask["kind"];
  readonly ms: number;
  readonly prefix: PrefixCheck;
  readonly worktree?: Exported;
}

/** How long an aborted fork may take to wind down before it is cut off. */
const ABORT_GRACE_MS = 700;

/** A task whose turn never came. */
export function neverStarted({ id, kind }: ForkTask): ForkResult {
  const verdict = {
    ...judge(undefined, "cancelled"),
    error: "cancelled before it started",
  };
  return { ...verdict, ...idle(), id, kind, ms: 0 };
}

function idle(): Tally & { prefix: PrefixCheck } {
  return { ...tally([]), prefix: "unchecked" };
}

/** Runs one fork. Never rejects: whatever goes wrong is the fork's own result. */
export async function runFork(
  host: ForkHost,
  task: ForkTask,
  signal: AbortSignal,
): Promise<ForkResult> {
  const started = performance.now();
  const watch = new Watch(signal, host.settings.forkTimeoutSeconds);
  const run = await attempt(host, task, watch).catch((error) => broken(error, watch));
  watch.end();
  const ms = Math.round(performance.now() - started);
  return { ...run, id: task.id, kind: task.kind, ms };
}

type Run = Omit<ForkResult, "id" | "kind" | "ms">;

function broken(error: unknown, watch: Watch): Run {
  return { ...judge(undefined, watch.stop, messageOf(error)), ...idle() };
}

async function attempt(host: ForkHost, task: ForkTask, watch: Watch): Promise<Run> {
  if (task.kind === "read-only") return converse(host, task, watch);
  const tree = await createWorktree(host.cwd, host.call, task.id, host.agentDir);
  const run = await converse(host, task, watch, tree).catch((error) =>
    broken(error, watch),
  );
  return { ...run, worktree: await exportWorktree(tree) };
}

async function converse(
  host: ForkHost,
  task: ForkTask,
  watch: Watch,
  tree?: Worktree,
): Promise<Run> {
  const check: Check = { result: "unchecked" };
  const { session, policy, fresh } = await openChild(host, task, tree, check);
  const place = { cwd: tree?.cwd ?? host.cwd, worktree: tree };
  let thrown: string | undefined;
  try {
    // Forks get no user interface: a guard that would ask has to decide by itself.
    await session.bindExtensions({ mode: "print" });
    await watch.over(session, forkMessage(task, place, policy));
  } catch (error) {
    thrown = messageOf(error);
  } finally {
    await closeChild(session);
  }
  const entries = fresh();
  const verdict = judge(lastReply(entries), watch.stop, thrown);
  return { ...verdict, ...tally(entries), prefix: check.result };
}

/** Tells a fork to stop: with the parent's call, or when its time is up. */
class Watch {
  stop: Stop;
  readonly #stopping = new AbortController();
  readonly #timer: NodeJS.Timeout | undefined;
  readonly #signal: AbortSignal;
  readonly #cancel = () => this.#halt("cancelled");

  constructor(signal: AbortSignal, seconds: number) {
    this.#signal = signal;
    signal.addEventListener("abort", this.#cancel, { once: true });
    if (signal.aborted) this.#cancel();
    const timeout = () => this.#halt("timeout");
    if (seconds > 0) this.#timer = setTimeout(timeout, seconds * 1000);
  }

  /**
   * Runs one prompt in `session`; returns early only when a stop is not heeded in time.
   */
  async over(session: AgentSession, text: string): Promise<void> {
    const signal = this.#stopping.signal;
    if (signal.aborted) return;
    const abort = () => void session.abort();
    signal.addEventListener("abort", abort, { once: true });
    // A stop that comes while pi still prepares the run is lost to abort().
    session.subscribe((event) => {
      if (event.type === "agent_start" && signal.aborted) abort();
    });
    const options = { expandPromptTemplates: false, source: "extension" } as const;
    const run = session.prompt(text, options);
    // When the grace is over first, nobody is left to hear how the run ends.
    run.catch(() => undefined);
    await Promise.race([run, graceAfter(signal)]);
  }

  end(): void {
    clearTimeout(this.#timer);
    this.#signal.removeEventListener("abort", this.#cancel);
  }

  #halt(why: NonNullable<Stop>): void {
    this.stop ??= why;
    this.#stopping.abort();
  }
}

function graceAfter(signal: AbortSignal): Promise<void> {
  return new Promise((over) => {
    const wait = () => setTimeout(over, ABORT_GRACE_MS).unref();
    signal.addEventListener("abort", wait, { once: true });
  });
}

interface Child {
  readonly session: AgentSession;
  readonly policy: ToolPolicy;
  /** The entries the fork added to its seed. */
  fresh(): SessionEntry[];
}

async function openChild(
  host: ForkHost,
  task: ForkTask,
  tree: Worktree | undefined,
  check: Check,
): Promise<Child> {
  const { agentDir, runtime: modelRuntime, model, thinkingLevel } = host;
  const cwd = tree?.cwd ?? host.cwd;
  const settingsManager = childSettings(host);
  const resourceLoader = await childResources(host, settingsManager, (pi) =>
    hookFork(pi, host, task.id, tree, check),
  );
  const policy = childPolicy(host, task, resourceLoader);
  const sessionManager = SessionManager.inMemory(cwd, undefined, seed(host, cwd));
  const { session } = await createAgentSession({
    cwd,
    agentDir,
    modelRuntime,
    model,
    ...(thinkingLevel ? { thinkingLevel } : {}),
    ...loadout(host, policy),
    resourceLoader,
    settingsManager,
    sessionManager,
  });
  // One tool after the other where paths are checked: a bash beside a write could
  // otherwise put a symlink in its way after the check.
  if (tree) session.agent.toolExecution = "sequential";
  processState().forks.add(session.sessionId);
  const seeded = sessionManager.getEntries().length;
  return { session, policy, fresh: () => sessionManager.getEntries().slice(seeded) };
}

/** @throws when a write fork could neither edit nor write. */
function childPolicy(
  host: ForkHost,
  task: ForkTask,
  loader: DefaultResourceLoader,
): ToolPolicy {
  const { extensions } = loader.getExtensions();
  const own = new Set(extensions.flatMap(({ tools }) => [...tools.keys()]));
  const policy = toolPolicy(task.kind, host.tools, own);
  const lacking = task.kind === "write" ? missingWriteTools(policy) : undefined;
  if (lacking !== undefined) throw new Error(lacking);
  return policy;
}

async function closeChild(session: AgentSession): Promise<void> {
  const runner = session.extensionRunner;
  const event = { type: "session_shutdown", reason: "quit" } as const;
  if (runner.hasHandlers("session_shutdown")) await runner.emit(event);
  session.dispose();
  processState().forks.delete(session.sessionId);
}

/**
 * C0, cloned, under a session id of its own: disposing of the parent's would end its
 * state.
 */
function seed(host: ForkHost, cwd: string): FileEntry[] {
  const timestamp = new Date().toISOString();
  const id = randomUUID();
  return [
    { type: "session", version: CURRENT_SESSION_VERSION, id, timestamp, cwd },
    ...structuredClone([...host.base]),
  ];
}

/** pi's settings without what would load packages or refresh caches for money. */
function childSettings(host: ForkHost): SettingsManager {
  const off = { cacheWarming: "off", packages: [], extensions: [] } as const;
  const settings = { ...host.piSettings, ...structuredClone(off) };
  return SettingsManager.inMemory(settings as unknown as typeof host.piSettings, {
    projectTrusted: host.projectTrusted,
  });
}

/**
 * Resources come from the parent's directory, also for a fork that works in a worktree.
 */
async function childResources(
  host: ForkHost,
  settings: SettingsManager,
  factory: (pi: ExtensionAPI) => void,
): Promise<DefaultResourceLoader> {
  const { cwd, agentDir, projectTrusted } = host;
  const lean = host.settings.leanChildren;
  const ordinary = () => SettingsManager.create(cwd, agentDir, { projectTrusted });
  const guards = childExtensionPaths(host);
  const loader = new DefaultResourceLoader({
    cwd,
    agentDir,
    settingsManager: lean ? settings : ordinary(),
    noExtensions: lean,
    noSkills: lean,
    noPromptTemplates: lean,
    noThemes: lean,
    additionalExtensionPaths: guards,
    extensionFactories: [{ name: "fork", factory, hidden: true }],
  });
  await loader.reload();
  const failed = loader
    .getExtensions()
    .errors.filter(({ path }) => lean || guards.includes(resolve(path)));
  if (failed.length === 0) return loader;
  const why = failed.map(({ path, error }) => `${path}: ${error}`).join("; ");
  throw new Error(`a fork does not start without its childExtensions: ${why}`);
}

/**
 * Tools are always named: without that, pi restores the parent's own loadout. A shared
 * prefix declares what the parent declared, and what may not run is there only to
 * refuse.
 */
function loadout(
  host: ForkHost,
  policy: ToolPolicy,
): { tools: string[]; customTools: ToolDefinition[] } {
  const lean = host.settings.prefix === "lean";
  if (lean) return { tools: [...policy.executable], customTools: [] };
  const declared = getCurrentTools(host.transcript as Message[]);
  const inert = declared.filter((tool) => !policy.executable.includes(tool.name));
  const names = new Set([...declared.map((tool) => tool.name), ...policy.executable]);
  return {
    tools: [...names],
    customTools: inert.map((tool) => stub(tool, policy.refusal(tool.name))),
  };
}

/** A declaration without a tool behind it. */
function stub(tool: Tool, refusal: string): ToolDefinition {
  const execute = () => Promise.reject(new Error(refusal));
  return { ...tool, label: tool.name, execute };
}

function messageOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}
