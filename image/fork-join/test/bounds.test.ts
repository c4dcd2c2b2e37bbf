/** Shows 5, 7 and 8: what forks may do, which calls are refused, and the settings. */
import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, type TestContext, test } from "node:test";
import {
  type ExtensionAPI,
  type SessionManager,
  SettingsManager,
} from "@earendil-works/pi-coding-agent";
import { FakeModel, type ToolUse } from "./fake-model.ts";
import { tasks } from "./fixtures.ts";
import { openParent, outcome, statuses } from "./harness.ts";
import { put, repository, scratch } from "./repository.ts";

const model = new FakeModel();
before(() => model.start());
after(() => model.stop());
const PREFIXES = ["shared", "lean"] as const;

/** A task that calls `tools` all at once and then reports. */
function using(...tools: ToolUse[]): string {
  return `use-tools ${model.script([{ tools }, { text: "REPORT" }])}`;
}

/**
 * What the tools of the last `using` fork answered, as its second request shows them.
 */
function answers(): string[] {
  const request = model.about("use-tools").at(-1)!;
  const results = request.body.messages.filter(
    (message: any) => message.role === "tool",
  );
  return results.map((message: any) => message.content);
}

const bash = (command: string): ToolUse => ({ name: "bash", args: { command } });

for (const prefix of PREFIXES) {
  const settings = { prefix };

  test(`${prefix}: a read-only fork sees the dirty tree and can run every reading tool`, async (t) => {
    model.reset();
    const cwd = join(scratch(t), "repo");
    repository(cwd, { "a.txt": "committed" });
    put(cwd, { "a.txt": "dirty words", "new.txt": "untracked" });
    const parent = await openParent(t, model, { cwd, settings });
    const read = { name: "read", args: { path: "a.txt" } };
    const ls = { name: "ls", args: {} };
    await parent.fork(tasks({ a: using(read, ls, bash("cat new.txt; pwd")) }));
    const [text, listing, shell] = answers();
    assert.match(text!, /dirty words/);
    assert.match(listing!, /a\.txt\nnew\.txt/);
    assert.match(shell!, new RegExp(`untracked.*${cwd}`, "s"));
  });

  test(`${prefix}: a read-only fork cannot edit or write by any name`, async (t) => {
    model.reset();
    const parent = await openParent(t, model, { settings });
    put(parent.cwd, { "a.txt": "old" });
    const write = { path: "a.txt", content: "new" };
    const edit = { path: "a.txt", edits: [{ oldText: "old", newText: "new" }] };
    const names = [
      "write",
      "Write",
      "functions.write",
      "write_file",
      "apply_patch",
      "edit",
      "Edit",
    ];
    const calls = names.map((name) => ({
      name,
      args: /edit/i.test(name) ? edit : write,
    }));
    await parent.fork(tasks({ a: using(...calls) }));
    assert.equal(answers().length, names.length);
    for (const answer of answers())
      assert.match(answer, /is off: this fork is read-only|not found/);
    assert.equal(readFileSync(join(parent.cwd, "a.txt"), "utf8"), "old");
  });

  test(`${prefix}: a fork cannot fork`, async (t) => {
    model.reset();
    const parent = await openParent(t, model, { settings });
    const nested = { name: "fork_join", args: tasks({ inner: "never" }) };
    await parent.fork(tasks({ a: using(nested) }));
    assert.match(answers()[0]!, /a fork cannot fork|fork_join not found/);
    assert.equal(model.about("never").length, 0);
  });

  test(`${prefix}: a fork gains no tool that its parent lacks`, async (t) => {
    model.reset();
    const cwd = join(scratch(t), "repo");
    repository(cwd, { "a.txt": "old" });
    const parent = await openParent(t, model, {
      cwd,
      settings,
      tools: ["read", "fork_join"],
    });
    await parent.fork(tasks({ a: using(bash("echo ran"), { name: "ls", args: {} }) }));
    const [shell, listing] = answers();
    assert.match(shell!, /bash (is off|not found)/i);
    assert.match(listing!, /a\.txt/, "ls comes with read");
    const denied = await parent.fork({ tasks: [{ id: "w", task: "x", write: true }] });
    assert.match(
      denied.text,
      /a write fork needs edit or write.*the main session may not use it/,
    );
  });

  test(`${prefix}: a tool excluded by name stays excluded in forks`, async (t) => {
    model.reset();
    const excludeTools = ["ls", "bash"];
    const parent = await openParent(t, model, { settings, excludeTools });
    await parent.fork(tasks({ a: using(bash("echo ran"), { name: "ls", args: {} }) }));
    for (const answer of answers()) assert.match(answer, /is off|not found/);
  });

  test(`${prefix}: a guard named in childExtensions blocks in forks what it blocks in the parent`, async (t) => {
    model.reset();
    const guard = join(scratch(t), "guard.ts");
    put(join(guard, ".."), { "guard.ts": GUARD });
    const childExtensions = [guard];
    const parent = await openParent(t, model, {
      settings: { prefix, childExtensions },
      extensionPaths: [guard],
    });
    await parent.fork(
      tasks({ a: using(bash("echo forbidden-word"), bash("echo fine")) }),
    );
    assert.deepEqual(
      answers().map((text) => text.trim()),
      ["guard says no", "fine"],
    );
  });

  test(`${prefix}: a fork does not start without a guard it should have`, async (t) => {
    model.reset();
    const childExtensions = ["/nowhere/guard.ts"];
    const parent = await openParent(t, model, {
      settings: { prefix, childExtensions },
    });
    const result = await parent.fork(tasks({ a: "never-started" }));
    assert.match(
      result.text,
      /a fork does not start without its childExtensions: \/nowhere/,
    );
    assert.equal(
      model.about("never-started").filter((r) => r.lastUser.startsWith("You are"))
        .length,
      0,
    );
  });

  test(`${prefix}: a parent's own bash is not replaced by pi's plain one in a fork`, async (t) => {
    model.reset();
    const extensions = [{ name: "sandbox", factory: sandboxedBash }];
    const parent = await openParent(t, model, { settings, extensions });
    await parent.fork(tasks({ a: using(bash("echo plain")) }));
    assert.match(answers()[0]!, /bash is off: .*childExtensions|bash not found/);
  });
}

const GUARD = `export default (pi) => pi.on("tool_call", (event) => {
  if (event.toolName !== "bash" || !event.input.command.includes("forbidden-word")) return;
  return { block: true, reason: "guard says no" };
});`;

function sandboxedBash(pi: ExtensionAPI): void {
  pi.registerTool({
    ...{ name: "bash", label: "bash", description: "a sandboxed bash" },
    parameters: {
      type: "object",
      properties: { command: { type: "string" } },
    } as never,
    execute: async () => ({
      content: [{ type: "text", text: "sandboxed" }],
      details: {},
    }),
  });
}

test("leanChildren false loads the agent directory's extensions, and still no fork forks", async (t) => {
  model.reset();
  const parent = await openParent(t, model, { settings: { leanChildren: false } });
  const agentDir = process.env.PI_CODING_AGENT_DIR!;
  const source = join(import.meta.dirname, "..", "src", "index.ts");
  put(join(agentDir, "extensions"), {
    "guard.ts": GUARD,
    "fj.ts": `export { default } from "${source}";`,
  });
  const nested = { name: "fork_join", args: tasks({ inner: "never" }) };
  await parent.fork(tasks({ a: using(nested, bash("echo forbidden-word")) }));
  assert.match(answers()[0]!, /a fork cannot fork/);
  assert.match(answers()[1]!, /guard says no/);
});

// ---- Show 7 -------------------------------------------------------------------------

/** Has the model call fork_join under `ids`, all in one message. */
async function callUnder(
  t: TestContext,
  ids: string[],
  extension?: (pi: ExtensionAPI) => void,
) {
  model.reset();
  const extensions = extension ? [{ name: "meddler", factory: extension }] : [];
  // pi's OpenAI adapter would merge two calls of one id into one.
  const parent = await openParent(t, model, {
    style: "anthropic-messages",
    extensions,
  });
  const args = tasks({ a: `forked ${model.script([{ text: "REPORT" }])}` });
  const turn = {
    tools: ids.map((id) => ({ name: "fork_join", args, id })),
    once: true as const,
  };
  await parent.ask(`go ${model.script([turn, { text: "end" }])}`);
  return { parent, turn, result: outcome(parent.session) };
}

const forkRequests = () =>
  model.about("forked").filter((r) => r.lastUser.startsWith("You are"));

test("a call whose message is no longer on the branch fails and starts nothing", async (t) => {
  const leave = (pi: ExtensionAPI) => {
    pi.on("tool_call", (_event, ctx) => {
      const manager = ctx.sessionManager as SessionManager;
      const user = manager
        .getBranch()
        .find((e) => e.type === "message" && e.message.role === "user");
      manager.branch(user!.id);
    });
  };
  const { result } = await callUnder(t, ["mine"], leave);
  assert.equal(result.isError, true);
  assert.match(result.text, /cannot locate its own call: "mine" is not in the last/);
  assert.equal(forkRequests().length, 0);
});

test("a call whose id stands twice in the last message fails and starts nothing", async (t) => {
  const { result } = await callUnder(t, ["twin", "twin"]);
  assert.equal(result.isError, true);
  assert.match(result.text, /"twin" stands more than once/);
  assert.equal(forkRequests().length, 0);
});

test("an id that an earlier turn used works again, under a name of its own", async (t) => {
  const { parent, turn } = await callUnder(t, ["call_0"]);
  await parent.ask(`again ${model.script([{ ...turn }, { text: "end" }])}`);
  const result = outcome(parent.session);
  assert.deepEqual(statuses(result), ["ok"]);
  assert.match(result.details.call, /^call_0-\d+$/);
});

test("a call with wrong arguments names every fault and starts nothing", async (t) => {
  const parent = await openParent(t, model);
  const twice = [
    { id: "a", task: "x" },
    { id: "a", task: " " },
    { id: "../b", task: "x" },
  ];
  const result = await parent.fork({ tasks: twice, maxConcurrency: 9 });
  assert.equal(result.isError, true);
  assert.match(result.text, /tasks\[1\].task is blank/);
  assert.match(result.text, /tasks\[1\].id "a" is not unique/);
  assert.match(result.text, /tasks\[2\].id "\.\.\/b" must match/);
  assert.match(result.text, /maxConcurrency must be a whole number from 1 to 8, not 9/);
  const many = Array.from({ length: 17 }, (_, n) => ({ id: `t${n}`, task: "x" }));
  assert.match(
    (await parent.fork({ tasks: many })).text,
    /tasks must be 1 to 16, not 17/,
  );
  assert.match((await parent.fork({ tasks: [] })).text, /tasks must be 1 to 16, not 0/);
});

// ---- Show 8 -------------------------------------------------------------------------

/** How many of five forks ran at once with these settings files. */
async function peakWith(
  t: TestContext,
  global: object,
  project: object,
  projectTrusted: boolean,
) {
  model.reset();
  const home = scratch(t);
  const cwd = join(home, "work");
  const file = (value: object) =>
    JSON.stringify({ "pi-fork-join": value, retry: { enabled: false } });
  put(home, {
    "global/settings.json": file(global),
    "work/.pi/settings.json": file(project),
  });
  mkdirSync(cwd, { recursive: true });
  const settingsManager = SettingsManager.create(cwd, join(home, "global"), {
    projectTrusted,
  });
  const parent = await openParent(t, model, { cwd, settingsManager });
  const script = model.script([{ text: "done", delayMs: 60 }]);
  const work = ["a", "b", "c", "d", "e"].map((id) => [id, `work ${script}`]);
  const result = await parent.fork(tasks(Object.fromEntries(work)));
  return {
    result,
    peak: Math.max(...model.about("You are").map(({ inFlight }) => inFlight)),
  };
}

test("global settings hold, a trusted project's win, an untrusted project's are ignored", async (t) => {
  const [global, project] = [
    { defaultMaxConcurrency: 3 },
    { defaultMaxConcurrency: 2 },
  ];
  assert.equal((await peakWith(t, global, {}, true)).peak, 3);
  assert.equal((await peakWith(t, global, project, true)).peak, 2);
  assert.equal((await peakWith(t, global, project, false)).peak, 3);
});

test("settings out of range and unknown ones are all named, and no fork starts", async (t) => {
  const wrong = { defaultMaxConcurrency: 9, prefix: "none", costFooter: 1, speed: 2 };
  const { result } = await peakWith(t, wrong, {}, true);
  assert.equal(result.isError, true);
  assert.match(
    result.text,
    /defaultMaxConcurrency must be a whole number from 1 to 8, not 9/,
  );
  assert.match(result.text, /prefix must be "shared" or "lean", not "none"/);
  assert.match(result.text, /costFooter must be true or false, not 1/);
  assert.match(result.text, /pi-fork-join.speed is not a setting/);
});
