/**
 * Finding the running fork_join call in the session tree.
 *
 * The forks' base is the branch before the assistant message that holds the call.
 * Guessing is worse than failing: with the current leaf as base, every fork would read
 * the call itself and its siblings' tasks.
 */
import type { SessionEntry } from "@earendil-works/pi-coding-agent";

/**
 * The call is absent from the branch's last assistant message, or stands there twice.
 */
export class LocateError extends Error {}

/**
 * The entries that existed before the message holding call `toolCallId`.
 *
 * Only the *last* assistant message is searched: some OpenAI-compatible servers number
 * calls per reply ("call_0"), so an earlier turn may hold the same id and that is no
 * ambiguity. `branch` runs from the root to the leaf.
 */
export function entriesBeforeCall(
  branch: readonly SessionEntry[],
  toolCallId: string,
): SessionEntry[] {
  const index = branch.findLastIndex(
    (entry) => entry.type === "message" && entry.message.role === "assistant",
  );
  const hits = index < 0 ? 0 : countCalls(branch[index] as SessionEntry, toolCallId);
  if (hits === 1) return branch.slice(0, index);
  const where = hits === 0 ? "is not in" : "stands more than once in";
  throw new LocateError(
    `fork_join cannot locate its own call: ${JSON.stringify(toolCallId)} ${where} the ` +
      "last assistant message. No fork was started.",
  );
}

function countCalls(entry: SessionEntry, toolCallId: string): number {
  if (entry.type !== "message" || entry.message.role !== "assistant") return 0;
  return entry.message.content.filter(
    (block) => block.type === "toolCall" && block.id === toolCallId,
  ).length;
}
