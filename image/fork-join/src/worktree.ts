/**
 * A write fork's own git worktree: made from the last commit, exported to a branch when
 * the fork changed something, removed when it did not. Work is never deleted
 * unexported: whatever git cannot take stays where it is and the report says so.
 */
import {
  existsSync,
  mkdirSync,
  readdirSync,
  readFileSync,
  realpathSync,
  rmSync,
} from "node:fs";
import { dirname, join, relative } from "node:path";
import { Git, GitError, inTurn } from "./git.ts";
import type { Trees } from "./place.ts";
import {
  isGone,
  isScratchTree,
  makeScratch,
  type Owner,
  removeTree,
  thisProcess,
} from "./scratch.ts";

const BRANCHES = "pi-fork";

export interface Worktree extends Trees {
  readonly branch: string;
  /** The commit it was made from. */
  readonly base: string;
  /**
   * git's administrative directory of this work tree; a fork may lose its `.git` file.
   */
  readonly gitDir: string;
}

export interface Exported {
  /** Branches that hold the work; empty when nothing changed. */
  readonly branches: readonly string[];
  readonly base: string;
  readonly commits: number;
  readonly files: number;
  readonly insertions: number;
  readonly deletions: number;
  /** Set when the directory was kept because not everything in it could be exported. */
  readonly kept?: { readonly path: string; readonly why: string };
}

/**
 * Makes a worktree of the repository `cwd` is in, on a new branch pi-fork/<call>/<id>.
 * @throws GitError when there is no repository, no commit, or git refuses.
 */
export async function createWorktree(
  cwd: string,
  call: string,
  id: string,
  fallback: string,
): Promise<Worktree> {
  const git = new Git(cwd);
  const parentTop = await topOf(git, cwd);
  const base = await git.ask("rev-parse", "--verify", "--quiet", "HEAD^{commit}");
  if (!base)
    throw new GitError("a write fork needs a commit; this repository has none");
  const scratch = makeScratch("tree", parentTop, fallback);
  if (!scratch) throw new GitError("no temporary directory outside the repository");
  const top = join(scratch, refPart(id));
  const name = `${BRANCHES}/${refPart(call)}/${refPart(id)}`;
  const branch = await register(git, top, name, base).catch((error: unknown) => {
    removeTree(scratch);
    throw error;
  });
  const made = { parentTop, top, branch, base, cwd: top, gitDir: "" };
  try {
    return {
      ...made,
      ...(await checkOut(made, relative(parentTop, realpathSync(cwd)))),
    };
  } catch (error) {
    await removeWorktree(git, top);
    await dropBranch(git, made);
    throw error;
  }
}

async function checkOut(
  { top }: Worktree,
  place: string,
): Promise<Pick<Worktree, "cwd" | "gitDir">> {
  const git = new Git(top);
  await git.run("reset", "--quiet", "--hard");
  const gitDir = await git.run("rev-parse", "--absolute-git-dir");
  const cwd = join(top, place);
  // The parent may stand in a directory that no commit has yet.
  mkdirSync(cwd, { recursive: true });
  return { cwd, gitDir };
}

async function topOf(git: Git, cwd: string): Promise<string> {
  try {
    return realpathSync(await git.run("rev-parse", "--show-toplevel"));
  } catch (error) {
    throw new GitError(
      `a write fork needs a git work tree, and ${cwd} is in none: ` +
        (error as Error).message,
    );
  }
}

/**
 * Call ids may be reused, and what an earlier call left on a branch must stay there.
 */
function register(git: Git, top: string, name: string, base: string): Promise<string> {
  return inTurn(async () => {
    const branch = await freeBranch(git, name);
    const reason = lockReason({ ...thisProcess(), base, branch });
    const lock = ["--lock", "--reason", reason];
    const options = ["--quiet", "--no-checkout", ...lock, "-b", branch];
    await git.run("worktree", "add", ...options, top, base);
    return branch;
  });
}

async function freeBranch(git: Git, name: string): Promise<string> {
  const format = "--format=%(refname:lstrip=2)";
  const names = await git.ask("for-each-ref", format, `refs/heads/${BRANCHES}/`);
  const taken = names.split("\n");
  let candidate = name;
  for (let n = 2; taken.includes(candidate); n++) candidate = `${name}-${n}`;
  return candidate;
}

/** A part of a branch name: no dots or endings that git refuses. */
export function refPart(text: string): string {
  const plain = text.replace(/[^A-Za-z0-9._-]+/g, "-").replace(/\.{2,}/g, "-");
  return plain.replace(/^[.-]+/, "").replace(/(\.lock|\.)+$/, "") || "x";
}

/**
 * Commits what is left, points the branch at the result, removes the directory. Never
 * throws: what goes wrong ends up in `kept`, and the worktree is then an ordinary one
 * of the user's.
 */
export async function exportWorktree(tree: Worktree): Promise<Exported> {
  const parent = new Git(tree.parentTop);
  const result: Exported = { ...NOTHING, base: tree.base };
  try {
    const tip = (await isUntouched(tree)) ? tree.base : await commitLeftovers(tree);
    const branches = await nameResult(parent, tree, tip);
    if (branches.length > 0)
      Object.assign(result, await measure(parent, tree.base, branches));
    const links = tip === tree.base ? [] : await gitlinks(parent, tree.base, tip);
    if (links.length > 0) throw new GitError(`repositories in it stay there: ${links}`);
    await removeWorktree(parent, tree.top);
    if (branches.length === 0) await dropBranch(parent, tree);
    return result;
  } catch (error) {
    await parent.ask("worktree", "unlock", tree.top);
    return { ...result, kept: { path: tree.top, why: (error as Error).message } };
  }
}

const NOTHING = { branches: [], commits: 0, files: 0, insertions: 0, deletions: 0 };

/**
 * One look that settles the common case: the base commit, its branch, and no change.
 */
async function isUntouched(tree: Worktree): Promise<boolean> {
  if (!existsSync(tree.top)) return false;
  const status = await treeGit(tree).ask("status", ...STATUS);
  return status === `# branch.oid ${tree.base}\n# branch.head ${tree.branch}`;
}

const STATUS = ["--porcelain=v2", "--branch", "--untracked-files=all"];

/** git in the worktree, whatever the fork did to its `.git` file. */
function treeGit(tree: Worktree): Git {
  return new Git(tree.top, { GIT_DIR: tree.gitDir, GIT_WORK_TREE: tree.top });
}

/**
 * Commits whatever differs from HEAD and returns the commit the worktree has reached.
 */
async function commitLeftovers(tree: Worktree): Promise<string> {
  if (!existsSync(tree.top)) {
    const parent = new Git(tree.parentTop);
    const head = await parent.ask("--git-dir", tree.gitDir, "rev-parse", "HEAD");
    return head || parent.run("rev-parse", `refs/heads/${tree.branch}`);
  }
  // A git command of the fork that was killed half way; nobody else writes here.
  for (const name of ["index.lock", "HEAD.lock"]) {
    rmSync(join(tree.gitDir, name), { force: true });
  }
  const git = treeGit(tree);
  await git.run("add", "--all");
  if (await git.run("diff", "--cached", "--name-only", "HEAD")) {
    const who = (await git.ask("var", "GIT_COMMITTER_IDENT")) ? [] : NOBODY;
    const message = "Keep what a write fork left uncommitted";
    await git.run(...who, "commit", "--quiet", "--no-verify", "--message", message);
  }
  return git.run("rev-parse", "HEAD");
}

/** Repositories inside the tree: git records their commit but not their content. */
async function gitlinks(parent: Git, base: string, tip: string): Promise<string[]> {
  const raw = await parent.run("diff", "--raw", "--no-renames", base, tip, "--");
  const links = raw.split("\n").filter((line) => /^:\d{6} 160000 /.test(line));
  return links.map((line) => line.slice(line.indexOf("\t") + 1));
}

const NOBODY = [
  "-c",
  "user.name=pi-fork-join",
  "-c",
  "user.email=pi-fork-join@localhost",
];

/**
 * The branches that hold the fork's work; none when it ended where it began. A fork may
 * have left its branch for another commit: then the branch follows, unless it holds
 * commits that the other does not.
 */
async function nameResult(parent: Git, tree: Worktree, tip: string): Promise<string[]> {
  const own = (await branchTip(parent, tree)) || tree.base;
  if (tip === tree.base && own === tree.base) return [];
  if (await isAncestor(parent, tip, own)) return [tree.branch];
  if (await isAncestor(parent, own, tip)) {
    await parent.run("update-ref", `refs/heads/${tree.branch}`, tip);
    return [tree.branch];
  }
  const second = await freeBranch(parent, `${tree.branch}-head`);
  await parent.run("update-ref", `refs/heads/${second}`, tip);
  return [tree.branch, second];
}

function dropBranch(parent: Git, { branch, base }: Worktree): Promise<string> {
  return parent.ask("update-ref", "-d", `refs/heads/${branch}`, base);
}

function branchTip(parent: Git, { branch }: Worktree): Promise<string> {
  return parent.ask("rev-parse", "--verify", "--quiet", `refs/heads/${branch}`);
}

async function isAncestor(git: Git, older: string, newer: string): Promise<boolean> {
  if (older === newer) return true;
  return (await git.ask("rev-list", "--count", `${newer}..${older}`)) === "0";
}

async function measure(
  git: Git,
  base: string,
  branches: readonly string[],
): Promise<Partial<Exported>> {
  const tip = `refs/heads/${branches.at(-1)}`;
  const stat = await git.run("diff", "--shortstat", base, tip, "--");
  const count = (what: RegExp) => Number(what.exec(stat)?.[1] ?? 0);
  return {
    branches,
    commits: Number(await git.run("rev-list", "--count", `${base}..${tip}`)),
    files: count(/(\d+) files? changed/),
    insertions: count(/(\d+) insertions?/),
    deletions: count(/(\d+) deletions?/),
  };
}

async function removeWorktree(parent: Git, top: string): Promise<void> {
  // Twice --force, because ours are locked.
  const remove = () =>
    inTurn(() => parent.run("worktree", "remove", "--force", "--force", top));
  await remove().catch(() => {
    // A fork may have removed or replaced its .git file; git takes a missing directory.
    removeTree(top);
    return remove();
  });
  if (isScratchTree(dirname(top))) removeTree(dirname(top));
}

/** What the report says about a write fork's worktree. */
export function worktreeNotes(exported: Exported): string[] {
  const { branches, base, kept } = exported;
  const notes = branches.map(
    (branch) => `Branch: ${branch} (from ${base.slice(0, 12)})`,
  );
  if (branches.length > 0) {
    const { files, insertions, deletions, commits } = exported;
    notes.push(
      `Diff: files ${files}, lines +${insertions} -${deletions}, commits ${commits}`,
    );
    notes.push(`Apply: git merge --squash ${branches.at(-1)}`);
  }
  if (kept) notes.push(`Worktree kept at ${kept.path}: ${kept.why}`);
  return notes.length > 0 ? notes : ["No changes; the worktree is gone."];
}

// ---- What a killed process left -----------------------------------------------------

const LOCK = /^pi-fork-join pid=(\d+) start=(\d+) host=(\S+) base=(\w+) branch=(\S+)$/;

interface Claim extends Owner {
  readonly base: string;
  readonly branch: string;
}

/** git keeps this beside the worktree and shows it in `git worktree list --verbose`. */
function lockReason({ pid, start, host, base, branch }: Claim): string {
  const owner = `pid=${pid} start=${start} host=${host}`;
  return `pi-fork-join ${owner} base=${base} branch=${branch}`;
}

/**
 * Exports and removes the worktrees of processes that are gone, and returns what each
 * held. Outside a repository, or without git, there is nothing to do.
 */
export async function recoverWorktrees(cwd: string): Promise<Exported[]> {
  const listing = await new Git(cwd).ask("worktree", "list", "--porcelain");
  const recovered: Exported[] = [];
  for (const [top, claim] of listing.split("\n\n").flatMap(claimed)) {
    if (isGone(claim)) recovered.push(await recover(cwd, top, claim));
  }
  return recovered;
}

function claimed(block: string): [top: string, claim: Claim][] {
  const line = (name: string) =>
    block.split("\n").find((text) => text.startsWith(`${name} `)) ?? "";
  const lock = LOCK.exec(line("locked").slice("locked ".length));
  if (!lock) return [];
  const [, pid, start = "0", host = "", base = "", branch = ""] = lock;
  const top = line("worktree").slice("worktree ".length);
  return [[top, { pid: Number(pid), start, host, base, branch }]];
}

async function recover(cwd: string, top: string, claim: Claim): Promise<Exported> {
  const gitDir = await adminDirectory(cwd, top);
  const { base, branch } = claim;
  return exportWorktree({ parentTop: cwd, top, cwd: top, branch, base, gitDir });
}

/** Found by the worktree's own pointer, which stays true when the directory is gone. */
async function adminDirectory(cwd: string, top: string): Promise<string> {
  const common = await new Git(cwd).ask(
    "rev-parse",
    "--path-format=absolute",
    "--git-common-dir",
  );
  const all = join(common, "worktrees");
  const pointers = readdirSync(all).map((name) => join(all, name));
  const own = pointers.find((dir) => readGitdir(dir) === join(top, ".git"));
  return own ?? join(all, "missing");
}

function readGitdir(dir: string): string {
  try {
    return readFileSync(join(dir, "gitdir"), "utf8").trim();
  } catch {
    return "";
  }
}
