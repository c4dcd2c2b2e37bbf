/** A real pi session in this process, with the extension, against the fake model. */
import { mkdirSync } from "node:fs";
import { join } from "node:path";
import type { TestContext } from "node:test";
import type { ToolResultMessage } from "@earendil-works/pi-ai";
import {
  type AgentSession,
  createAgentSession,
  DefaultResourceLoader,
  type InlineExtension,
  ModelRuntime,
  SessionManager,
  SettingsManager,
} from "@earendil-works/pi-coding-agent";
import forkJoin, { type ForkJoinDetails } from "../src/index.ts";
import type { FakeModel, Style } from "./fake-model.ts";
import { MODELS, modelsJson } from "./fixtures.ts";
import { put, scratch } from "./repository.ts";

Object.assign(process.env, {
  PI_OFFLINE: "1",
  PI_TELEMETRY: "0",
  PI_SKIP_VERSION_CHECK: "1",
});
delete process.env.PI_JOB_ID;

export interface ParentOptions {
  readonly style?: Style;
  /** The settings under pi-fork-join. */
  readonly settings?: object;
  /** Other settings of pi. */
  readonly pi?: object;
  readonly tools?: string[];
  readonly excludeTools?: string[];
  readonly extensions?: InlineExtension[];
  readonly extensionPaths?: string[];
  readonly rules?: string;
  readonly cwd?: string;
  /** Fields for the model's entry in models.json. */
  readonly model?: object;
  readonly settingsManager?: SettingsManager;
}

export interface Parent {
  readonly session: AgentSession;
  readonly cwd: string;
  /** Sends a prompt and waits until pi is settled. */
  ask(text: string): Promise<void>;
  /** Has the model call fork_join once and returns its result. */
  fork(params: unknown, text?: string): Promise<ForkOutcome>;
}

export interface ForkOutcome {
  readonly text: string;
  readonly isError: boolean;
  readonly details: ForkJoinDetails;
  readonly message: ToolResultMessage;
}

/** The session ends, and its files go, with the test. */
export async function openParent(
  t: TestContext,
  model: FakeModel,
  options: ParentOptions = {},
): Promise<Parent> {
  const home = scratch(t);
  const agentDir = join(home, "agent");
  const cwd = options.cwd ?? join(home, "work");
  put(agentDir, { "models.json": modelsJson(model.url, options.model) });
  mkdirSync(cwd, { recursive: true });
  process.env.PI_CODING_AGENT_DIR = agentDir;
  const session = await openSession(agentDir, cwd, options);
  t.after(() => close(session));
  const ask = (text: string) => session.prompt(text);
  return {
    ...{ session, cwd, ask },
    async fork(params, text = "") {
      const tools = [{ name: "fork_join", args: params }];
      await ask(
        `${text} ${model.script([{ text: "status text", tools }, { text: "joined" }])}`,
      );
      return outcome(session);
    },
  };
}

async function close(session: AgentSession): Promise<void> {
  await session.abort();
  await session.extensionRunner.emit({ type: "session_shutdown", reason: "quit" });
  session.dispose();
}

async function openSession(
  agentDir: string,
  cwd: string,
  options: ParentOptions,
): Promise<AgentSession> {
  const own = { "pi-fork-join": options.settings ?? {} };
  const settings = { ...own, retry: { enabled: false }, ...options.pi };
  const settingsManager =
    options.settingsManager ?? SettingsManager.inMemory(settings as object);
  const modelRuntime = await ModelRuntime.create({
    authPath: join(agentDir, "auth.json"),
    modelsPath: join(agentDir, "models.json"),
  });
  const resourceLoader = new DefaultResourceLoader({
    ...{ cwd, agentDir, settingsManager, noExtensions: true, noSkills: true },
    extensionFactories: [
      ...(options.extensions ?? []),
      { name: "fork-join", factory: forkJoin },
    ],
    additionalExtensionPaths: options.extensionPaths ?? [],
    ...(options.rules ? { appendSystemPrompt: [options.rules] } : {}),
  });
  await resourceLoader.reload();
  const [provider, id] = MODELS[options.style ?? "openai-completions"];
  const { session } = await createAgentSession({
    ...{ cwd, agentDir, modelRuntime, resourceLoader, settingsManager },
    model: modelRuntime.getModel(provider, id)!,
    thinkingLevel: "low",
    sessionManager: SessionManager.inMemory(cwd),
    ...(options.tools ? { tools: options.tools } : {}),
    ...(options.excludeTools ? { excludeTools: options.excludeTools } : {}),
  });
  await session.bindExtensions({ mode: "json" });
  return session;
}

/** The last fork_join result in the session. */
export function outcome(session: AgentSession): ForkOutcome {
  const message = session.messages.findLast(
    (entry): entry is ToolResultMessage =>
      entry.role === "toolResult" && entry.toolName === "fork_join",
  );
  if (!message) throw new Error("no fork_join result");
  const text = message.content
    .map((block) => (block.type === "text" ? block.text : ""))
    .join("");
  return {
    text,
    isError: message.isError,
    details: message.details as unknown as ForkJoinDetails,
    message,
  };
}

export function statuses(result: ForkOutcome): string[] {
  return result.details.forks.map((fork) => fork.status);
}
