/**
 * Where a write fork's paths lead. The conversation it shares speaks of the parent's
 * tree, so models name files there by their absolute paths; those mean the same file in
 * the worktree.
 */
import { homedir } from "node:os";
import { isAbsolute, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { isInside, realpathOfNearest } from "./scratch.ts";

/** The two trees of a write fork, real paths all. */
export interface Trees {
  readonly parentTop: string;
  readonly top: string;
  readonly cwd: string;
}

/** What becomes of a path a write fork names: used as it is, moved, or refused. */
export type Placed = { readonly path: string } | { readonly refused: string };

/**
 * A path of a reading or writing tool, placed for a fork in `tree`. Paths of the
 * parent's tree mean the same file in the fork's own; writing anywhere else is refused,
 * symlinks followed.
 */
export function placePath(tree: Trees, path: string, access: "read" | "write"): Placed {
  const named = resolve(tree.cwd, plainPath(path));
  const real = realpathOfNearest(named);
  if (isInside(tree.top, real))
    return { path: isAbsolute(plainPath(path)) ? named : path };
  const parent = [named, real].find((candidate) => isInside(tree.parentTop, candidate));
  if (parent !== undefined) {
    const moved = join(tree.top, relative(tree.parentTop, parent));
    if (isInside(tree.top, realpathOfNearest(moved))) return { path: moved };
  } else if (access === "read") {
    return { path };
  }
  return {
    refused: `${path} is outside this fork's worktree; a write fork stays in ${tree.top}`,
  };
}

/** The spellings pi's tools accept: a leading @, odd spaces, ~ and file: addresses. */
function plainPath(path: string): string {
  const spaced = path.replace(/[\u00A0\u2000-\u200A\u202F\u205F\u3000]/g, " ");
  const plain = spaced.startsWith("@") ? spaced.slice(1) : spaced;
  if (plain === "~" || plain.startsWith("~/")) return join(homedir(), plain.slice(1));
  return plain.startsWith("file://") ? fileURLToPath(plain) : plain;
}
