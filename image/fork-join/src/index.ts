/**
 * pi-fork-join: one tool, fork_join, that runs several forks of the conversation at
 * once and returns only their reports. This file ties the parts to pi; each part says
 * what it does.
 */
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import type {
  AgentToolResult,
  ExtensionAPI,
  ExtensionContext,
} from "@earendil-works/pi-coding-agent";
import { type ForkResult, neverStarted, runFork } from "./fork-runner.ts";
import { captureHost, type ForkHost } from "./host.ts";
import { entriesBeforeCall } from "./locate.ts";
import { TOOL_NAME } from "./policy.ts";
import { runPool } from "./pool.ts";
import { callTag, processState } from "./process.ts";
import { assemble, type ForkStatus, sumUsage } from "./report.ts";
import {
  type ForkRequest,
  type ForkTask,
  readRequest,
  requestSchema,
  type RequestParams,
} from "./request.ts";
import { makeScratch, removeTree, sweepScratch } from "./scratch.ts";
import { type ForkSettings, readSettings } from "./settings.ts";
import { recoverWorktrees, worktreeNotes } from "./worktree.ts";

const STATUS_KEY = "pi-fork-join";

/** What the result keeps beside its text. Never sent to a model. */
export interface ForkJoinDetails {
  readonly version: 1;
  readonly call: string;
  readonly wallMs: number;
  readonly prefix: ForkSettings["prefix"];
  readonly forks: readonly Omit<ForkResult, "report">[];
}

/** Partial results only say how far each fork is. */
export interface ForkJoinProgress {
  readonly version: 1;
  readonly forks: readonly {
    readonly id: string;
    readonly status: ForkStatus | "waiting" | "running";
  }[];
}

type Details = ForkJoinDetails | ForkJoinProgress;
type OnUpdate = ((partial: AgentToolResult<Details>) => void) | undefined;

export default function forkJoin(pi: ExtensionAPI): void {
  const parent = new Parent(pi);
  pi.on("before_provider_request", ({ payload }) => parent.remember(payload));
  pi.on("session_start", (_event, ctx) => parent.start(ctx));
  pi.on("session_shutdown", ({ reason }) => {
    if (reason !== "reload") parent.end();
  });
  pi.registerTool<typeof requestSchema, Details>({
    name: TOOL_NAME,
    label: "Fork and join",
    description: DESCRIPTION,
    promptSnippet:
      "Run several independent tasks at once in forks of this conversation",
    promptGuidelines: GUIDELINES,
    parameters: requestSchema,
    // Sequential: a sibling edit in the same message must not race the forks.
    executionMode: "sequential",
    // A script's nested call stands in no assistant message, so it could not be
    // located.
    exposure: "model-only",
    execute: (id, params, signal, onUpdate, ctx) =>
      parent.call(id, params, signal ?? new AbortController().signal, onUpdate, ctx),
  });
}

const DESCRIPTION =
  "Run 1 to 16 independent tasks at once, each in a fork of this conversation that knows " +
  "everything up to here, and get one report per task, in order. Forks see neither this " +
  "call nor each other. A read-only fork has read, bash, grep, find and ls in this " +
  "directory and no edit or write tool; its bash can still write, so it is no sandbox. " +
  "With write: true a fork also has edit and write, in a git worktree of the last commit, " +
  "and its work comes back as a branch. Returns when every fork is done.";

const GUIDELINES = [
  "Put all tasks that can run in parallel into one fork_join call, each with its whole " +
    "assignment.",
  "After fork_join, weigh the reports against each other and make the final edits " +
    "yourself, one after the other.",
  "Never give fork_join anything destructive or irreversible to do.",
];

/** The session that forks, as long as it lives. */
class Parent {
  readonly #pi: ExtensionAPI;
  #payload: unknown;
  #spent = 0;
  #reports: string | undefined;

  constructor(pi: ExtensionAPI) {
    this.#pi = pi;
  }

  remember(payload: unknown): void {
    this.#payload = payload;
  }

  async start(ctx: ExtensionContext): Promise<void> {
    if (isFork(ctx)) return;
    this.#spent = spentIn(ctx);
    sweepScratch();
    for (const found of await recoverWorktrees(ctx.cwd)) {
      ctx.ui.notify(
        `fork_join, from a killed pi: ${worktreeNotes(found).join(" ")}`,
        "info",
      );
    }
    try {
      this.#showSpent(ctx, this.#settings());
    } catch (error) {
      ctx.ui.notify((error as Error).message, "warning");
    }
  }

  end(): void {
    if (this.#reports) removeTree(this.#reports);
    this.#reports = undefined;
  }

  /**
   * One fork_join call. @throws when the call itself is wrong; no fork has started
   * then.
   */
  async call(
    toolCallId: string,
    params: RequestParams,
    signal: AbortSignal,
    onUpdate: OnUpdate,
    ctx: ExtensionContext,
  ): Promise<AgentToolResult<Details>> {
    if (isFork(ctx)) throw new Error("fork_join is off: a fork cannot fork");
    const settings = this.#settings();
    const request = readRequest(params, settings);
    const base = entriesBeforeCall(ctx.sessionManager.getBranch(), toolCallId);
    const facts = { settings, base, payload: this.#payload, call: callTag(toolCallId) };
    const host = await captureHost(this.#pi, ctx, facts);
    const started = performance.now();
    const results = await runAll(host, request, signal, onUpdate);
    const usage = sumUsage(results.map((result) => result.usage));
    this.#spent += usage.cost.total;
    this.#showSpent(ctx, settings);
    return {
      content: [{ type: "text", text: this.#text(host, results) }],
      details: detailsOf(host, results, performance.now() - started),
      usage,
      isError: results.every((result) => result.status !== "ok"),
    };
  }

  #settings(): ForkSettings {
    return readSettings(
      (this.#pi.getSettings() as Record<string, unknown>)["pi-fork-join"],
    );
  }

  #text(host: ForkHost, results: readonly ForkResult[]): string {
    const forks = results.map((result) => ({
      ...result,
      notes: result.worktree ? worktreeNotes(result.worktree) : [],
    }));
    return assemble(forks, host.settings, (id, text) => this.#spill(host, id, text));
  }

  /**
   * Writes a report that was cut where the model can read it; gone when the session
   * ends.
   */
  #spill(host: ForkHost, id: string, text: string): string | undefined {
    this.#reports ??= makeScratch("reports", host.cwd, host.agentDir);
    if (!this.#reports) return undefined;
    const path = join(this.#reports, `${host.call}-${id}.md`);
    writeFileSync(path, text);
    return path;
  }

  #showSpent(ctx: ExtensionContext, settings: ForkSettings): void {
    if (!settings.costFooter || this.#spent === 0) return;
    const text = `forks $${this.#spent.toFixed(3)}`;
    ctx.ui.setStatus(
      STATUS_KEY,
      ctx.mode === "tui" ? ctx.ui.theme.fg("dim", text) : text,
    );
  }
}

/** With leanChildren off a fork loads this extension too; there it does nothing. */
function isFork(ctx: ExtensionContext): boolean {
  return processState().forks.has(ctx.sessionManager.getSessionId());
}

function spentIn(ctx: ExtensionContext): number {
  return ctx.sessionManager.getEntries().reduce((sum, entry) => {
    if (entry.type !== "message" || entry.message.role !== "toolResult") return sum;
    const ours = entry.message.toolName === TOOL_NAME;
    return ours ? sum + (entry.message.usage?.cost.total ?? 0) : sum;
  }, 0);
}

async function runAll(
  host: ForkHost,
  request: ForkRequest,
  signal: AbortSignal,
  onUpdate: OnUpdate,
): Promise<ForkResult[]> {
  const progress = new Progress(request.tasks, onUpdate);
  const run = async (task: ForkTask) => {
    progress.set(task.id, "running");
    const result = await runFork(host, task, signal);
    progress.set(task.id, result.status);
    return result;
  };
  const { slots } = processState();
  const { staggerMs } = host.settings;
  const pool = { concurrency: request.concurrency, slots, staggerMs, signal };
  try {
    return await runPool(request.tasks, pool, run, neverStarted);
  } finally {
    progress.end();
  }
}

function detailsOf(
  host: ForkHost,
  results: readonly ForkResult[],
  wallMs: number,
): ForkJoinDetails {
  const forks = results.map(({ report: _report, ...rest }) => rest);
  const { prefix } = host.settings;
  return { version: 1, call: host.call, wallMs: Math.round(wallMs), prefix, forks };
}

/**
 * pi repeats the whole call with every update, so they come at most four times a
 * second.
 */
const UPDATE_MS = 250;

class Progress {
  readonly #statuses: Map<string, ForkJoinProgress["forks"][number]["status"]>;
  readonly #onUpdate: OnUpdate;
  #timer: NodeJS.Timeout | undefined;

  constructor(tasks: readonly ForkTask[], onUpdate: OnUpdate) {
    this.#statuses = new Map(tasks.map((task) => [task.id, "waiting"]));
    this.#onUpdate = onUpdate;
  }

  set(id: string, status: ForkJoinProgress["forks"][number]["status"]): void {
    this.#statuses.set(id, status);
    this.#timer ??= setTimeout(() => this.#send(), UPDATE_MS);
  }

  end(): void {
    clearTimeout(this.#timer);
  }

  #send(): void {
    this.#timer = undefined;
    const forks = [...this.#statuses].map(([id, status]) => ({ id, status }));
    const text = forks.map(({ id, status }) => `${id}: ${status}`).join("\n");
    this.#onUpdate?.({
      content: [{ type: "text", text }],
      details: { version: 1, forks },
    });
  }
}
