/**
 * Temporary directories that name the process they belong to, so that a later start can
 * tell what a killed one left behind.
 */
import { mkdtempSync, readdirSync, readFileSync, realpathSync, rmSync } from "node:fs";
import { hostname, tmpdir } from "node:os";
import { dirname, join, relative, sep } from "node:path";

const PREFIX = "pi-fork-join";
const NAME = /^pi-fork-join-(tree|reports)-(\d+)-(\d+)-/;

/** A process on one machine; `start` tells it from a later one with the same pid. */
export interface Owner {
  readonly pid: number;
  readonly start: string;
  readonly host: string;
}

export function thisProcess(): Owner {
  return { pid: process.pid, start: startOf(process.pid) ?? "0", host: hostname() };
}

/**
 * Whether `owner` is known to be gone. A process of another machine is never known to
 * be.
 */
export function isGone(owner: Owner): boolean {
  if (owner.host !== hostname()) return false;
  if (!isRunning(owner.pid)) return true;
  const start = startOf(owner.pid);
  return start !== undefined && owner.start !== "0" && start !== owner.start;
}

function isRunning(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return (error as NodeJS.ErrnoException).code === "EPERM";
  }
}

/** Field 22 of /proc/<pid>/stat; undefined where there is no /proc. */
function startOf(pid: number): string | undefined {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, "utf8");
    return stat.slice(stat.lastIndexOf(")") + 2).split(" ")[19];
  } catch {
    return undefined;
  }
}

export type ScratchKind = "tree" | "reports";

/**
 * A new empty directory outside `cwd`, or undefined when every candidate lies inside
 * it. The path is real, without symlinks, because git reports worktrees that way.
 */
export function makeScratch(
  kind: ScratchKind,
  cwd: string,
  fallback: string,
): string | undefined {
  const base = [tmpdir(), fallback].find((candidate) => !isInside(cwd, candidate));
  if (base === undefined) return undefined;
  const { pid, start } = thisProcess();
  return mkdtempSync(join(realpathSync(base), `${PREFIX}-${kind}-${pid}-${start}-`));
}

/** Removes reports and empty directories of processes that are gone. */
export function sweepScratch(): void {
  for (const name of readdirSync(tmpdir())) {
    const match = NAME.exec(name);
    if (!match) continue;
    const owner = { pid: Number(match[2]), start: match[3] ?? "0", host: hostname() };
    // A tree that still has files may hold work of some repository: only that one's
    // start, which can export it, may remove it.
    const empty = match[1] === "reports" || readdirOrNothing(name).length === 0;
    if (empty && isGone(owner)) removeTree(join(tmpdir(), name));
  }
}

function readdirOrNothing(name: string): string[] {
  try {
    return readdirSync(join(tmpdir(), name));
  } catch {
    return ["unreadable"];
  }
}

export function isScratchTree(path: string): boolean {
  return path.split(sep).at(-1)?.startsWith(`${PREFIX}-tree-`) ?? false;
}

/**
 * Removes a directory whatever is in it; what cannot be removed is left to the system.
 */
export function removeTree(path: string): void {
  try {
    rmSync(path, { recursive: true, force: true });
  } catch {
    // Another user's, or busy: temporary directories are cleaned by the system as well.
  }
}

/** `path` is `parent` or inside it, by name alone. */
export function isInside(parent: string, path: string): boolean {
  const way = relative(parent, path);
  return way === "" || (way !== ".." && !way.startsWith(`..${sep}`) && way !== path);
}

/** The real path of the nearest existing ancestor, with the missing rest appended. */
export function realpathOfNearest(path: string): string {
  try {
    return realpathSync(path);
  } catch {
    const parent = dirname(path);
    return parent === path
      ? path
      : join(realpathOfNearest(parent), relative(parent, path));
  }
}
