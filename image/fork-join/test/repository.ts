/** Temporary directories and git repositories for tests. */
import { execFileSync } from "node:child_process";
import { mkdirSync, mkdtempSync, realpathSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import type { TestContext } from "node:test";

// A developer's own git settings decide nothing here.
Object.assign(process.env, {
  GIT_CONFIG_GLOBAL: "/dev/null",
  GIT_CONFIG_SYSTEM: "/dev/null",
});

/** A temporary directory, removed when the test ends. */
export function scratch(t: TestContext): string {
  const path = realpathSync(mkdtempSync(join(tmpdir(), "fork-join-test-")));
  t.after(() => rmSync(path, { recursive: true, force: true }));
  return path;
}

export function put(root: string, files: Record<string, string>): void {
  for (const [name, text] of Object.entries(files)) {
    mkdirSync(dirname(join(root, name)), { recursive: true });
    writeFileSync(join(root, name), text);
  }
}

export function git(cwd: string, ...args: string[]): string {
  return execFileSync("git", args, { cwd, encoding: "utf8", stdio: "pipe" }).trimEnd();
}

/** A repository with one commit of `files`. */
export function repository(root: string, files: Record<string, string>): void {
  mkdirSync(root, { recursive: true });
  git(root, "init", "--quiet", "--initial-branch", "main");
  git(root, "config", "user.name", "Test");
  git(root, "config", "user.email", "test@localhost");
  put(root, files);
  git(root, "add", "--all");
  git(root, "commit", "--quiet", "--message", "first");
}
