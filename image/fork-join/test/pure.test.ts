/** The pure modules, without pi or git. */
import assert from "node:assert/strict";
import { mkdirSync, symlinkSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import type { Api, AssistantMessage, Model, Usage } from "@earendil-works/pi-ai";
import type { SessionEntry } from "@earendil-works/pi-coding-agent";
import { entriesBeforeCall, LocateError } from "../src/locate.ts";
import { placePath } from "../src/place.ts";
import { missingWriteTools, type ParentTools, toolPolicy } from "../src/policy.ts";
import { runPool, Slots } from "../src/pool.ts";
import {
  affinityHeaders,
  comparePayloads,
  countSystemMessages,
  forcedPrompt,
  keepSystemMessages,
  replayPrompt,
  routePayload,
} from "../src/prefix.ts";
import { callTag, processState } from "../src/process.ts";
import {
  assemble,
  clip,
  judge,
  lastReply,
  noUsage,
  share,
  sumUsage,
  tally,
} from "../src/report.ts";
import { forkMessage, readRequest, RequestError } from "../src/request.ts";
import { DEFAULTS, readSettings, SettingsError } from "../src/settings.ts";
import { scratch } from "./repository.ts";

// ---- locate -------------------------------------------------------------------------

let entryIds = 0;
function entry(message: object): SessionEntry {
  const id = `e${entryIds++}`;
  return {
    type: "message",
    id,
    parentId: null,
    timestamp: "",
    message,
  } as unknown as SessionEntry;
}

const user = (text: string) => entry({ role: "user", content: text });
const result = (id: string) =>
  entry({ role: "toolResult", toolCallId: id, content: [] });
const calls = (...ids: string[]) =>
  entry({
    role: "assistant",
    content: ids.map((id) => ({ type: "toolCall", id, name: "x" })),
  });

test("the base is what stood before the message with the call, siblings' results excluded", () => {
  const before = [user("a"), calls("c1"), result("c1"), user("b")];
  const branch = [...before, calls("s1", "c2"), result("s1")];
  assert.deepEqual(entriesBeforeCall(branch, "c2"), before);
});

test("an id that only an earlier message has is not the running call", () => {
  const branch = [user("a"), calls("c1"), result("c1"), calls("c2")];
  assert.throws(() => entriesBeforeCall(branch, "c1"), LocateError);
});

test("an id reused from an earlier message is no ambiguity; twice in the last one is", () => {
  const branch = [user("a"), calls("c1"), result("c1"), calls("c1")];
  assert.equal(entriesBeforeCall(branch, "c1").length, 3);
  assert.throws(
    () => entriesBeforeCall([user("a"), calls("c1", "c1")], "c1"),
    /more than once/,
  );
});

test("a branch without any reply has no call to find", () => {
  assert.throws(() => entriesBeforeCall([user("a")], "c1"), LocateError);
  assert.deepEqual(entriesBeforeCall([calls("c1")], "c1"), []);
});

// ---- policy -------------------------------------------------------------------------

const ALL = ["read", "bash", "edit", "write", "grep", "find", "ls", "powershell"];
function parent(
  active: string[],
  registered = ALL,
  replaced: Record<string, string> = {},
): ParentTools {
  return {
    active,
    registered: registered.map((name) => ({ name, replacedBy: replaced[name] })),
  };
}
const executable = (
  kind: "read-only" | "write",
  tools: ParentTools,
  own: string[] = [],
) => toolPolicy(kind, tools, new Set(own)).executable;

test("a fork of an ordinary session gets the documented set of its kind", () => {
  const tools = parent(["read", "bash", "edit", "write", "fork_join"]);
  assert.deepEqual(executable("read-only", tools), [
    "read",
    "bash",
    "grep",
    "find",
    "ls",
  ]);
  const all = ["read", "bash", "grep", "find", "ls", "edit", "write"];
  assert.deepEqual(executable("write", tools), all);
});

test("a fork never gets bash, edit, write or read that the parent lacks", () => {
  assert.deepEqual(executable("write", parent(["read"])), [
    "read",
    "grep",
    "find",
    "ls",
  ]);
  assert.deepEqual(executable("write", parent(["bash", "edit"])), ["bash", "edit"]);
  assert.deepEqual(executable("read-only", parent(["grep"])), ["grep"]);
});

test("grep, find and ls come with read unless they were excluded by name", () => {
  const allowed = parent(["read", "bash"], ["read", "bash", "fork_join"]);
  assert.deepEqual(
    executable("read-only", { ...allowed, active: ["read", "bash", "fork_join"] }),
    [...["read", "bash", "grep", "find", "ls"]],
  );
  const excluded = parent(
    ["read", "bash"],
    ALL.filter((name) => name !== "find"),
  );
  assert.deepEqual(executable("read-only", excluded), ["read", "bash", "grep", "ls"]);
});

test("a tool an extension replaced runs only in forks that load a replacement too", () => {
  const tools = parent(["read", "bash"], ALL, { bash: "/sandbox.ts" });
  assert.deepEqual(executable("read-only", tools), ["read", "grep", "find", "ls"]);
  assert.ok(executable("read-only", tools, ["bash"]).includes("bash"));
  assert.match(
    toolPolicy("read-only", tools, new Set()).refusal("bash"),
    /\/sandbox\.ts.*childExtensions/,
  );
});

test("every refusal says why", () => {
  const policy = toolPolicy("read-only", parent(["read"]), new Set());
  assert.match(policy.refusal("edit"), /this fork is read-only/);
  assert.match(policy.refusal("fork_join"), /a fork cannot fork/);
  assert.match(policy.refusal("bash"), /main session may not/);
  assert.match(policy.refusal("mcp__x__y"), /off in forks/);
});

test("a write fork needs edit or write", () => {
  const policy = (active: string[]) => toolPolicy("write", parent(active), new Set());
  assert.equal(missingWriteTools(policy(["read", "edit"])), undefined);
  assert.match(missingWriteTools(policy(["read", "bash"]))!, /needs edit or write/);
});

// ---- pool ---------------------------------------------------------------------------

test("results come in input order whatever order the items end in", async () => {
  const signal = new AbortController().signal;
  const options = { concurrency: 3, slots: new Slots(8), staggerMs: 0, signal };
  const run = async (n: number) => {
    await new Promise((done) => setTimeout(done, 12 - 4 * n));
    return n * 10;
  };
  assert.deepEqual(await runPool([1, 2, 3], options, run, () => -1), [10, 20, 30]);
});

test("staggered items start at least so far apart, the first one at once", async () => {
  const signal = new AbortController().signal;
  const options = { concurrency: 3, slots: new Slots(8), staggerMs: 20, signal };
  const started = performance.now();
  const at = async () => performance.now() - started;
  const starts = await runPool([1, 2, 3], options, at, () => -1);
  for (const n of [1, 2]) assert.ok(starts[n]! >= 20 * n - 1, `${starts}`);
  assert.ok(starts[0]! < starts[1]!);
});

test("an abort skips what waits, also for a slot another call holds", async () => {
  const control = new AbortController();
  const slots = new Slots(1);
  const release = await slots.acquire(control.signal);
  const options = { concurrency: 2, slots, staggerMs: 0, signal: control.signal };
  const pool = runPool(
    ["a", "b"],
    options,
    async (item) => item,
    (item) => `skipped ${item}`,
  );
  control.abort();
  assert.deepEqual(await pool, ["skipped a", "skipped b"]);
  release?.();
  release?.();
  const fresh = new AbortController().signal;
  assert.ok(await slots.acquire(fresh), "the slot is free again, once");
  const second = slots.acquire(fresh);
  assert.equal(await Promise.race([second, Promise.resolve("waiting")]), "waiting");
});

// ---- report -------------------------------------------------------------------------

function reply(stopReason: string, text = "", more: object = {}): AssistantMessage {
  const content = text ? [{ type: "text", text }] : [];
  return {
    role: "assistant",
    stopReason,
    content,
    usage: noUsage(),
    ...more,
  } as AssistantMessage;
}

test("the status follows the last reply, the stop and what was thrown", () => {
  assert.deepEqual(judge(reply("stop", "R"), undefined), { status: "ok", report: "R" });
  assert.equal(judge(reply("stop", " "), undefined).error, "empty report");
  assert.equal(judge(reply("length", "half"), undefined).status, "failed");
  assert.equal(judge(reply("length", "half"), undefined).report, "half");
  assert.equal(judge(reply("error", "", { errorMessage: "E" }), undefined).error, "E");
  assert.equal(judge(reply("toolUse"), undefined).status, "failed");
  assert.equal(judge(reply("aborted", "part"), "cancelled").status, "cancelled");
  assert.equal(judge(reply("aborted", "part"), "timeout").status, "timeout");
  assert.equal(judge(reply("aborted"), undefined).status, "failed");
  assert.equal(judge(reply("toolUse"), "timeout").status, "timeout");
  assert.equal(judge(reply("stop", "R"), "cancelled").status, "ok");
  assert.equal(judge(undefined, undefined, "boom").error, "boom");
  assert.equal(judge(undefined, "cancelled").status, "cancelled");
});

function usage(input: number, total: number): Usage {
  const cost = { input: total, output: 0, cacheRead: 0, cacheWrite: 0, total };
  return { ...noUsage(), input, totalTokens: input, cost };
}

test("usage counts replies, tools that called models, summaries and warming, once each", () => {
  const fresh = [
    entry(reply("toolUse", "", { usage: usage(1, 0.1) })),
    entry({ role: "toolResult", toolCallId: "x", content: [], usage: usage(10, 1) }),
    { type: "compaction", usage: usage(100, 10) },
    { type: "usage", usage: usage(1000, 100) },
    { type: "custom", data: {} },
    entry(reply("stop", "R", { usage: usage(10_000, 1000) })),
  ] as unknown as SessionEntry[];
  const { usage: sum, turns } = tally(fresh);
  assert.equal(sum.input, 11_111);
  assert.equal(sum.totalTokens, 11_111);
  assert.ok(
    Math.abs(sum.cost.total - 1111.1) < 1e-9 &&
      Math.abs(sum.cost.input - 1111.1) < 1e-9,
  );
  assert.equal(turns, 2);
  assert.equal(lastReply(fresh)?.stopReason, "stop");
});

test("optional usage fields are summed when any part has them", () => {
  const parts = [
    { ...noUsage(), cacheWrite1h: 2 },
    noUsage(),
    { ...noUsage(), reasoning: 3 },
  ];
  const sum = sumUsage(parts);
  assert.deepEqual([sum.cacheWrite1h, sum.reasoning], [2, 3]);
});

const fork = (id: string, report: string) => ({
  id,
  status: "ok" as const,
  report,
  notes: [],
});
const CAPS = { reportMaxBytes: 16_384, totalMaxBytes: 51_200 };

test("a long report is cut at its cap and the whole one is elsewhere", () => {
  const spilled: string[] = [];
  const spill = (id: string, text: string) => `/tmp/${id}-${spilled.push(text)}`;
  const text = assemble(
    [fork("a", "x".repeat(20_000)), fork("b", "short")],
    CAPS,
    spill,
  );
  assert.match(
    text,
    /x{16384}\n\[cut at 16384 of 20000 bytes; the whole report is in \/tmp\/a-1\]/,
  );
  assert.match(text, /\n\n## b \[ok\]\nshort$/);
  assert.deepEqual(spilled, ["x".repeat(20_000)]);
});

test("the whole text stays within its cap, and short reports are never cut for long ones", () => {
  const forks = [
    fork("s", "short"),
    ..."abcdefg".split("").map((id) => fork(id, "y".repeat(16_000))),
  ];
  const text = assemble(
    forks,
    CAPS,
    (id) => `/tmp/pi-fork-join-reports-0123456789/${id}.md`,
  );
  assert.ok(
    Buffer.byteLength(text) <= CAPS.totalMaxBytes,
    `${Buffer.byteLength(text)}`,
  );
  assert.ok(Buffer.byteLength(text) > 0.9 * CAPS.totalMaxBytes);
  assert.match(text, /## s \[ok\]\nshort\n/);
});

test("caps of 0 cut nothing", () => {
  const spill = () => assert.fail("nothing to spill");
  const text = assemble(
    [fork("a", "x".repeat(99_999))],
    { reportMaxBytes: 0, totalMaxBytes: 0 },
    spill,
  );
  assert.ok(text.endsWith("x".repeat(99_999)));
});

test("a cut never splits a character, and shares add up", () => {
  assert.equal(clip("aé€", 3), "aé");
  assert.equal(clip("aé€", 5), "aé");
  assert.deepEqual(share(100, [10, 90, 90]), [10, 45, 45]);
  assert.deepEqual(share(Infinity, [10, 90]), [10, 90]);
});

// ---- settings and request -----------------------------------------------------------

test("settings have defaults, and limits are inclusive", () => {
  assert.deepEqual(readSettings(undefined), DEFAULTS);
  assert.equal(readSettings({ defaultMaxConcurrency: 8 }).defaultMaxConcurrency, 8);
  assert.equal(
    readSettings({ totalMaxBytes: 0, forkTimeoutSeconds: 0.5 }).totalMaxBytes,
    0,
  );
  assert.equal(readSettings({ prefix: "lean" }).costFooter, true);
});

test("every wrong setting is named at once", () => {
  const wrong = {
    defaultMaxConcurrency: 0,
    leanChildren: "yes",
    childExtensions: [""],
    x: 1,
  };
  assert.throws(
    () => readSettings(wrong),
    (error: Error) => {
      assert.ok(error instanceof SettingsError);
      for (const key of Object.keys(wrong))
        assert.ok(error.message.includes(`pi-fork-join.${key}`), key);
      return true;
    },
  );
  for (const value of [null, [], "lean", 3])
    assert.throws(() => readSettings(value), SettingsError);
  for (const key of ["constructor", "__proto__x"])
    assert.throws(() => readSettings({ [key]: 1 }));
});

test("a request takes 1 to 16 tasks of unique ids and 1 to 8 at once", () => {
  const task = { id: "a", task: "x" };
  const request = readRequest(
    { tasks: [task, { ...task, id: "b", write: true }] },
    DEFAULTS,
  );
  assert.deepEqual(
    request.tasks.map(({ kind }) => kind),
    ["read-only", "write"],
  );
  assert.equal(request.concurrency, 4);
  for (const maxConcurrency of [0, 9, 2.5, NaN]) {
    assert.throws(
      () => readRequest({ tasks: [task], maxConcurrency }, DEFAULTS),
      /from 1 to 8/,
    );
  }
  for (const id of ["", ".a", "a b", "a/b", "x".repeat(65)]) {
    assert.throws(
      () => readRequest({ tasks: [{ ...task, id }] }, DEFAULTS),
      RequestError,
    );
  }
});

test("a fork's message holds its task, its bounds and the report contract, in that order", () => {
  const policy = toolPolicy(
    "write",
    parent(["read", "bash", "edit", "write"]),
    new Set(),
  );
  const task = { id: "w", task: "DO THIS", kind: "write" as const };
  const worktree = { parentTop: "/repo", base: "0123456789abcdef" };
  const text = forkMessage(task, { cwd: "/tmp/w", worktree }, policy);
  assert.match(
    text,
    /DO THIS[^]*edit, write[^]*\/tmp\/w[^]*0123456789ab[^]*\/repo[^]*Result[^]*Evidence[^]*Risks[^]*Open points/,
  );
});

test("calls of one id get different tags, and any id makes a plain one", () => {
  processState().tags.clear();
  assert.deepEqual([callTag("call_0"), callTag("call_0")], ["call_0", "call_0-2"]);
  assert.equal(callTag("call_A|fc_B"), "call_A");
  assert.match(callTag("ü/../x"), /^[\w-]+$/);
  assert.equal(callTag(`call_${"x".repeat(99)}`).length, 40);
});

// ---- prefix -------------------------------------------------------------------------

test("system messages a fork adds are dropped, those of the shared part stay in place", () => {
  const messages = ["system", "user", "system", "user", "system", "user"].map(
    (role) => ({ role }),
  );
  assert.equal(countSystemMessages(messages), 3);
  const kept = keepSystemMessages(messages, 2).map(({ role }) => role);
  assert.deepEqual(kept, ["system", "user", "system", "user", "user"]);
  assert.equal(countSystemMessages(keepSystemMessages(messages, 0)), 1);
});

test("a replayed prompt gives each section as its option, and needs a preamble", () => {
  const sections = { preamble: "P", rules: "<rules>\n- a\n</rules>", odd: "plain" };
  const messages = [
    { role: "system", content: "", sections, timestamp: 0 },
    {
      role: "system",
      content: "",
      sections: { odd: null, cwd: "<cwd>\n/x\n</cwd>" },
      timestamp: 1,
    },
  ];
  assert.deepEqual(replayPrompt(messages), {
    customPrompt: "P",
    sections: { rules: "- a", cwd: "/x" },
  });
  assert.equal(replayPrompt([{ role: "user" }]), undefined);
});

test("a forced prompt is one that was sent and is not in the transcript", () => {
  const payload = { messages: [{ role: "system", content: 'forced "x"\n' }] };
  assert.equal(forcedPrompt('forced "x"\n', "replayed", payload), 'forced "x"\n');
  assert.equal(forcedPrompt("replayed", "replayed", payload), undefined);
  assert.equal(forcedPrompt("changed since", "replayed", payload), undefined);
  assert.equal(forcedPrompt("x", "y", undefined), undefined);
});

const BODY = {
  model: "m",
  tools: [{ name: "a" }],
  system: [{ type: "text", text: "S", cache_control: {} }],
  messages: [
    { role: "user", content: "one" },
    {
      role: "user",
      content: [{ type: "tool_result", content: "two", cache_control: {} }],
    },
  ],
  max_tokens: 5,
};
const grown = (more: object = {}) => ({
  ...structuredClone(BODY),
  messages: [
    { role: "user", content: [{ type: "text", text: "one" }] },
    { role: "user", content: [{ type: "tool_result", content: "two" }] },
    { role: "user", content: "task" },
  ],
  ...more,
});

test("a body that goes on where the parent's ended is shared, markers and limits aside", () => {
  assert.equal(
    comparePayloads(BODY, grown({ max_tokens: 4, prompt_cache_key: "k" })),
    "shared",
  );
});

test("a body that left the parent's says where", () => {
  assert.equal(comparePayloads(BODY, grown({ tools: [] })), "diverged at tools");
  assert.equal(comparePayloads(BODY, grown({ system: "T" })), "diverged at system");
  assert.equal(comparePayloads(BODY, grown({ thinking: {} })), "diverged at thinking");
  assert.equal(
    comparePayloads(BODY, grown({ messages: [{ role: "user", content: "x" }] })),
    "diverged at messages[0]",
  );
  assert.equal(
    comparePayloads(BODY, grown({ messages: [BODY.messages[0]] })),
    "diverged at messages[1]",
  );
  assert.equal(comparePayloads({ text: "?" }, grown()), "unchecked");
});

test("a style that merges the task into the last shared message still shares it", () => {
  const own = { contents: [{ role: "user", parts: [{ text: "one" }] }] };
  const merged = {
    contents: [{ role: "user", parts: [{ text: "one" }, { text: "task" }] }],
  };
  assert.equal(comparePayloads(own, merged), "shared");
  assert.equal(comparePayloads(merged, own), "diverged at contents[0]");
});

test("only a body that has a routing key gets the parent's", () => {
  const plain = { prompt_cache_key: undefined, model: "m" };
  assert.equal(routePayload(plain, "parent"), plain);
  assert.deepEqual(routePayload({ prompt_cache_key: "own" }, "p".repeat(70)), {
    prompt_cache_key: "p".repeat(64),
  });
  assert.deepEqual(routePayload({ promptCacheKey: "own" }, "parent"), {
    promptCacheKey: "parent",
  });
});

test("affinity headers are those pi's adapter would send for the model", () => {
  const names = (api: string, more: object = {}) => {
    const model = { api, provider: "p", baseUrl: "https://x", ...more } as Model<Api>;
    return Object.keys(affinityHeaders(model, "parent"));
  };
  const compat = { sendSessionAffinityHeaders: true };
  assert.deepEqual(names("openai-completions"), []);
  assert.deepEqual(names("openai-completions", { compat }), [
    "session_id",
    "x-client-request-id",
    "x-session-affinity",
  ]);
  assert.deepEqual(names("openai-completions", { provider: "openrouter" }), [
    "x-session-id",
  ]);
  assert.deepEqual(names("openai-responses"), ["session-id", "x-client-request-id"]);
  assert.deepEqual(names("anthropic-messages"), []);
  assert.deepEqual(names("anthropic-messages", { compat }), ["x-session-affinity"]);
  assert.deepEqual(names("mistral-conversations"), ["x-affinity"]);
  assert.deepEqual(names("openai-codex-responses"), []);
});

// ---- place --------------------------------------------------------------------------

test("a write fork's paths are kept, moved or refused", (t) => {
  const root = scratch(t);
  const trees = {
    parentTop: join(root, "repo"),
    top: join(root, "w"),
    cwd: join(root, "w/sub"),
  };
  for (const path of ["repo/sub", "w/sub", "repo2"])
    mkdirSync(join(root, path), { recursive: true });
  writeFileSync(join(root, "repo/a"), "");
  symlinkSync(join(root, "repo"), join(root, "w/to-parent"));
  symlinkSync(join(root, "repo2"), join(root, "w/out"));
  const place = (path: string, access: "read" | "write" = "write") => {
    const placed = placePath(trees, path, access);
    return "path" in placed ? placed.path : "refused";
  };
  assert.equal(place("new/file"), "new/file");
  assert.equal(place(join(root, "w/a")), join(root, "w/a"));
  assert.equal(place(join(root, "repo/a")), join(root, "w/a"));
  assert.equal(place(`@${join(root, "repo/a")}`), join(root, "w/a"));
  assert.equal(place(`file://${join(root, "repo/a")}`), join(root, "w/a"));
  assert.equal(place(join(root, "repo")), join(root, "w"));
  assert.equal(place("../../repo/sub/x"), join(root, "w/sub/x"));
  assert.equal(place("../to-parent/x"), join(root, "w/x"));
  assert.equal(place(join(root, "repo2/a")), "refused");
  assert.equal(place(join(root, "repo2/a"), "read"), join(root, "repo2/a"));
  assert.equal(place("../out/a"), "refused");
  assert.equal(place("../../../etc/passwd"), "refused");
  assert.equal(place("~/x"), "refused");
  assert.equal(place("~/x", "read"), "~/x");
});
