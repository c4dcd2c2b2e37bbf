/**
 * Running git quietly: no hooks, no signatures, no prompts, one worktree change at a
 * time.
 */
import { execFile } from "node:child_process";
import { setTimeout } from "node:timers/promises";

export class GitError extends Error {}

/** git in one directory. */
export class Git {
  readonly #cwd: string;
  readonly #env: NodeJS.ProcessEnv;

  constructor(cwd: string, env: NodeJS.ProcessEnv = {}) {
    this.#cwd = cwd;
    this.#env = { ...outsideRepositories(), ...env, GIT_TERMINAL_PROMPT: "0" };
  }

  /** Trimmed standard output. @throws GitError with git's own words. */
  run(...args: string[]): Promise<string> {
    const options = { cwd: this.#cwd, env: this.#env, maxBuffer: 256 * 1024 * 1024 };
    return new Promise((resolve, reject) => {
      execFile("git", [...QUIET, ...args], options, (error, stdout, stderr) => {
        if (!error) return resolve(stdout.trimEnd());
        const missing = (error as NodeJS.ErrnoException).code === "ENOENT";
        const why = missing ? `no git, or no ${this.#cwd}` : stderr.trim();
        reject(new GitError(why || error.message));
      });
    });
  }

  /** Like `run`, but a failure is an empty answer. */
  ask(...args: string[]): Promise<string> {
    return this.run(...args).catch(() => "");
  }
}

/**
 * No hooks, signatures, monitors or background work: a fork's export asks nobody
 * anything.
 */
const QUIET = [
  ...["-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false"],
  ...["-c", "commit.gpgSign=false", "-c", "gc.auto=0", "-c", "maintenance.auto=false"],
  ...["-c", "advice.addEmbeddedRepo=false", "-c", "submodule.recurse=false"],
];

/**
 * The environment without GIT_DIR and its kin, which a hook that runs pi would pass on.
 */
function outsideRepositories(): NodeJS.ProcessEnv {
  const bound = [
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_COMMON_DIR",
    "GIT_PREFIX",
  ];
  return Object.fromEntries(
    Object.entries(process.env).filter(([k]) => !bound.includes(k)),
  );
}

let turn: Promise<unknown> = Promise.resolve();

/**
 * git 2.39 fails with "failed to read …/commondir: Success" when it comes across a
 * worktree that another process is adding or removing at that moment. So ours take
 * turns, and another program's is waited for.
 */
export function inTurn<T>(act: () => Promise<T>): Promise<T> {
  const patient = async () => {
    for (let tries = 1; ; tries++) {
      try {
        return await act();
      } catch (error) {
        const passing = (error as Error).message.includes("/commondir:") && tries < 10;
        if (!passing) throw error;
      }
      await setTimeout(20 * tries);
    }
  };
  const result = turn.then(patient);
  turn = result.catch(() => undefined);
  return result;
}
