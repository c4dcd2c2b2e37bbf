/** What tests in this process and tests of the program have in common. */
import type { RequestParams } from "../src/request.ts";
import type { Style } from "./fake-model.ts";

const PRICES = { input: 3, output: 15, cacheRead: 0.3, cacheWrite: 3.75 };

export const MODELS: Record<Style, [provider: string, model: string]> = {
  "openai-completions": ["fakeoai", "fake-1"],
  "anthropic-messages": ["fakeanth", "fake-claude"],
};

/** pi's models.json for the fake. */
export function modelsJson(url: string, extra: object = {}): string {
  const shared = { apiKey: "dummy" };
  const limits = {
    contextWindow: 200_000,
    maxTokens: 8000,
    reasoning: true,
    cost: PRICES,
  };
  const openai = { id: "fake-1", ...limits, ...extra };
  const anthropic = { id: "fake-claude", ...limits, ...extra };
  return JSON.stringify({
    providers: {
      fakeoai: {
        ...shared,
        baseUrl: `${url}/v1`,
        api: "openai-completions",
        models: [openai],
      },
      fakeanth: {
        ...shared,
        baseUrl: url,
        api: "anthropic-messages",
        models: [anthropic],
      },
    },
  });
}

export function tasks(entries: Record<string, string>): RequestParams {
  return { tasks: Object.entries(entries).map(([id, task]) => ({ id, task })) };
}
