/** A fork_join call as the model writes it, checked, and the message each fork gets. */
import { type Static, Type } from "typebox";
import type { ForkKind, ToolPolicy } from "./policy.ts";
import { type ForkSettings, MAX_CONCURRENCY } from "./settings.ts";

const MAX_TASKS = 16;
const ID = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

// Ranges stand in the descriptions only: pi's own validation would name neither the
// range nor every fault at once.
export const requestSchema = Type.Object({
  tasks: Type.Array(
    Type.Object({
      id: Type.String({
        description: "Unique short name: letters, digits, dot, dash, underscore",
      }),
      task: Type.String({
        description:
          "The whole assignment. The fork knows this conversation, not the other tasks.",
      }),
      write: Type.Optional(
        Type.Boolean({
          description: "Adds edit and write, in a git worktree of the last commit",
        }),
      ),
    }),
    { description: `1 to ${MAX_TASKS} independent tasks` },
  ),
  maxConcurrency: Type.Optional(
    Type.Number({ description: `Forks at once, 1 to ${MAX_CONCURRENCY}` }),
  ),
});

export type RequestParams = Static<typeof requestSchema>;

export interface ForkTask {
  readonly id: string;
  readonly task: string;
  readonly kind: ForkKind;
}

export interface ForkRequest {
  readonly tasks: readonly ForkTask[];
  readonly concurrency: number;
}

/** The call itself is wrong; the message names every fault. No fork was started. */
export class RequestError extends Error {}

/** @throws RequestError */
export function readRequest(
  params: RequestParams,
  settings: ForkSettings,
): ForkRequest {
  const concurrency = params.maxConcurrency ?? settings.defaultMaxConcurrency;
  const faults = [...taskFaults(params.tasks), ...concurrencyFaults(concurrency)];
  if (faults.length > 0) throw new RequestError(`fork_join: ${faults.join("; ")}`);
  const tasks = params.tasks.map(({ id, task, write }) => ({
    id,
    task,
    kind: write ? ("write" as const) : ("read-only" as const),
  }));
  return { tasks, concurrency };
}

function taskFaults(tasks: RequestParams["tasks"]): string[] {
  const faults: string[] = [];
  if (tasks.length < 1 || tasks.length > MAX_TASKS) {
    faults.push(`tasks must be 1 to ${MAX_TASKS}, not ${tasks.length}`);
  }
  for (const [index, { id, task }] of tasks.entries()) {
    if (!ID.test(id))
      faults.push(`tasks[${index}].id ${JSON.stringify(id)} must match ${ID}`);
    if (!task.trim()) faults.push(`tasks[${index}].task is blank`);
    const first = tasks.findIndex((other) => other.id === id);
    if (first < index)
      faults.push(`tasks[${index}].id ${JSON.stringify(id)} is not unique`);
  }
  return faults;
}

function concurrencyFaults(value: number): string[] {
  if (Number.isInteger(value) && value >= 1 && value <= MAX_CONCURRENCY) return [];
  return [
    `maxConcurrency must be a whole number from 1 to ${MAX_CONCURRENCY}, not ${value}`,
  ];
}

/** Where a fork works; `worktree` is set for a write fork. */
export interface Place {
  readonly cwd: string;
  readonly worktree?: { readonly parentTop: string; readonly base: string } | undefined;
}

/** The one message a fork gets after the shared conversation. */
export function forkMessage(task: ForkTask, place: Place, policy: ToolPolicy): string {
  const limits = bounds(place, policy).map((line) => `- ${line}`);
  return [
    `You are fork ${JSON.stringify(task.id)} of this conversation, at work on one task ` +
      "only. Of what you do, the main session gets nothing but your last message.",
    `# Task\n\n${task.task}`,
    `# Bounds\n\n${limits.join("\n")}`,
    REPORT_CONTRACT,
  ].join("\n\n");
}

function bounds({ cwd, worktree }: Place, policy: ToolPolicy): string[] {
  const tools = `Tools that run here: ${policy.executable.join(", ")}. Others only fail.`;
  if (!worktree) {
    const shared = "Other forks read the same files now";
    return [tools, `Work in ${cwd}. ${shared}: change none, not by bash either.`];
  }
  const commit = worktree.base.slice(0, 12);
  return [
    tools,
    `Work in ${cwd}, a git worktree of your own at commit ${commit}.`,
    `Leave ${worktree.parentTop} alone, by bash too; what is uncommitted there is not here.`,
    "What you change is kept on a branch, committed or not. Push nothing.",
  ];
}

const REPORT_CONTRACT = `# Report

End with one message that calls no tool. Keep it dense:
- Result: what you found or did, the answer first
- Evidence: paths with lines, commands with what they printed
- Risks: what may be wrong or break
- Open points: what you left undone or could not tell`;
