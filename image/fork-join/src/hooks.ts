/**
 * What keeps a fork's session a continuation of the parent's: the hooks that hold its
 * prefix, route its requests, name them for the gate, and keep a write fork inside its
 * worktree.
 */
import type { ExtensionAPI } from "@earendil-works/pi-coding-agent";
import type { ForkHost, TranscriptMessage } from "./host.ts";
import { placePath, type Trees } from "./place.ts";
import {
  affinityHeaders,
  comparePayloads,
  countSystemMessages,
  keepSystemMessages,
  type PrefixCheck,
  replayPrompt,
  routePayload,
} from "./prefix.ts";

/** Filled in by the fork's first request. */
export interface Check {
  result: PrefixCheck;
}

export function hookFork(
  pi: ExtensionAPI,
  host: ForkHost,
  id: string,
  tree: Trees | undefined,
  check: Check,
): void {
  if (tree) keepInside(pi, tree);
  if (host.jobId !== undefined) tagRequests(pi, `${host.call}/${id}`);
  if (host.settings.prefix === "lean") check.result = "lean";
  else sharePrefix(pi, host, check);
}

function tagRequests(pi: ExtensionAPI, tag: string): void {
  pi.on("before_provider_headers", ({ headers }) => {
    headers["x-pidispatch-fork"] = tag;
  });
}

/** What pi would render beside the replayed sections. */
const NOTHING_ELSE = { contextFiles: [], skills: [], appendSystemPrompt: "" };

function sharePrefix(pi: ExtensionAPI, host: ForkHost, check: Check): void {
  const keep = countSystemMessages(host.transcript);
  const prompt = replayPrompt(host.transcript);
  pi.on("before_agent_start", ({ systemPromptOptions }) => {
    if (prompt) Object.assign(systemPromptOptions, prompt, NOTHING_ELSE);
    return host.forced === undefined ? undefined : { systemPrompt: host.forced };
  });
  pi.on("context_with_system", ({ messages }) => ({
    messages: keepSystemMessages<TranscriptMessage>(messages, keep),
  }));
  pi.on("before_provider_headers", ({ headers }) => {
    Object.assign(headers, affinityHeaders(host.model, host.sessionId));
  });
  let first = true;
  pi.on("before_provider_request", ({ payload }) => {
    if (first && host.payload !== undefined) {
      check.result = comparePayloads(host.payload, payload);
    }
    first = false;
    return routePayload(payload, host.sessionId);
  });
}

const ACCESS: Record<string, "read" | "write"> = {
  read: "read",
  grep: "read",
  find: "read",
  ls: "read",
  edit: "write",
  write: "write",
};

/**
 * Guards run before this and see what the model wrote; this has the last word on paths.
 */
function keepInside(pi: ExtensionAPI, tree: Trees): void {
  pi.on("tool_call", ({ toolName, input }) => {
    const access = ACCESS[toolName];
    const named = input as { path?: unknown };
    if (!access || typeof named.path !== "string") return undefined;
    const placed = placePath(tree, named.path, access);
    if ("refused" in placed) return { block: true, reason: placed.refused };
    named.path = placed.path;
    return undefined;
  });
}
