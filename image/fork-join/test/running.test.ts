/** Shows 2, 3 and 4: cost, overlap, limits, statuses, abort. */
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { join } from "node:path";
import { after, before, type TestContext, test } from "node:test";
import type { Usage } from "@earendil-works/pi-ai";
import { FakeModel, type Step, STYLES, type Style } from "./fake-model.ts";
import { tasks } from "./fixtures.ts";
import { openParent, outcome, type Parent, statuses } from "./harness.ts";
import { put, scratch } from "./repository.ts";

const model = new FakeModel();
before(() => model.start());
after(() => model.stop());

/** About 37,000 tokens of conversation before the call, in tool results. */
async function longParent(
  t: TestContext,
  style: Style,
  prefix: string,
): Promise<Parent> {
  model.reset();
  const parent = await openParent(t, model, { style, settings: { prefix } });
  const lines = Array.from(
    { length: 700 },
    (_, n) => `line ${n}: ${"lorem ipsum ".repeat(4)}`,
  );
  for (const name of ["a.txt", "b.txt", "c.txt"]) {
    put(parent.cwd, { [name]: lines.map((line) => `${name} ${line}`).join("\n") });
    const tools = [{ name: "read", args: { path: join(parent.cwd, name) } }];
    await parent.ask(`read it ${model.script([{ tools }, { text: "read" }])}`);
  }
  return parent;
}

async function fourForks(t: TestContext, style: Style, prefix: string) {
  const parent = await longParent(t, style, prefix);
  const tools = [{ name: "bash", args: { command: "echo looked" } }];
  // All four are under way before the first is answered, so none can read what another
  // has just written.
  const turns: Step[] = [{ tools, together: 4 }, { text: "found it" }];
  const names = ["one", "two", "three", "four"];
  const work = names.map((name) => [name, `look ${name} ${model.script(turns)}`]);
  const result = await parent.fork(tasks(Object.fromEntries(work)));
  assert.deepEqual(
    result.details.forks.map((fork) => fork.turns),
    [2, 2, 2, 2],
  );
  return { usage: result.message.usage!, parent };
}

const prefixTokens = (usage: Usage) =>
  (usage.input + usage.cacheRead + usage.cacheWrite) / 8;
const show = ({ input, cacheRead, cacheWrite, cost }: Usage) =>
  `fresh ${input}, read ${cacheRead}, written ${cacheWrite}, $${cost.total.toFixed(4)}`;

for (const style of STYLES) {
  test(`on ${style} forks with the shared prefix cost a quarter of lean ones or less`, async (t) => {
    const { usage: lean } = await fourForks(t, style, "lean");
    const { usage: shared } = await fourForks(t, style, "shared");
    assert.ok(
      prefixTokens(shared) >= 30_000,
      `the prefix is long: ${prefixTokens(shared)}`,
    );
    const ratio = lean.cost.total / shared.cost.total;
    t.diagnostic(`${prefixTokens(shared)} tokens a request; lean: ${show(lean)}`);
    t.diagnostic(`shared: ${show(shared)}; ratio ${ratio.toFixed(2)}`);
    assert.ok(ratio >= 4, `ratio ${ratio}`);
  });
}

test("the forks' usage is what the server billed for them, and reaches the session's total", async (t) => {
  const { usage, parent } = await fourForks(t, "openai-completions", "shared");
  const billed = model
    .about("You are fork")
    .reduce((sum, { billed }) => sum + billed, 0);
  assert.equal(usage.totalTokens, billed);
  const own = parent.session.messages.flatMap((m) =>
    m.role === "assistant" ? [m.usage] : [],
  );
  const expected = own.reduce((sum, { cost }) => sum + cost.total, usage.cost.total);
  assert.ok(Math.abs(parent.session.getSessionStats().cost - expected) < 1e-9);
});

// ---- Shows 3 and 4 ------------------------------------------------------------------

/** `count` tasks with the same script. */
function same(count: number, steps: readonly Step[]) {
  const script = model.script(steps);
  const names = Array.from({ length: count }, (_, n) => `t${n + 1}`);
  return tasks(Object.fromEntries(names.map((name) => [name, `${name} ${script}`])));
}

function twoTurns(delayMs: number): Step[] {
  const tools = [{ name: "ls", args: {} }];
  return [
    { tools, delayMs },
    { text: "found", delayMs },
  ];
}

const peak = () =>
  Math.max(...model.about("You are fork").map((request) => request.inFlight));

test("four forks of two turns take no longer than 1.15 of one", async (t) => {
  const parent = await openParent(t, model);
  await parent.fork(same(1, twoTurns(0)));
  const updates: string[] = [];
  parent.session.subscribe((event) => {
    if (event.type === "tool_execution_update") {
      updates.push(event.partialResult.content[0].text);
    }
  });
  // A busy machine only ever adds time, so the best of three is the measure.
  const ratios: number[] = [];
  while (ratios.length < 3 && !ratios.some((ratio) => ratio <= 1.15)) {
    model.reset();
    const one = (await parent.fork(same(1, twoTurns(1000)))).details.wallMs;
    model.reset();
    updates.length = 0;
    const four = (await parent.fork(same(4, twoTurns(1000)))).details.wallMs;
    ratios.push(four / one);
    t.diagnostic(
      `one fork ${one} ms, four forks ${four} ms, ${(four / one).toFixed(3)}`,
    );
    assert.equal(peak(), 4);
    assert.equal(updates[0], "t1: running\nt2: running\nt3: running\nt4: running");
    assert.ok(updates.length <= 1 + (4 * four) / 1000, `${updates.length} updates`);
  }
  assert.ok(Math.min(...ratios) <= 1.15, `${ratios}`);
});

test("maxConcurrency 1 runs forks one after the other, in input order", async (t) => {
  model.reset();
  const parent = await openParent(t, model);
  const result = await parent.fork({ ...same(4, twoTurns(20)), maxConcurrency: 1 });
  assert.equal(peak(), 1);
  const order = model
    .about("You are fork")
    .map(({ lastUser }) => /fork "(t\d)"/.exec(lastUser)?.[1]);
  assert.deepEqual(order, ["t1", "t1", "t2", "t2", "t3", "t3", "t4", "t4"]);
  assert.deepEqual(statuses(result), ["ok", "ok", "ok", "ok"]);
});

test("without maxConcurrency four forks run at once, and eight are the most", async (t) => {
  model.reset();
  const parent = await openParent(t, model);
  await parent.fork(same(8, [{ text: "done", together: 4 }]));
  assert.equal(peak(), 4);
  model.reset();
  const call = same(16, [{ text: "done", together: 8 }]);
  await parent.fork({ ...call, maxConcurrency: 8 });
  assert.equal(peak(), 8);
});

test("eight is the limit of the process, also over two sessions at once", async (t) => {
  model.reset();
  const [a, b] = await Promise.all([openParent(t, model), openParent(t, model)]);
  const call = { ...same(8, [{ text: "done", together: 8 }]), maxConcurrency: 8 };
  const results = await Promise.all([a.fork(call), b.fork(call)]);
  assert.equal(peak(), 8);
  for (const result of results)
    assert.deepEqual(new Set(statuses(result)), new Set(["ok"]));
});

test("staggerMs keeps the starts of one call's forks apart", async (t) => {
  const parent = await openParent(t, model, { settings: { staggerMs: 300 } });
  const result = await parent.fork(same(3, [{ text: "done" }]));
  assert.ok(result.details.wallMs >= 600, `${result.details.wallMs} ms`);
});

for (const prefix of ["shared", "lean"]) {
  test(`${prefix}: six forks end six ways, in input order, and the batch survives`, async (t) => {
    model.reset();
    const parent = await openParent(t, model, {
      settings: { prefix, forkTimeoutSeconds: 0.6 },
    });
    const one = (step: Step) => model.script([step]);
    const result = await parent.fork({
      ...tasks({
        bad: `x ${one({ status: 400 })}`,
        long: `x ${one({ text: "half a rep", stop: "length" })}`,
        empty: `x ${one({ text: " " })}`,
        slow: `x ${one({ hang: true })}`,
        fine: `x ${one({ text: "FINE REPORT" })}`,
        late: `x ${one({ text: "LATE REPORT", delayMs: 100 })}`,
      }),
      maxConcurrency: 6,
    });
    assert.deepEqual(statuses(result), [
      "failed",
      "failed",
      "failed",
      "timeout",
      "ok",
      "ok",
    ]);
    assert.equal(result.isError, false);
    const blocks = result.text.split("\n\n## ");
    const expected = [
      /bad \[failed\]\nError: 400.*scripted 400/,
      /long \[failed\]\nError: stopped by the model's output limit.*\nhalf a rep/,
      /empty \[failed\]\nError: empty report/,
      /slow \[timeout\]\nError: stopped by forkTimeoutSeconds/,
      /fine \[ok\]\nFINE REPORT/,
      /late \[ok\]\nLATE REPORT/,
    ];
    expected.forEach((pattern, index) => assert.match(blocks[index]!, pattern));
  });
}

test("a call whose forks all fail is an error result that still has every report", async (t) => {
  const parent = await openParent(t, model);
  const result = await parent.fork(same(2, [{ status: 400 }]));
  assert.equal(result.isError, true);
  assert.match(result.text, /## t1 \[failed\][^]*## t2 \[failed\]/);
});

function running(marker: string): number {
  try {
    return execFileSync("pgrep", ["-fc", marker], { encoding: "utf8" }).trim() === "0"
      ? 0
      : 1;
  } catch {
    return 0;
  }
}

async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await new Promise((done) => setTimeout(done, 20));
}

async function abortBusy(parent: Parent): Promise<number> {
  const seconds = 31.0 + Math.random();
  const sleep = [{ name: "bash", args: { command: `sleep ${seconds}` } }];
  const call = tasks({
    done: `in-done ${model.script([{ text: "DONE REPORT" }])}`,
    bash: `in-bash ${model.script([{ tools: sleep }])}`,
    http: `in-http ${model.script([{ hang: true }])}`,
    queued: `in-queue ${model.script([{ text: "never" }])}`,
    last: `in-queue ${model.script([{ text: "never" }])}`,
  });
  const tools = [{ name: "fork_join", args: { ...call, maxConcurrency: 2 } }];
  const prompt = parent.ask(`go ${model.script([{ tools }])}`);
  await until(
    () => running(`sleep ${seconds}`) === 1 && model.about("in-http").length === 1,
  );
  const started = performance.now();
  await parent.session.abort();
  await prompt;
  const took = performance.now() - started;
  assert.equal(running(`sleep ${seconds}`), 0, "bash is gone");
  return took;
}

test("an abort amid bash, amid HTTP and in the queue settles at once with no orphan", async (t) => {
  model.reset();
  const parent = await openParent(t, model);
  const took = await abortBusy(parent);
  t.diagnostic(`settled in ${took.toFixed(0)} ms`);
  assert.ok(took < 1000, `${took} ms`);
  const result = outcome(parent.session);
  assert.deepEqual(statuses(result), [
    "ok",
    "cancelled",
    "cancelled",
    "cancelled",
    "cancelled",
  ]);
  const ends = result.details.forks.map(({ stopReason }) => stopReason);
  assert.deepEqual(ends.slice(1, 3), ["aborted", "aborted"]);
  assert.match(result.text, /DONE REPORT/);
  assert.match(
    result.text,
    /## last \[cancelled\]\nError: cancelled before it started/,
  );
  await until(() => model.about("in-http")[0]!.gone);
  assert.equal(model.about("in-queue").length, 0);
});

test("a tool that does not heed the abort holds nothing up", async (t) => {
  model.reset();
  const deaf = join(scratch(t), "deaf.ts");
  put(join(deaf, ".."), { "deaf.ts": DEAF });
  const parent = await openParent(t, model, { settings: { childExtensions: [deaf] } });
  const bash = [{ name: "bash", args: {} }];
  const call = tasks({ a: `in-deaf ${model.script([{ tools: bash }])}` });
  const tools = [{ name: "fork_join", args: call }];
  const prompt = parent.ask(`go ${model.script([{ tools }])}`);
  await until(() => process.env.FORK_JOIN_DEAF === "called");
  const started = performance.now();
  await parent.session.abort();
  await prompt;
  const took = performance.now() - started;
  assert.ok(took < 1000, `${took} ms`);
  assert.deepEqual(statuses(outcome(parent.session)), ["cancelled"]);
});

const DEAF = `export default (pi) => pi.registerTool({
  name: "bash", label: "bash", description: "never ends", parameters: { type: "object" },
  execute: () => { process.env.FORK_JOIN_DEAF = "called"; return new Promise(() => {}); },
});`;
