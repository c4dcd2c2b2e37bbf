/**
 * Show 1: what a fork is sent and what comes back; and all it shares with its parent.
 */
import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { after, before, type TestContext, test } from "node:test";
import type { ExtensionAPI, ExtensionContext } from "@earendil-works/pi-coding-agent";
import { parentRuntime } from "../src/host.ts";
import { FakeModel, type ModelRequest, STYLES, textOf } from "./fake-model.ts";
import { tasks } from "./fixtures.ts";
import {
  openParent,
  outcome,
  type Parent,
  type ParentOptions,
  statuses,
} from "./harness.ts";
import { put, scratch } from "./repository.ts";

const model = new FakeModel();
before(() => model.start());
after(() => model.stop());

const RULE = "RULE: never merge anything";
const PREFIXES = ["shared", "lean"] as const;

/**
 * A conversation with tool results, thinking, a compaction and an edited tool result.
 */
async function longConversation(
  t: TestContext,
  options: ParentOptions,
): Promise<Parent> {
  model.reset();
  const compaction = { keepRecentTokens: 8, reserveTokens: 1000 };
  const parent = await openParent(t, model, {
    rules: RULE,
    pi: { compaction },
    ...options,
  });
  await parent.ask(`first ${lookUp("ancient")}`);
  await parent.ask(`second ${lookUp("kept")}`);
  await parent.session.compact();
  await parent.ask(`third ${lookUp("original")}`);
  const { sessionManager } = parent.session;
  const edited = sessionManager
    .getBranch()
    .findLast(
      (entry) => entry.type === "message" && entry.message.role === "toolResult",
    );
  sessionManager.appendContextEdit(edited!.id, { content: "edited-words" });
  parent.session.refreshContext();
  return parent;
}

/** The words are in the tool's result only, not in the call. */
function lookUp(word: string): string {
  const tools = [{ name: "bash", args: { command: `echo ${word}-$((40 + 2))` } }];
  return model.script([
    { thinking: "let me look", tools },
    { text: "seen", thinking: "so" },
  ]);
}

/**
 * Has the parent work for one more turn and then fork; returns the requests by role.
 */
async function forkOnce(parent: Parent) {
  const secret = [{ name: "bash", args: { command: "echo secret-log" } }];
  const a = model.script([
    { thinking: "secret-thought", tools: secret },
    { text: "REPORT A" },
  ]);
  const b = model.script([{ text: "REPORT B" }]);
  const call = tasks({ alpha: `task-alpha ${a}`, beta: `task-beta ${b}` });
  const look = [{ name: "bash", args: { command: "echo latest-words" } }];
  await parent.ask(
    `fourth ${model.script([
      { thinking: "deep", tools: look },
      {
        text: "status-text",
        tools: [{ name: "fork_join", args: call, id: "the-call" }],
      },
      { text: "joined" },
    ])}`,
  );
  const own = model
    .about("fourth")
    .filter((request) => !request.lastUser.includes('fork "'));
  const [alpha, beta] = ["task-alpha", "task-beta"].map(
    (name) => model.about(name)[0]!,
  );
  return { last: own.at(-2)!, next: own.at(-1)!, alpha: alpha!, beta: beta! };
}

/**
 * The body without cache markers, which move with every request, as the API reads it.
 */
function plain(request: ModelRequest): any {
  assert.equal(JSON.stringify(request.body), request.raw, "parsing keeps every byte");
  if (request.style === "openai-completions") return request.body;
  return JSON.parse(request.raw, (key, value) => {
    if (key === "content" && typeof value === "string")
      return [{ type: "text", text: value }];
    if (value && typeof value === "object") delete value.cache_control;
    return value;
  });
}

function assertContinues(fork: any, parent: any): void {
  const { messages: forkMessages, ...forkRest } = fork;
  const { messages, ...rest } = parent;
  assert.equal(
    JSON.stringify(forkRest),
    JSON.stringify(rest),
    "tools, system and the rest",
  );
  const start = JSON.stringify(messages).slice(0, -1);
  assert.ok(JSON.stringify(forkMessages).startsWith(`${start},`), "messages up to C0");
  assert.equal(forkMessages.length, messages.length + 1, "and one message more");
}

const spoken = (body: any) =>
  body.messages.filter((m: any) => !/system|developer/.test(m.role));

for (const style of STYLES) {
  test(`on ${style} every fork starts as the parent's last request, byte for byte`, async (t) => {
    const parent = await longConversation(t, { style });
    const { last, alpha, beta } = await forkOnce(parent);
    assert.match(last.raw, /SUMMARY/);
    assert.match(last.raw, /edited-words/);
    assert.match(last.raw, /latest-words/);
    assert.match(last.raw, /deep/);
    assert.match(last.raw, /kept-42/);
    assert.doesNotMatch(last.raw, /ancient-42|original-42/);
    for (const fork of [alpha, beta]) assertContinues(plain(fork), plain(last));
    const { forks } = outcome(parent.session).details;
    assert.deepEqual(
      forks.map((fork) => fork.prefix),
      ["shared", "shared"],
    );
  });

  test(`on ${style} a lean fork gets the same conversation under a small prompt`, async (t) => {
    const parent = await longConversation(t, { style, settings: { prefix: "lean" } });
    const { last, alpha } = await forkOnce(parent);
    const [own, others] = [spoken(plain(alpha)), spoken(plain(last))];
    assert.equal(JSON.stringify(own.slice(0, -1)), JSON.stringify(others));
    const names = alpha.body.tools.map((tool: any) => tool.name ?? tool.function.name);
    assert.deepEqual(names.toSorted(), ["bash", "find", "grep", "ls", "read"]);
    assert.doesNotMatch(alpha.raw, /RULE/);
  });

  for (const prefix of PREFIXES) {
    test(`on ${style}, ${prefix}: a fork sees neither call, siblings nor status text`, async (t) => {
      const parent = await longConversation(t, { style, settings: { prefix } });
      const { alpha } = await forkOnce(parent);
      const own = spoken(alpha.body);
      assert.match(textOf(own.at(-1)), /task-alpha/);
      const text = JSON.stringify(own);
      assert.doesNotMatch(text, /task-beta|status-text|the-call|beta|"fork_join"/);
    });

    test(`on ${style}, ${prefix}: the parent goes on with C0, C1 and one result`, async (t) => {
      const parent = await longConversation(t, { style, settings: { prefix } });
      const { last, next } = await forkOnce(parent);
      const [before, then] = [plain(last).messages, plain(next).messages];
      assert.equal(then.length, before.length + 2);
      assert.equal(JSON.stringify(then.slice(0, -2)), JSON.stringify(before));
      const added = JSON.stringify(then.slice(-2));
      assert.match(added, /status-text.*the-call.*REPORT A.*REPORT B/);
      assert.doesNotMatch(next.raw, /secret-log.*REPORT A|secret-thought/);
    });
  }
}

// ---- Keys, prompts, providers, files ------------------------------------------------

const saying = (text: string) => `x ${model.script([{ text }])}`;
const forks = () => model.about("You are fork");
const checks = (result: { details: { forks: readonly { prefix: string }[] } }) =>
  result.details.forks.map(({ prefix }) => prefix);

for (const style of STYLES) {
  test(`on ${style} cache keys and affinity headers name the parent's session`, async (t) => {
    model.reset();
    const compat = { promptCacheKeyMode: "enabled", sendSessionAffinityHeaders: true };
    const parent = await openParent(t, model, { style, model: { compat } });
    await parent.fork(tasks({ a: saying("R"), b: saying("R") }));
    const id = parent.session.sessionId;
    const [own, ...others] = model.requests;
    assert.ok(
      [own!.body.prompt_cache_key, own!.headers["x-session-affinity"]].includes(id),
    );
    for (const { body, headers } of others) {
      assert.equal(body.prompt_cache_key, own!.body.prompt_cache_key);
      assert.equal(headers["x-session-affinity"], own!.headers["x-session-affinity"]);
      assert.equal(headers.session_id, own!.headers.session_id);
    }
  });

  test(`on ${style} a prompt that an extension forces on the parent reaches its forks`, async (t) => {
    model.reset();
    const force = (pi: ExtensionAPI) => {
      pi.on("before_agent_start", () => ({
        systemPrompt: 'FORCED "persona"\nof two lines',
      }));
    };
    const parent = await openParent(t, model, {
      style,
      extensions: [{ name: "f", factory: force }],
    });
    assert.deepEqual(checks(await parent.fork(tasks({ a: saying("R") }))), ["shared"]);
    assert.match(forks()[0]!.raw, /FORCED \\"persona\\"\\nof two lines/);
  });
}

test("a prefix that another extension's edits broke is reported with the place", async (t) => {
  model.reset();
  const edit = (pi: ExtensionAPI) => {
    pi.on("context", ({ messages }) => ({
      messages: messages.map((m) =>
        m.role === "user" ? { ...m, content: "edited" } : m,
      ),
    }));
  };
  const parent = await openParent(t, model, {
    extensions: [{ name: "e", factory: edit }],
  });
  const script = model.script([
    { tools: [{ name: "fork_join", args: tasks({ a: "x" }) }], once: true },
  ]);
  // The edit hides the script's token from the server, so the reply is forced by hand.
  model.always = {
    tools: [{ name: "fork_join", args: tasks({ a: "x" }) }],
    once: true,
  };
  await parent.ask(`go ${script}`);
  model.always = undefined;
  assert.deepEqual(checks(outcome(parent.session)), ["diverged at messages[1]"]);
});

test("a fork that compacts keeps the operator's rules, and its summary is paid for", async (t) => {
  model.reset();
  const compaction = { keepRecentTokens: 20, reserveTokens: 1000 };
  const pi = { compaction };
  const parent = await openParent(t, model, { rules: "OPERATOR RULE", pi });
  await parent.ask(
    `before ${"many words ".repeat(40)} ${model.script([{ text: "noted" }])}`,
  );
  process.env.PI_JOB_ID = "job";
  t.after(() => delete process.env.PI_JOB_ID);
  const bash = [{ name: "bash", args: { command: `echo ${"filler ".repeat(60)}` } }];
  const full = { tools: bash, input: 199_900 };
  const result = await parent.fork(
    tasks({ a: `x ${model.script([full, { text: "AFTER" }])}` }),
  );
  const after = model.requests.find(
    ({ raw, body }) => body.tools && raw.includes("SUMMARY"),
  )!;
  assert.match(after.raw, /OPERATOR RULE/);
  assert.doesNotMatch(after.raw, /many words/);
  const own = parent.session.messages.flatMap((m) =>
    m.role === "assistant" ? [m.usage] : [],
  );
  const all = model.requests.reduce((sum, { billed }) => sum + billed, 0);
  const forked = own.reduce((rest, { totalTokens }) => rest - totalTokens, all);
  const summary = model.requests.find(({ body }) => !body.tools)!;
  assert.equal(summary.headers["x-pidispatch-fork"], `${result.details.call}/a`);
  assert.equal(result.message.usage?.totalTokens, forked);
});

test("nothing a fork's extensions do to its messages reaches the parent's history", async (t) => {
  model.reset();
  const vandal = join(scratch(t), "vandal.ts");
  put(join(vandal, ".."), {
    "vandal.ts": `export default (pi) => pi.on("session_start", (_event, ctx) => {
      for (const entry of ctx.sessionManager.getEntries()) if (entry.message) entry.message.content = "gone";
    });`,
  });
  const parent = await openParent(t, model, {
    settings: { childExtensions: [vandal] },
  });
  await parent.ask(`remember me ${model.script([{ text: "ok" }])}`);
  const before = JSON.stringify(parent.session.sessionManager.getEntries());
  await parent.fork(tasks({ a: saying("R") }));
  assert.ok(
    JSON.stringify(parent.session.sessionManager.getEntries()).startsWith(
      before.slice(0, -1),
    ),
  );
});

test("forks reach a provider that an extension registered", async (t) => {
  model.reset();
  const register = (pi: ExtensionAPI) => {
    pi.registerProvider("extprov", {
      ...{
        baseUrl: `${model.url}/v1`,
        apiKey: "secret-key",
        api: "openai-completions",
      },
      models: [
        {
          ...{
            id: "ext-1",
            name: "ext-1",
            reasoning: false,
            input: ["text"],
            contextWindow: 200_000,
          },
          ...{
            maxTokens: 8000,
            cost: { input: 1, output: 1, cacheRead: 0, cacheWrite: 0 },
          },
        },
      ],
    });
  };
  const parent = await openParent(t, model, {
    extensions: [{ name: "p", factory: register }],
  });
  await parent.session.setModel(
    parent.session.modelRuntime.getModel("extprov", "ext-1")!,
  );
  assert.deepEqual(statuses(await parent.fork(tasks({ a: saying("R") }))), ["ok"]);
  assert.equal(forks()[0]!.headers.authorization, "Bearer secret-key");
});

test("without pi's private runtime a fork's is rebuilt, or the failure names the model", async (t) => {
  const parent = await openParent(t, model);
  const { modelRuntime, model: own } = parent.session;
  const facade = {
    getRegisteredProviderIds: () => [],
    getApiKeyForProvider: async () => "carried-key",
  } as unknown as ExtensionContext["modelRegistry"];
  const rebuilt = await parentRuntime(facade, own!);
  assert.notEqual(rebuilt, modelRuntime);
  assert.equal((await rebuilt.getAuth(own!.provider))?.auth.apiKey, "carried-key");
  const unknown = { ...own!, id: "nowhere" };
  await assert.rejects(
    parentRuntime(facade, unknown),
    /does not know fakeoai\/nowhere/,
  );
});

test("a report above its cap is whole in a file outside the cwd until the session ends", async (t) => {
  const parent = await openParent(t, model, { settings: { reportMaxBytes: 300 } });
  const long = "long report ".repeat(100).trim();
  const { text } = await parent.fork(tasks({ a: saying(long) }));
  const path = /the whole report is in (\S+)\]/.exec(text)![1]!;
  assert.equal(readFileSync(path, "utf8"), long);
  assert.ok(!path.startsWith(parent.cwd));
  await parent.session.extensionRunner.emit({
    type: "session_shutdown",
    reason: "quit",
  });
  assert.equal(existsSync(path), false);
});

test("two calls in one message run in turn, and the second's forks see no first report", async (t) => {
  model.reset();
  const parent = await openParent(t, model);
  const call = (name: string) => ({
    name: "fork_join",
    args: tasks({ [name]: saying(`REPORT ${name}`) }),
  });
  await parent.ask(
    `go ${model.script([{ tools: [call("one"), call("two")] }, { text: "end" }])}`,
  );
  const [first, second] = forks();
  assert.match(second!.raw, /fork \\"two\\"/);
  assert.doesNotMatch(second!.raw, /REPORT one/);
  assert.equal(second!.body.messages.length, first!.body.messages.length);
});

test("a later call's forks see earlier reports as the parent does", async (t) => {
  model.reset();
  const parent = await openParent(t, model);
  await parent.fork(tasks({ a: saying("EARLIER REPORT") }));
  await parent.fork(tasks({ b: saying("R") }));
  assert.match(forks().at(-1)!.raw, /EARLIER REPORT/);
  assert.deepEqual(checks(outcome(parent.session)), ["shared"]);
});

for (const style of STYLES) {
  test(`on ${style} with native tool changes a changed loadout stays shared`, async (t) => {
    model.reset();
    const compat = {
      supportsMidConvoSystemMessages: true,
      supportsMidConvoToolChanges: true,
      supportsMidConvoToolAdditions: true,
    };
    const parent = await openParent(t, model, { style, model: { compat } });
    await parent.ask(`first ${model.script([{ text: "ok" }])}`);
    const { session } = parent;
    session.setActiveToolsByName([...session.getActiveToolNames(), "grep"]);
    await parent.ask(`second ${model.script([{ text: "ok" }])}`);
    const { last, alpha } = await forkOnce(parent);
    assert.ok(
      last.body.messages.slice(1).some((m: any) => /system|developer/.test(m.role)),
    );
    assertContinues(plain(alpha), plain(last));
    assert.deepEqual(checks(outcome(session)), ["shared", "shared"]);
  });
}
