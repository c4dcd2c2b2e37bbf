/**
 * The settings under `pi-fork-join`. pi merges global and trusted project settings per
 * key before they come here; this module only checks values and fills in defaults. The
 * first three names come from the pi-fork extension (MIT).
 */

/** Forks that may run at once, over all calls of one process. */
export const MAX_CONCURRENCY = 8;

export type PrefixMode = "shared" | "lean";

export interface ForkSettings {
  /** Forks at once when a call does not say; 1..8. */
  readonly defaultMaxConcurrency: number;
  /** Show the forks' running cost in the footer. */
  readonly costFooter: boolean;
  /** Forks load no extensions, skills, prompts or themes of their own. */
  readonly leanChildren: boolean;
  /**
   * Replay the parent's system messages and tool declarations, or send a small prompt.
   */
  readonly prefix: PrefixMode;
  /** Extension files that every fork loads, guards above all. */
  readonly childExtensions: readonly string[];
  /** Seconds after which a running fork is stopped; 0 is never. */
  readonly forkTimeoutSeconds: number;
  /** Bytes of one report in the tool result; 0 is no limit. */
  readonly reportMaxBytes: number;
  /** Bytes of the whole tool result; 0 is no limit. */
  readonly totalMaxBytes: number;
  /** Milliseconds between the starts of two forks of one call. */
  readonly staggerMs: number;
}

export const DEFAULTS: ForkSettings = {
  defaultMaxConcurrency: 4,
  costFooter: true,
  leanChildren: true,
  prefix: "shared",
  childExtensions: [],
  forkTimeoutSeconds: 0,
  reportMaxBytes: 16 * 1024,
  totalMaxBytes: 50 * 1024,
  staggerMs: 0,
};

/** What a value must be, in words, and whether it is. */
type Rule = readonly [expected: string, holds: (value: unknown) => boolean];

const flag: Rule = ["true or false", (value) => typeof value === "boolean"];
const whole = (low: number, high: number): Rule => [
  `a whole number from ${low} to ${high}`,
  (value) => Number.isInteger(value) && within(value as number, low, high),
];
const limit = (low: number, high: number): Rule => [
  `0 (no limit) or a whole number from ${low} to ${high}`,
  (value) => value === 0 || whole(low, high)[1](value),
];

const RULES: Record<keyof ForkSettings, Rule> = {
  defaultMaxConcurrency: whole(1, MAX_CONCURRENCY),
  costFooter: flag,
  leanChildren: flag,
  prefix: ['"shared" or "lean"', (value) => value === "shared" || value === "lean"],
  childExtensions: ["a list of paths", isPathList],
  forkTimeoutSeconds: [
    "a number from 0 (off) to 86400",
    (value) => typeof value === "number" && within(value, 0, 86_400),
  ],
  reportMaxBytes: limit(256, 10_000_000),
  totalMaxBytes: limit(1024, 10_000_000),
  staggerMs: whole(0, 60_000),
};

/** One or more settings are wrong; the message names every one of them. */
export class SettingsError extends Error {}

/** @throws SettingsError naming every unknown key and every value out of range. */
export function readSettings(raw: unknown): ForkSettings {
  if (raw === undefined) return DEFAULTS;
  if (typeof raw !== "object" || raw === null || Array.isArray(raw)) {
    throw new SettingsError("pi-fork-join in settings.json must be an object");
  }
  const faults = Object.entries(raw).flatMap(([key, value]) => fault(key, value));
  if (faults.length > 0) throw new SettingsError(faults.join("\n"));
  return { ...DEFAULTS, ...raw };
}

function fault(key: string, value: unknown): string[] {
  const rule = Object.hasOwn(RULES, key) ? RULES[key as keyof ForkSettings] : undefined;
  if (!rule) return [`pi-fork-join.${key} is not a setting`];
  const [expected, holds] = rule;
  if (holds(value)) return [];
  return [`pi-fork-join.${key} must be ${expected}, not ${JSON.stringify(value)}`];
}

function within(value: number, low: number, high: number): boolean {
  return value >= low && value <= high;
}

function isPathList(value: unknown): boolean {
  return (
    Array.isArray(value) && value.every((item) => typeof item === "string" && !!item)
  );
}
