/** Show 6: write forks on real git, through real pi sessions. */
import assert from "node:assert/strict";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, type TestContext, test } from "node:test";
import { FakeModel, type Step, type ToolUse } from "./fake-model.ts";
import { openParent, statuses } from "./harness.ts";
import { git, put, repository, scratch } from "./repository.ts";

const model = new FakeModel();
before(() => model.start());
after(() => model.stop());

function writing(id: string, ...tools: ToolUse[]) {
  return scripted(id, ...(tools.length > 0 ? [{ tools }] : []), {
    text: `REPORT ${id}`,
  });
}

function scripted(id: string, ...steps: Step[]) {
  return { id, task: `work-${id} ${model.script(steps)}`, write: true };
}

const bash = (command: string): ToolUse => ({ name: "bash", args: { command } });
const write = (path: string, content: string): ToolUse => ({
  name: "write",
  args: { path, content },
});

/** What a fork's tools answered, as its last request shows them. */
function answers(id: string): string[] {
  const { messages } = model.about(`work-${id} `).at(-1)!.body;
  return messages.filter((m: any) => m.role === "tool").map((m: any) => m.content);
}

async function parentIn(
  t: TestContext,
  options: { settings?: object; sub?: string } = {},
) {
  const top = join(scratch(t), "repo");
  repository(top, { "a.txt": "committed\n", "sub/b.txt": "committed\n" });
  put(top, { "a.txt": "dirty\n", "new.txt": "untracked\n" });
  const settings = options.settings ?? {};
  return {
    top,
    parent: await openParent(t, model, { cwd: join(top, options.sub ?? ""), settings }),
  };
}

/** Nothing of a fork is left but branches: no worktree, no directory, no lock. */
function assertClean(top: string): void {
  assert.equal(
    git(top, "worktree", "list", "--porcelain").match(/^worktree /gm)?.length,
    1,
  );
  assert.deepEqual(ownScratch(), []);
  assert.equal(git(top, "status", "--porcelain"), " M a.txt\n?? new.txt");
}

const ownScratch = () =>
  readdirSync(tmpdir()).filter((name) =>
    name.startsWith(`pi-fork-join-tree-${process.pid}-`),
  );

const branches = (top: string) =>
  git(top, "for-each-ref", "--format=%(refname:short)", "refs/heads/pi-fork/").split(
    "\n",
  );

for (const prefix of ["shared", "lean"]) {
  test(`${prefix}: eight write forks at once keep their work apart, each on its branch`, async (t) => {
    model.reset();
    const { top, parent } = await parentIn(t, { settings: { prefix } });
    const ids = ["w1", "w2", "w3", "w4", "w5", "w6", "w7", "w8"];
    const edit = {
      path: "a.txt",
      edits: [{ oldText: "committed", newText: "edited" }],
    };
    const meet: Step = { tools: [bash("cat a.txt; ls; pwd")], together: 8 };
    const forks = ids.map((id) => {
      const change = { tools: [write(`${id}.txt`, id), { name: "edit", args: edit }] };
      return scripted(id, meet, change, { text: `REPORT ${id}` });
    });
    const result = await parent.fork({ tasks: forks, maxConcurrency: 8 });
    assert.deepEqual(new Set(statuses(result)), new Set(["ok"]), result.text);
    const places = new Set(ids.map((id) => answers(id)[0]!.trim().split("\n").at(-1)));
    assert.equal(places.size, 8, "each in a directory of its own");
    for (const id of ids) assert.match(answers(id)[0]!, /^committed\na.txt\nsub\n\//);
    const { call } = result.details;
    assert.deepEqual(
      branches(top),
      ids.map((id) => `pi-fork/${call}/${id}`),
    );
    for (const id of ids) {
      const branch = `pi-fork/${call}/${id}`;
      assert.equal(git(top, "show", `${branch}:a.txt`), "edited");
      const changed = git(top, "diff", "--name-only", "main", branch).split("\n");
      assert.deepEqual(changed.toSorted(), ["a.txt", `${id}.txt`]);
      assert.match(
        result.text,
        new RegExp(`Branch: ${branch} .*\nDiff: files 2, .*\nApply: git merge`),
      );
    }
    assert.equal(readFileSync(join(top, "a.txt"), "utf8"), "dirty\n");
    assertClean(top);
  });

  test(`${prefix}: a write fork's absolute parent paths are moved, and all others refused`, async (t) => {
    model.reset();
    const { top, parent } = await parentIn(t, { settings: { prefix } });
    const outside = join(scratch(t), "outside.txt");
    const fork = writing(
      "w",
      { name: "read", args: { path: join(top, "a.txt") } },
      { name: "ls", args: { path: top } },
      write(join(top, "deep/c.txt"), "moved"),
      write(outside, "stray"),
      write("../../../../../../tmp/stray.txt", "stray"),
      bash(`ln -s ${top} link`),
      write("link/through.txt", "moved"),
    );
    const result = await parent.fork({ tasks: [fork] });
    const [read, ls, moved, refused, climbed] = answers("w");
    assert.equal(read, "committed\n");
    assert.doesNotMatch(ls!, /new\.txt/);
    assert.match(moved!, /deep\/c\.txt/);
    for (const answer of [refused, climbed])
      assert.match(answer!, /a write fork stays in/);
    const branch = `pi-fork/${result.details.call}/w`;
    const changed = git(top, "diff", "--name-only", "main", branch).split("\n");
    assert.deepEqual(changed, ["deep/c.txt", "link", "through.txt"]);
    for (const path of [outside, join(top, "deep"), join(top, "through.txt")]) {
      assert.equal(existsSync(path), false, path);
    }
    assertClean(top);
  });

  test(`${prefix}: an unchanged worktree leaves nothing, and a read-only fork none at all`, async (t) => {
    model.reset();
    const { top, parent } = await parentIn(t, { settings: { prefix } });
    const script = model.script([{ text: "REPORT" }]);
    const result = await parent.fork({
      tasks: [writing("w"), { id: "r", task: `x ${script}` }],
    });
    assert.match(
      result.text,
      /## w \[ok\]\nNo changes; the worktree is gone\.\nREPORT w/,
    );
    assert.deepEqual(branches(top), [""]);
    assertClean(top);
  });

  test(`${prefix}: without a repository only the write fork fails, and says why`, async (t) => {
    model.reset();
    const parent = await openParent(t, model, { settings: { prefix } });
    const script = model.script([{ text: "REPORT r" }]);
    const result = await parent.fork({
      tasks: [writing("w"), { id: "r", task: `x ${script}` }],
    });
    assert.deepEqual(statuses(result), ["failed", "ok"]);
    assert.match(
      result.text,
      /## w \[failed\]\nError: a write fork needs a git work tree, and/,
    );
    git(parent.cwd, "init", "--quiet");
    const empty = await parent.fork({ tasks: [writing("w")] });
    assert.match(empty.text, /this repository has none/);
  });
}

test("a write fork works in the parent's sub-directory, also one no commit has", async (t) => {
  model.reset();
  const { top, parent } = await parentIn(t, { sub: "sub/unknown" });
  const result = await parent.fork({ tasks: [writing("w", write("here.txt", "x"))] });
  const branch = `pi-fork/${result.details.call}/w`;
  assert.equal(git(top, "diff", "--name-only", "main", branch), "sub/unknown/here.txt");
});

test("a failed and a timed out write fork keep what they had done", async (t) => {
  model.reset();
  const { top, parent } = await parentIn(t, { settings: { forkTimeoutSeconds: 3 } });
  const first = { tools: [write("x.txt", "kept")] };
  const bad = scripted("bad", first, { status: 400 });
  const slow = scripted("slow", first, { hang: true });
  const result = await parent.fork({ tasks: [bad, slow] });
  assert.deepEqual(statuses(result), ["failed", "timeout"]);
  for (const id of ["bad", "slow"]) {
    assert.equal(
      git(top, "show", `pi-fork/${result.details.call}/${id}:x.txt`),
      "kept",
    );
  }
  assertClean(top);
});

test("guards bind write forks, and see the paths that the model wrote", async (t) => {
  model.reset();
  const guard = join(scratch(t), "guard.ts");
  put(join(guard, ".."), { "guard.ts": GUARD });
  const { top, parent } = await parentIn(t, { settings: { childExtensions: [guard] } });
  const fork = writing("w", write(join(top, "keep/x.txt"), "x"), write("y.txt", "y"));
  const result = await parent.fork({ tasks: [fork] });
  assert.match(answers("w")[0]!, /guard says no/);
  const branch = `pi-fork/${result.details.call}/w`;
  assert.equal(git(top, "diff", "--name-only", "main", branch), "y.txt");
});

const GUARD = `export default (pi) => pi.on("tool_call", (event) => {
  if (!/^\\/.*repo\\/keep/.test(event.input.path ?? "")) return;
  return { block: true, reason: "guard says no" };
});`;
