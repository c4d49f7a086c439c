"""What can be done against a break of the prefix cache: a setting of the agent where one is known, of the server otherwise."""

from __future__ import annotations

BILLING = "set CLAUDE_CODE_ATTRIBUTION_HEADER=0 in Claude Code's environment, or serve with --canonicalize billing"
GONE = {
    "evicted": "give the cache more room (--kv-memory), or ask with fewer conversations at a time",
    "restarted": "nothing: it is cached again now",
    "computing": "send one request first, and those that share its beginning when its answer has begun",
    "unkept": "start the server without --no-prefix-cache; a model with recurrent layers resumes at checkpoints alone",
}
KINDS = {
    "date": "have the agent write the date at the end, without the time; --canonicalize dates moves such lines from the system prompt to the first user message",
    "id": "take the id out of the agent's prompt; --canonicalize ids replaces ids of the system prompt by zeros",
    "git": "set includeGitInstructions to false in Claude Code's settings; --canonicalize git moves the status to the first user message",
    "path": "start the agent in the same folder each time",
    "number": "take the number out of the agent's prompt, or put it at its end",
}
PARTS = {
    "tools": "have the agent send the same tools in the same order; --canonicalize tools,keys sorts tools and the keys of their schemas",
    "answer": "send answers back as they came, reasoning too; a template may still write them in another way",
    "message": "the agent rewrites earlier messages: a setting of its own may keep them as they were (clearing of tool results, reminders, compaction)",
    "template": "the model's chat template writes what changes: serve with a --chat-template FILE that does not",
    "system": "keep the beginning of the system prompt the same, and put what changes at its end",
}


def cure(cause: str, part: str, kind: str) -> str:
    """One sentence of advice; empty where there is none."""
    if cause in GONE:
        return GONE[cause]
    if kind == "billing":
        return BILLING
    if kind in KINDS and (part == "system" or kind == "git"):
        return KINDS[kind]
    return PARTS.get(part, "")
