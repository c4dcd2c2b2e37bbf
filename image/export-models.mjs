// Writes pi's own model catalogue in the shape the dispatcher reads it: per provider
// its base URL and its chat models with style (api), limits and prices in USD per
// million tokens. A model whose base URL is not its provider's carries its own; one that
// has no prices gets none, which is not the same as being free.
import {
  getBuiltinModels,
  getBuiltinProviders,
} from "@earendil-works/pi-ai/providers/all";

const PRICES = ["input", "output", "cacheRead", "cacheWrite"];

function commonest(urls) {
  const count = (url) => urls.filter((other) => other === url).length;
  return urls.reduce((best, url) => (count(url) > count(best) ? url : best));
}

function entry(model, providerUrl) {
  const { id, api, baseUrl, contextWindow, maxTokens } = model;
  const cost = model.cost && {
    cost: Object.fromEntries(PRICES.map((it) => [it, model.cost[it] ?? 0])),
  };
  const own = baseUrl === providerUrl ? {} : { baseUrl };
  return { id, api, contextWindow, maxTokens, ...cost, ...own };
}

const catalogue = {};
for (const provider of getBuiltinProviders()) {
  const models = getBuiltinModels(provider);
  if (models.length === 0) continue;
  const baseUrl = commonest(models.map((model) => model.baseUrl));
  catalogue[provider] = {
    baseUrl,
    models: models.map((model) => entry(model, baseUrl)),
  };
}
process.stdout.write(JSON.stringify(catalogue));
