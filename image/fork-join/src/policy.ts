/**
 * Which tools a fork may run. The documented set per kind is the upper bound; the
 * parent's own tools bound it further, so that forking never gains a tool the session
 * was denied.
 */

/**
 * A read-only fork has no edit and no write; a write fork has both, in its own
 * worktree.
 */
export type ForkKind = "read-only" | "write";

export const TOOL_NAME = "fork_join";

const READING = ["read", "bash", "grep", "find", "ls"] as const;
const WRITING = ["edit", "write"] as const;
/** Listing and searching tools that pi registers inactive and that come with `read`. */
const COME_WITH_READ: readonly string[] = ["grep", "find", "ls"];

export const DOCUMENTED: Record<ForkKind, readonly string[]> = {
  "read-only": READING,
  write: [...READING, ...WRITING],
};

/** One tool the parent has registered, active or not. */
export interface RegisteredTool {
  readonly name: string;
  /** Where it comes from when it is not pi's own tool of that name. */
  readonly replacedBy?: string | undefined;
}

export interface ParentTools {
  readonly active: readonly string[];
  readonly registered: readonly RegisteredTool[];
}

export interface ToolPolicy {
  /** Tools that really run, in the documented order. */
  readonly executable: readonly string[];
  /** Why a tool outside `executable` does not run; a sentence for the model. */
  refusal(name: string): string;
}

/**
 * `forkTools` are the tools the fork's own extensions register: a parent whose bash is
 * an extension's (a sandbox, say) must not get pi's plain bash through a fork instead.
 */
export function toolPolicy(
  kind: ForkKind,
  parent: ParentTools,
  forkTools: ReadonlySet<string>,
): ToolPolicy {
  const why = new Map(
    DOCUMENTED[kind].map((name) => [name, denial(name, parent, forkTools)]),
  );
  return {
    executable: DOCUMENTED[kind].filter((name) => why.get(name) === undefined),
    refusal: (name) => why.get(name) ?? general(name, kind),
  };
}

function denial(
  name: string,
  parent: ParentTools,
  forkTools: ReadonlySet<string>,
): string | undefined {
  if (!mayRun(name, parent))
    return `${name} is off: the main session may not use it either`;
  const replacedBy = parent.registered.find((tool) => tool.name === name)?.replacedBy;
  if (replacedBy === undefined || forkTools.has(name)) return undefined;
  return (
    `${name} is off: the main session's ${name} comes from ${replacedBy}, and forks load ` +
    "that only when pi-fork-join.childExtensions names it"
  );
}

function mayRun(name: string, parent: ParentTools): boolean {
  if (parent.active.includes(name)) return true;
  if (!COME_WITH_READ.includes(name) || !parent.active.includes("read")) return false;
  return !excludedByName(name, parent);
}

/**
 * `--exclude-tools grep` leaves grep unregistered while other inactive tools stay
 * registered. `--tools read,bash` registers nothing but what it names, and then
 * excludes nothing.
 */
function excludedByName(name: string, parent: ParentTools): boolean {
  const registered = parent.registered.map((tool) => tool.name);
  if (registered.includes(name)) return false;
  return registered.some((other) => !parent.active.includes(other));
}

function general(name: string, kind: ForkKind): string {
  if (name === TOOL_NAME) return `${TOOL_NAME} is off: a fork cannot fork`;
  const writing = (WRITING as readonly string[]).includes(name);
  if (writing && kind === "read-only") return `${name} is off: this fork is read-only`;
  return `${name} is off in forks`;
}

/** A write fork that can neither edit nor write is a mistake; undefined when it can. */
export function missingWriteTools(policy: ToolPolicy): string | undefined {
  if (WRITING.some((name) => policy.executable.includes(name))) return undefined;
  return `a write fork needs edit or write: ${policy.refusal("edit")}`;
}
