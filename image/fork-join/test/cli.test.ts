/**
 * The extension in the real `pi` program: signals, kill -9, memory, headers, events.
 */
import assert from "node:assert/strict";
import { type ChildProcess, execFileSync, spawn } from "node:child_process";
import { existsSync, readdirSync, readFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, type TestContext, test } from "node:test";
import { fileURLToPath } from "node:url";
import { FakeModel, type Step } from "./fake-model.ts";
import { modelsJson, tasks } from "./fixtures.ts";
import { git, put, repository, scratch } from "./repository.ts";

const model = new FakeModel();
before(() => model.start());
after(() => model.stop());

const PI = fileURLToPath(
  new URL("bundle/cli.js", import.meta.resolve("@earendil-works/pi-coding-agent")),
);
const FOLDER = join(import.meta.dirname, "..");

interface Pi {
  readonly process: ChildProcess;
  readonly exit: Promise<{ code: number | null; signal: string | null }>;
  /** JSON lines printed so far. */
  events(): any[];
}

interface Home {
  readonly root: string;
  readonly agentDir: string;
  readonly cwd: string;
}

function makeHome(t: TestContext, settings: object = {}): Home {
  const root = scratch(t);
  const own = JSON.stringify({ "pi-fork-join": settings, retry: { enabled: false } });
  put(root, { "agent/models.json": modelsJson(model.url), "agent/settings.json": own });
  repository(join(root, "work"), { "a.txt": "committed\n" });
  return { root, agentDir: join(root, "agent"), cwd: join(root, "work") };
}

function startPi(t: TestContext, home: Home, args: string[], env: object = {}): Pi {
  const child = spawn(
    process.execPath,
    [PI, "--model", "fakeoai/fake-1", "-e", FOLDER, ...args],
    {
      cwd: home.cwd,
      env: { ...process.env, PI_CODING_AGENT_DIR: home.agentDir, ...env },
      stdio: ["pipe", "pipe", "inherit"],
    },
  );
  t.after(() => void child.kill("SIGKILL"));
  // Print mode would wait for more of its prompt.
  if (args.includes("-p")) child.stdin.end();
  let out = "";
  child.stdout.on("data", (chunk) => (out += chunk));
  const exit = new Promise<Awaited<Pi["exit"]>>((done) => {
    child.on("close", (code, signal) => done({ code, signal }));
  });
  const lines = () => out.split("\n").slice(0, -1);
  return {
    process: child,
    exit,
    events: () => lines().map((line) => JSON.parse(line)),
  };
}

const print = (...args: string[]) => ["-p", "--mode", "json", "--no-approve", ...args];

function forking(call: unknown, ...more: Step[]): string {
  return `go ${model.script([{ tools: [{ name: "fork_join", args: call }] }, ...more, { text: "end" }])}`;
}

async function until(condition: () => boolean): Promise<void> {
  while (!condition()) await new Promise((done) => setTimeout(done, 20));
}

function isRunning(command: string): boolean {
  const all = execFileSync("ps", ["-eo", "args"], { encoding: "utf8" });
  return all.split("\n").includes(command);
}

/** What the process has left in the temporary directory. */
function leftovers({ process: { pid } }: Pi): string[] {
  const own = new RegExp(`^pi-fork-join-\\w+-${pid}-`);
  return readdirSync(tmpdir()).filter((name) => own.test(name));
}

const worktrees = (cwd: string) => git(cwd, "worktree", "list").split("\n").length;

test("in a dispatched job forks carry their tag and the operator's rules, lean or not", async (t) => {
  model.reset();
  const home = makeHome(t, { prefix: "lean" });
  const call = tasks({ a: `x ${model.script([{ text: "REPORT A" }])}`, b: "y" });
  const args = print(
    "--no-session",
    "--append-system-prompt",
    "OPERATOR RULE",
    forking(call),
  );
  const pi = startPi(t, home, args, { PI_JOB_ID: "job-1" });
  assert.deepEqual(await pi.exit, { code: 0, signal: null });
  const end = pi.events().find((event) => event.type === "tool_execution_end");
  const { call: tag, forks } = end.result.details;
  const tags = model.requests.map(({ headers }) => headers["x-pidispatch-fork"]);
  assert.deepEqual(tags.toSorted(), [`${tag}/a`, `${tag}/b`, undefined, undefined]);
  for (const request of model.about("You are fork"))
    assert.match(request.raw, /OPERATOR RULE/);
  const billed = model
    .about("You are fork")
    .reduce((sum, request) => sum + request.billed, 0);
  assert.equal(end.result.usage.totalTokens, billed);
  assert.deepEqual(
    forks.map((fork: any) => [fork.id, fork.prefix]),
    [
      ["a", "shared"],
      ["b", "shared"],
    ],
  );
});

test("SIGTERM ends pi and its forks in under a second and leaves nothing", async (t) => {
  model.reset();
  const home = makeHome(t);
  const sleep = `sleep ${40 + Math.random()}`;
  const busy = { tools: [{ name: "bash", args: { command: sleep } }] };
  const hang = model.script([{ hang: true }]);
  const call = {
    tasks: [
      { id: "bash", task: `in-bash ${model.script([busy])}` },
      { id: "tree", task: `in-tree ${hang}`, write: true },
      { id: "queued", task: "never" },
    ],
    maxConcurrency: 2,
  };
  const sessions = join(home.root, "sessions");
  const pi = startPi(t, home, print("--session-dir", sessions, forking(call)));
  await until(() => isRunning(sleep) && model.about("in-tree").length === 1);
  assert.equal(worktrees(home.cwd), 2);
  const started = performance.now();
  pi.process.kill("SIGTERM");
  assert.deepEqual(await pi.exit, { code: 143, signal: null });
  const took = performance.now() - started;
  t.diagnostic(`gone in ${took.toFixed(0)} ms`);
  assert.ok(took < 1000, `${took} ms`);
  assert.equal(isRunning(sleep), false);
  assert.equal(worktrees(home.cwd), 1);
  assert.deepEqual(leftovers(pi), []);
  const [session] = readdirSync(sessions);
  const statuses = /"id":"(\w+)","kind":"[\w-]+"/g;
  const saved = readFileSync(join(sessions, session!), "utf8");
  assert.equal(
    saved.match(/"status":"cancelled"/g)?.length,
    3,
    saved.match(statuses)?.join(),
  );
});

test("what a killed pi leaves is exported and removed at the next start", async (t) => {
  model.reset();
  const home = makeHome(t);
  const change = {
    tools: [{ name: "write", args: { path: "b.txt", content: "paid work" } }],
  };
  const call = {
    tasks: [
      {
        id: "busy",
        task: `in-busy ${model.script([change, { hang: true }])}`,
        write: true,
      },
      { id: "idle", task: `in-idle ${model.script([{ hang: true }])}`, write: true },
    ],
  };
  const pi = startPi(t, home, print("--no-session", forking(call)));
  await until(
    () => model.about("in-busy").length === 2 && model.about("in-idle").length === 1,
  );
  const hello = print("--no-session", `hi ${model.script([{ text: "ho" }])}`);
  await startPi(t, home, hello).exit;
  assert.equal(worktrees(home.cwd), 3, "another pi leaves a live one's alone");
  pi.process.kill("SIGKILL");
  await pi.exit;
  assert.equal(leftovers(pi).length, 2);
  await startPi(t, home, print("--no-session", `hi ${model.script([{ text: "ho" }])}`))
    .exit;
  assert.equal(worktrees(home.cwd), 1);
  assert.deepEqual(leftovers(pi), []);
  const left = git(
    home.cwd,
    "for-each-ref",
    "--format=%(refname:lstrip=2)",
    "refs/heads/pi-fork",
  );
  assert.match(left, /^pi-fork\/call_\w+\/busy$/);
  assert.equal(git(home.cwd, "show", `${left}:b.txt`), "paid work");
});

/**
 * Peak memory of a whole pi process, in MB, that forks `count` times over 37k tokens.
 */
async function peakMemory(t: TestContext, count: number): Promise<number> {
  model.reset();
  const home = makeHome(t);
  const big = Array.from(
    { length: 1900 },
    (_, n) => `line ${n} ${"lorem ipsum ".repeat(6)}`,
  );
  put(home.cwd, { "big.txt": big.slice(0, 550).join("\n") });
  const read = { tools: [{ name: "read", args: { path: "big.txt" } }] };
  const script = model.script([
    { tools: [{ name: "bash", args: { command: "echo x" } }] },
    { text: "R" },
  ]);
  const names = Array.from({ length: count }, (_, n) => `t${n}`);
  const call = {
    ...tasks(Object.fromEntries(names.map((id) => [id, script]))),
    maxConcurrency: 8,
  };
  const fork = { tools: [{ name: "fork_join", args: call }] };
  const prompt = `go ${model.script([read, read, read, fork, { text: "end" }])}`;
  const report = join(home.root, "memory");
  put(home.root, { "memory.ts": MEMORY });
  const args = print("--no-session", "-e", join(home.root, "memory.ts"), prompt);
  await startPi(t, home, args, { MEMORY_REPORT: report }).exit;
  assert.equal(model.about("You are fork").length, 2 * count);
  return Number(readFileSync(report, "utf8")) / 1024;
}

const MEMORY = `import { readFileSync, writeFileSync } from "node:fs";
export default (pi) => pi.on("session_shutdown", () => {
  const peak = /VmHWM:\\s+(\\d+)/.exec(readFileSync("/proc/self/status", "utf8"))[1];
  writeFileSync(process.env.MEMORY_REPORT, peak);
});`;

test(
  "eight forks take no more than 80 MB above one",
  { skip: !existsSync("/proc") },
  async (t) => {
    const one = await peakMemory(t, 1);
    const eight = await peakMemory(t, 8);
    t.diagnostic(`one fork ${one.toFixed(1)} MB, eight forks ${eight.toFixed(1)} MB`);
    assert.ok(eight - one <= 80, `${eight - one} MB`);
  },
);

test("over RPC the session's cost includes the forks, and the footer shows theirs", async (t) => {
  model.reset();
  const pi = startPi(t, makeHome(t), ["--mode", "rpc", "--no-session"]);
  const say = (command: object) =>
    pi.process.stdin!.write(`${JSON.stringify(command)}\n`);
  say({
    type: "prompt",
    message: forking(tasks({ a: `x ${model.script([{ text: "R" }])}` })),
  });
  await until(() => pi.events().some((event) => event.type === "agent_settled"));
  say({ type: "get_session_stats" });
  await until(() => pi.events().some((event) => event.command === "get_session_stats"));
  for (const { headers } of model.requests) {
    assert.equal(headers["x-pidispatch-fork"], undefined, "no tag outside a job");
  }
  const stats = pi.events().find((event) => event.command === "get_session_stats").data;
  const fork = pi.events().find((event) => event.type === "tool_execution_end")
    .result.usage;
  assert.equal(
    stats.tokens.total,
    model.requests.reduce((sum, { billed }) => sum + billed, 0),
  );
  const status = pi.events().find((event) => event.statusKey === "pi-fork-join");
  assert.equal(status.statusText, `forks $${fork.cost.total.toFixed(3)}`);
});
