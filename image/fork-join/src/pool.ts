/**
 * Running forks: a bounded pool per call, in input order, over a limit for the whole
 * process. Neither ever rejects for a fork's own failure; an abort only ends the
 * waiting.
 */

/** At most `size` holders at a time, first come first served. */
export class Slots {
  readonly #waiting: (() => void)[] = [];
  #free: number;

  constructor(size: number) {
    this.#free = size;
  }

  /** Resolves to a release function, or to undefined when `signal` aborts first. */
  async acquire(signal: AbortSignal): Promise<(() => void) | undefined> {
    if (signal.aborted) return undefined;
    if (this.#free > 0) this.#free--;
    else if (!(await this.#turn(signal))) return undefined;
    return once(() => this.#release());
  }

  #turn(signal: AbortSignal): Promise<boolean> {
    return new Promise((resolve) => {
      const grant = () => {
        signal.removeEventListener("abort", leave);
        resolve(true);
      };
      const leave = () => {
        this.#waiting.splice(this.#waiting.indexOf(grant), 1);
        resolve(false);
      };
      signal.addEventListener("abort", leave, { once: true });
      this.#waiting.push(grant);
    });
  }

  #release(): void {
    const next = this.#waiting.shift();
    if (next) next();
    else this.#free++;
  }
}

function once(act: () => void): () => void {
  let done = false;
  return () => {
    if (!done) act();
    done = true;
  };
}

export interface PoolOptions {
  /** Items of this call at once. */
  readonly concurrency: number;
  /** The limit shared by all calls of the process. */
  readonly slots: Slots;
  /** Milliseconds between two starts of this call. */
  readonly staggerMs: number;
  readonly signal: AbortSignal;
}

/**
 * Runs every item and returns the results in input order. An item whose turn never
 * comes because `signal` aborts gets `skipped(item)` instead.
 */
export async function runPool<Item, Result>(
  items: readonly Item[],
  options: PoolOptions,
  run: (item: Item) => Promise<Result>,
  skipped: (item: Item) => Result,
): Promise<Result[]> {
  const results = new Array<Result>(items.length);
  const queue = items.entries();
  const start = spaced(options.staggerMs, options.signal);
  const worker = async () => {
    for (const [index, item] of queue) {
      const release = await options.slots.acquire(options.signal);
      try {
        if (release) await start();
        const go = release && !options.signal.aborted;
        results[index] = go ? await run(item) : skipped(item);
      } finally {
        release?.();
      }
    }
  };
  const workers = Math.min(options.concurrency, items.length);
  await Promise.all(Array.from({ length: workers }, worker));
  return results;
}

/** A wait that lets its callers pass `ms` apart, the first at once. */
function spaced(ms: number, signal: AbortSignal): () => Promise<void> {
  let next = 0;
  return async () => {
    const now = performance.now();
    const wait = Math.max(0, next - now);
    next = now + wait + ms;
    if (wait > 0) await sleep(wait, signal);
  };
}

/** Resolves after `ms` or as soon as `signal` aborts. */
function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const finish = () => {
      clearTimeout(timer);
      signal.removeEventListener("abort", finish);
      resolve();
    };
    const timer = setTimeout(finish, ms);
    signal.addEventListener("abort", finish, { once: true });
    if (signal.aborted) finish();
  });
}
