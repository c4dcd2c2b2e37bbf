/**
 * Worktrees on real git, without pi: what a fork may do to one and what must survive.
 */
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { existsSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { type TestContext, test } from "node:test";
import { isGone, makeScratch, sweepScratch, thisProcess } from "../src/scratch.ts";
import {
  createWorktree,
  exportWorktree,
  recoverWorktrees,
  refPart,
  type Worktree,
  worktreeNotes,
} from "../src/worktree.ts";
import { git, put, repository, scratch } from "./repository.ts";

interface Forked {
  readonly top: string;
  readonly tree: Worktree;
}

async function fork(t: TestContext, id = "w"): Promise<Forked> {
  const top = join(scratch(t), "repo");
  repository(top, { "a.txt": "one\n", ".gitignore": "ignored\n" });
  const tree = await createWorktree(top, "call", id, "/");
  t.after(() => rmSync(dirname(tree.top), { recursive: true, force: true }));
  return { top, tree };
}

const count = (top: string) => git(top, "worktree", "list").split("\n").length;
const files = (top: string, branch: string) =>
  git(top, "ls-tree", "-r", "--name-only", branch).split("\n");

test("an unchanged worktree goes with its branch and its directory", async (t) => {
  const { top, tree } = await fork(t);
  put(tree.top, { ignored: "build output" });
  const exported = await exportWorktree(tree);
  assert.deepEqual(exported.branches, []);
  assert.equal(git(top, "for-each-ref", "refs/heads/pi-fork"), "");
  assert.equal(existsSync(dirname(tree.top)), false);
  assert.deepEqual(worktreeNotes(exported), ["No changes; the worktree is gone."]);
});

test("new, changed and deleted files are committed, and the notes say how to get them", async (t) => {
  const { top, tree } = await fork(t);
  put(tree.top, { "new.txt": "new\n" });
  rmSync(join(tree.top, "a.txt"));
  const exported = await exportWorktree(tree);
  assert.deepEqual(files(top, "pi-fork/call/w"), [".gitignore", "new.txt"]);
  assert.deepEqual(worktreeNotes(exported), [
    `Branch: pi-fork/call/w (from ${tree.base.slice(0, 12)})`,
    "Diff: files 2, lines +1 -1, commits 1",
    "Apply: git merge --squash pi-fork/call/w",
  ]);
  assert.equal(count(top), 1);
});

test("hooks, signing and a missing identity do not stop an export", async (t) => {
  const { top, tree } = await fork(t);
  git(top, "config", "commit.gpgSign", "true");
  git(top, "config", "--unset", "user.name");
  git(top, "config", "--unset", "user.email");
  git(top, "config", "user.useConfigOnly", "true");
  put(top, {
    ".git/hooks/pre-commit": "#!/bin/sh\nexit 1\n",
    ".git/hooks/post-commit": "#!/bin/sh\n",
  });
  execFileSync("chmod", ["+x", join(top, ".git/hooks/pre-commit")]);
  put(tree.top, { "new.txt": "new\n" });
  assert.equal((await exportWorktree(tree)).kept, undefined);
  assert.match(git(top, "log", "-1", "--format=%an", "pi-fork/call/w"), /pi-fork-join/);
});

/**
 * What a fork may do with git in its own worktree, and where the work is afterwards.
 */
const STATES: Record<string, { act: string; branches: string[]; holds: string[] }> = {
  "commits of its own": {
    act: "echo x > x && git add x && git commit -qm x && echo y > y",
    branches: ["w"],
    holds: ["x", "y"],
  },
  "another branch": {
    act: "git checkout -qb mine && echo x > x && git add x && git commit -qm x",
    branches: ["w"],
    holds: ["x"],
  },
  "a detached head": {
    act: "git checkout -q --detach && echo x > x && git add x && git commit -qm x",
    branches: ["w"],
    holds: ["x"],
  },
  "commits on the branch and a return to the base": {
    act: "echo x > x && git add x && git commit -qm x && git checkout -q --detach HEAD~1",
    branches: ["w"],
    holds: ["x"],
  },
  "two lines of work": {
    act:
      "echo x > x && git add x && git commit -qm x && git checkout -q --detach HEAD~1 && " +
      "echo y > y && git add y && git commit -qm y",
    branches: ["w", "w-head"],
    holds: ["y"],
  },
  "its branch deleted": {
    act: "echo x > x && git checkout -q --detach && git branch -qD pi-fork/call/w",
    branches: ["w"],
    holds: ["x"],
  },
  "a lock left by a killed git": {
    act: "echo x > x && touch $(git rev-parse --git-dir)/index.lock",
    branches: ["w"],
    holds: ["x"],
  },
  "its .git file gone": { act: "echo x > x && rm .git", branches: ["w"], holds: ["x"] },
  "a conflict half resolved": {
    act:
      "echo x > a.txt && git commit -qam x && git checkout -qb other HEAD~1 && " +
      "echo y > a.txt && git commit -qam y && (git merge -q pi-fork/call/w || true) && echo z > z",
    branches: ["w"],
    holds: ["z"],
  },
};

for (const [state, { act, branches, holds }] of Object.entries(STATES)) {
  test(`a fork that leaves ${state} loses nothing`, async (t) => {
    const { top, tree } = await fork(t);
    execFileSync("bash", ["-ec", act], { cwd: tree.top, stdio: "pipe" });
    const exported = await exportWorktree(tree);
    assert.equal(exported.kept, undefined, exported.kept?.why);
    assert.deepEqual(
      exported.branches,
      branches.map((name) => `pi-fork/call/${name}`),
    );
    const held = files(top, exported.branches.at(-1)!);
    for (const name of holds) assert.ok(held.includes(name), `${name} in ${held}`);
    assert.equal(count(top), 1);
  });
}

test("a repository made inside the worktree stays where it is, unlocked", async (t) => {
  const { top, tree } = await fork(t);
  repository(join(tree.top, "inner"), { "deep.txt": "deep" });
  const exported = await exportWorktree(tree);
  assert.match(
    worktreeNotes(exported).at(-1)!,
    /^Worktree kept at .*: repositories in it stay there: inner/,
  );
  assert.equal(existsSync(join(tree.top, "inner/deep.txt")), true);
  assert.deepEqual(await recoverWorktrees(top), []);
  assert.doesNotMatch(git(top, "worktree", "list", "--porcelain"), /locked/);
});

test("what git cannot take stays where it is, and the report says why", async (t) => {
  const { top, tree } = await fork(t);
  put(tree.top, { "new.txt": "new\n" });
  git(tree.top, "checkout", "--quiet", "--orphan", "void");
  const exported = await exportWorktree(tree);
  assert.match(worktreeNotes(exported).at(-1)!, /^Worktree kept at /);
  assert.equal(existsSync(join(tree.top, "new.txt")), true);
  assert.equal(count(top), 2);
});

test("a directory the fork removed leaves no registration, and its commits stay", async (t) => {
  const { top, tree } = await fork(t);
  put(tree.top, { x: "x" });
  git(tree.top, "add", "x");
  git(tree.top, "commit", "--quiet", "--message", "x");
  rmSync(tree.top, { recursive: true });
  assert.deepEqual((await exportWorktree(tree)).branches, ["pi-fork/call/w"]);
  assert.equal(count(top), 1);
});

test("a checkout that fails leaves neither worktree nor branch", async (t) => {
  const top = join(scratch(t), "repo");
  repository(top, { "a.txt": "one\n", ".gitattributes": "*.txt filter=broken\n" });
  git(top, "config", "filter.broken.smudge", "false");
  git(top, "config", "filter.broken.required", "true");
  await assert.rejects(createWorktree(top, "call", "w", "/"), /filter/);
  assert.equal(count(top), 1);
  assert.equal(git(top, "for-each-ref", "refs/heads/pi-fork"), "");
});

test("a branch of the same name from an earlier call is not touched", async (t) => {
  const { top, tree } = await fork(t);
  put(tree.top, { x: "first" });
  await exportWorktree(tree);
  const again = await createWorktree(top, "call", "w", "/");
  put(again.top, { x: "second" });
  assert.deepEqual((await exportWorktree(again)).branches, ["pi-fork/call/w-2"]);
  assert.equal(git(top, "show", "pi-fork/call/w:x"), "first");
});

test("eight worktrees made and exported at once work beside another program's", async (t) => {
  const { top } = await fork(t, "first");
  const others =
    "for n in 1 2 3 4 5 6 7 8; do git worktree add -q --detach ../o$n || true; done";
  const other = spawn("bash", ["-c", others], { cwd: top, stdio: "ignore" });
  const done = new Promise((resolve) => other.on("close", resolve));
  const ids = ["1", "2", "3", "4", "5", "6", "7", "8"];
  const trees = await Promise.all(
    ids.map((id) => createWorktree(top, "eight", id, "/")),
  );
  for (const { top: own } of trees) writeFileSync(join(own, "x"), own);
  const exported = await Promise.all(trees.map(exportWorktree));
  await done;
  assert.deepEqual(
    exported.flatMap(({ kept }) => kept ?? []),
    [],
  );
  const branches = exported.map((result) => result.branches[0]);
  assert.deepEqual(
    branches,
    ids.map((id) => `pi-fork/eight/${id}`),
  );
});

test("worktrees of a process that is gone are exported; those of a live one are left", async (t) => {
  const { top, tree } = await fork(t);
  put(tree.top, { x: "left behind" });
  assert.deepEqual(await recoverWorktrees(top), []);
  const lock = join(tree.gitDir, "locked");
  const { pid, host } = thisProcess();
  writeFileSync(
    lock,
    `pi-fork-join pid=${pid} start=1 host=${host} base=${tree.base} branch=${tree.branch}`,
  );
  const [recovered] = await recoverWorktrees(top);
  assert.deepEqual(recovered?.branches, ["pi-fork/call/w"]);
  assert.equal(git(top, "show", "pi-fork/call/w:x"), "left behind");
  assert.equal(count(top), 1);
});

test("a stale worktree whose directory is gone is forgotten with its empty branch", async (t) => {
  const { top, tree } = await fork(t);
  rmSync(dirname(tree.top), { recursive: true });
  const { host } = thisProcess();
  const claim = `pi-fork-join pid=4194305 start=1 host=${host} base=${tree.base} branch=${tree.branch}`;
  writeFileSync(join(tree.gitDir, "locked"), claim);
  await recoverWorktrees(top);
  assert.equal(count(top), 1);
  assert.equal(git(top, "for-each-ref", "refs/heads/pi-fork"), "");
});

test("a process of another machine is never taken for gone", () => {
  assert.equal(isGone({ pid: 4194305, start: "1", host: "elsewhere" }), false);
  assert.equal(isGone({ ...thisProcess(), pid: 4194305 }), true);
  assert.equal(isGone(thisProcess()), false);
});

test("a sweep removes dead reports, and no directory that may hold work", (t) => {
  const [reports, tree] = ["reports", "tree"].map((kind) =>
    join(tmpdir(), `pi-fork-join-${kind}-4194305-1-test`),
  );
  t.after(() => rmSync(tree!, { recursive: true, force: true }));
  put(reports!, { "r.md": "report" });
  put(tree!, { "w/x": "work" });
  const live = makeScratch("reports", "/nowhere", "/nowhere")!;
  t.after(() => rmSync(live, { recursive: true, force: true }));
  sweepScratch();
  assert.deepEqual(
    [reports, tree, live].map((path) => existsSync(path!)),
    [false, true, true],
  );
  rmSync(join(tree!, "w"), { recursive: true });
  sweepScratch();
  assert.equal(existsSync(tree!), false);
});

test("temporary directories lie outside the parent's directory, or there are none", (t) => {
  const inside = makeScratch("reports", tmpdir(), tmpdir());
  assert.equal(inside, undefined);
  const fallback = scratch(t);
  assert.equal(makeScratch("tree", "/", fallback), undefined);
  assert.equal(readdirSync(fallback).length, 0);
});

test("call and fork ids become names git takes", () => {
  assert.equal(refPart("a..b"), "a-b");
  assert.equal(refPart(".hidden.lock"), "hidden");
  assert.equal(refPart("call|fc:1 2"), "call-fc-1-2");
  assert.equal(refPart("..."), "x");
});
