/**
 * What a call takes from the parent session, once and at its start: pi's contexts throw
 * after a session is replaced, and the user may change the model while forks run.
 */
import {
  type Api,
  getCurrentSystemPrompt,
  type Message,
  type Model,
} from "@earendil-works/pi-ai";
import {
  buildSessionContext,
  type CreateAgentSessionOptions,
  type ExtensionAPI,
  type ExtensionContext,
  getAgentDir,
  ModelRuntime,
  type SessionEntry,
  type SettingsManager,
} from "@earendil-works/pi-coding-agent";
import { homedir } from "node:os";
import { isAbsolute, join } from "node:path";
import type { ParentTools } from "./policy.ts";
import { forcedPrompt } from "./prefix.ts";
import type { ForkSettings } from "./settings.ts";

export type PiSettings = NonNullable<Parameters<typeof SettingsManager.inMemory>[0]>;
export type TranscriptMessage = ReturnType<
  typeof buildSessionContext
>["messages"][number];

export interface ForkHost {
  readonly cwd: string;
  readonly agentDir: string;
  readonly sessionId: string;
  readonly projectTrusted: boolean;
  readonly model: Model<Api>;
  readonly thinkingLevel: CreateAgentSessionOptions["thinkingLevel"];
  readonly runtime: ModelRuntime;
  readonly tools: ParentTools;
  readonly piSettings: PiSettings;
  readonly settings: ForkSettings;
  /** C0: the entries before the running call. */
  readonly base: readonly SessionEntry[];
  /** C0 as the model saw it, system messages included. */
  readonly transcript: readonly TranscriptMessage[];
  /** The parent's last request body, for the self-check. */
  readonly payload: unknown;
  /** A prompt an extension forced on the parent's run. */
  readonly forced: string | undefined;
  /** Names the call in branches and headers. */
  readonly call: string;
  /** Set inside a dispatched job. */
  readonly jobId: string | undefined;
}

/** What the call itself found out before the host is captured. */
export interface CallFacts {
  readonly settings: ForkSettings;
  readonly base: readonly SessionEntry[];
  readonly payload: unknown;
  readonly call: string;
}

export async function captureHost(
  pi: ExtensionAPI,
  ctx: ExtensionContext,
  facts: CallFacts,
): Promise<ForkHost> {
  const model = ctx.model;
  if (!model) throw new Error("fork_join needs a model, and this session has none");
  const transcript = contextOf(facts.base);
  const prompt = getCurrentSystemPrompt(transcript as Message[]);
  const jobId = process.env.PI_JOB_ID || undefined;
  return {
    ...facts,
    settings: bindingSettings(facts.settings, jobId),
    cwd: ctx.cwd,
    agentDir: getAgentDir(),
    sessionId: ctx.sessionManager.getSessionId(),
    projectTrusted: ctx.isProjectTrusted(),
    model,
    thinkingLevel: ctx.thinkingLevel,
    runtime: await parentRuntime(ctx.modelRegistry, model),
    tools: parentTools(pi),
    piSettings: pi.getSettings() as PiSettings,
    transcript,
    forced: forcedPrompt(ctx.getSystemPrompt(), prompt, facts.payload),
    jobId,
  };
}

/**
 * In a dispatched job every fork keeps the operator's rules, which a lean prompt drops.
 */
function bindingSettings(
  settings: ForkSettings,
  jobId: string | undefined,
): ForkSettings {
  return jobId === undefined ? settings : { ...settings, prefix: "shared" };
}

function contextOf(base: readonly SessionEntry[]): TranscriptMessage[] {
  const leaf = base.at(-1);
  return leaf ? buildSessionContext([...base], leaf.id).messages : [];
}

function parentTools(pi: ExtensionAPI): ParentTools {
  const registered = pi.getAllTools().map(({ name, sourceInfo }) => ({
    name,
    replacedBy: sourceInfo.source === "builtin" ? undefined : sourceInfo.path,
  }));
  return { active: pi.getActiveTools(), registered };
}

/**
 * Absolute paths of `childExtensions`: `~` is home, anything relative is the agent
 * dir's.
 */
export function childExtensionPaths(host: ForkHost): string[] {
  return host.settings.childExtensions.map((path) => {
    if (path === "~" || path.startsWith("~/")) return join(homedir(), path.slice(1));
    return isAbsolute(path) ? path : join(host.agentDir, path);
  });
}

type Registry = ExtensionContext["modelRegistry"];

/**
 * The runtime that holds the parent's providers and credentials. pi 1.6.0 hands
 * extensions only a facade; its `runtime` field is private (earendil-works/pi issue
 * 8791 asks for a public one). Without it, providers that extensions registered and the
 * key of the model's own provider are carried over by hand.
 */
export async function parentRuntime(
  registry: Registry,
  model: Model<Api>,
): Promise<ModelRuntime> {
  const held = (registry as unknown as { runtime?: ModelRuntime }).runtime;
  if (typeof held?.streamSimple === "function") return held;
  const rebuilt = await ModelRuntime.create();
  for (const id of registry.getRegisteredProviderIds()) {
    const native = registry.getRegisteredNativeProvider(id);
    const config = registry.getRegisteredProviderConfig(id);
    if (native) rebuilt.registerNativeProvider(native);
    else if (config) rebuilt.registerProvider(id, config);
  }
  const key = await registry.getApiKeyForProvider(model.provider);
  if (key !== undefined) await rebuilt.setRuntimeApiKey(model.provider, key);
  if (rebuilt.getModel(model.provider, model.id)) return rebuilt;
  throw new Error(
    `fork_join cannot reach this pi's model runtime, and a new one does not know ` +
      `${model.provider}/${model.id}`,
  );
}
