"""`quire show`: what is inside a model, from its header alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from quire.cli.arguments.options import Argument, Option
from quire.cli.terminal import ui
from quire.weights.download.progress import mb
from quire.weights.store.store import Store

if TYPE_CHECKING:
    from quire.weights.checkpoint import Opened


MADE_TO = {"generate": "write text", "embed": "embed texts", "score": "score pairs of texts"}


def command(
    name: Annotated[str, Argument(help="A model in the store, or a path.")],
    json: Annotated[bool, Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what a model file contains, and what it takes to run: format, quantization, context, memory, tools, licence, source.

    Reads the header alone. Memory is for one answer of full length on a CPU; `quire serve` keeps several, and says what it took.
    """
    facts = gather(Store(), name)
    if json:
        ui.emit(facts)
    else:
        ui.fields(lines(facts))


def gather(store: Store, name: str) -> dict[str, Any]:
    """Every fact, as JSON would have it: the file's own, then the store's."""
    from quire.weights import folder
    from quire.weights.checkpoint import open_checkpoint
    from quire.weights.gguf import file as gguf

    path = store.resolve(name)
    manifest = store.get(name)
    with open_checkpoint(path) as checkpoint:
        told = gguf.describe(checkpoint) if isinstance(checkpoint, gguf.GGUF) else folder.describe(checkpoint)
        facts: dict[str, Any] = {"model": manifest.name if manifest else name, **told}
        facts["format"] = "gguf" if isinstance(checkpoint, gguf.GGUF) else "safetensors"
        if facts.get("chat_template"):
            facts["answers"] = answers(checkpoint)
        from quire.cli import show_needs

        facts |= show_needs.gather(checkpoint)
    facts |= {
        "path": str(path),
        "digest": manifest.digest if manifest else None,
        "source": manifest.source if manifest else None,
        "pulled_at": manifest.pulled_at if manifest else None,
    }
    if manifest and manifest.licence:
        facts["license"] = manifest.licence  # what we checked, before what the file says of itself
    return facts


def answers(checkpoint: Opened) -> dict[str, Any] | None:
    """How the model writes reasoning and tool calls, and how well that was read back from its own template."""
    from quire.chat.loading import tokenizer_and_template
    from quire.chat.tools.check import check
    from quire.chat.tools.detect import detect_format
    from quire.chat.tools.general import NAME
    from quire.observe.errors import QuireError

    try:
        tokenizer, template = tokenizer_and_template(checkpoint)
        form = None if template is None else detect_format(template, tokenizer)
        if template is None:
            return {"format": None}
        if form is None:
            return {"format": None, "tool_format": NAME}
        score = check(template, tokenizer, form)
        return {
            "format": form.name,
            "tool_format": form.name if form.calls else NAME,
            "tools": score.tools,
            "reasoning": score.reasoning,
            "failed": score.failed,
        }
    except QuireError as error:  # a vocabulary that is not served
        return {"format": None, "failed": [error.message]}


def told(answers: dict[str, Any] | None) -> str | None:
    """The same for people."""
    if answers is None:
        return None
    if answers["format"] is None:
        if answers.get("failed"):
            return f"not looked at: {answers['failed'][0]}"
        if "tool_format" not in answers:
            return "text only: there is no chat template"
        return f"tools by {answers['tool_format']}: the template has no place for them"
    scores = [f"{kind} {s[0]}/{s[1]}" for kind in ("tools", "reasoning") if (s := answers[kind])]
    short = any(s[0] < s[1] for kind in ("tools", "reasoning") if (s := answers[kind]))
    note = "; not everything the template writes could be read back (docs/tools.md)" if short else ""
    apart = "" if answers["tool_format"] == answers["format"] else f"; tools by {answers['tool_format']}"
    return f"{answers['format']} ({', '.join(scores) or 'not checked: the template writes none'}){apart}{note}"


def lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The facts for people; what the file does not say is left out."""
    from quire.cli.show_needs import told as memory

    def number(key: str) -> str:
        value = facts.get(key)
        return f"{value:,}" if isinstance(value, int) else str(value)

    types: dict[str, int] = facts.get("types") or {}
    total = sum(types.values())
    mix = (
        ", ".join(f"{t} {100 * n / total:.1f}%" for t, n in sorted(types.items(), key=lambda i: -i[1])) if total else ""
    )
    shape = [f"{number('layers')} layers", f"width {number('embedding_length')}"]
    shape.append(f"{number('heads')} heads over {number('kv_heads')} KV heads")
    if facts.get("experts"):
        shape.append(f"{number('experts')} experts")
    pre = f", pre-tokenizer {facts['pre_tokenizer']}" if facts.get("pre_tokenizer") else ""
    vocabulary = f", {number('vocabulary')} tokens" if facts.get("vocabulary") else ""
    shards = f" in {facts['shards']} files" if (facts.get("shards") or 0) > 1 else ""
    form = {"gguf": f"GGUF, version {facts.get('gguf_version')}", "safetensors": f"safetensors{shards}"}
    bits = f" ({facts['bits_per_weight']} bits a weight)" if facts.get("bits_per_weight") else ""
    pairs = [
        ("model", facts["model"]),
        ("title", None if str(facts.get("name")).startswith("sha256-") else facts.get("name")),  # a folder of the store
        ("format", form.get(facts.get("format", ""))),
        ("architecture", facts.get("architecture")),
        ("shape", ", ".join(shape)),
        ("parameters", people(facts.get("parameters"))),
        ("quantization", mix + bits),
        ("context", f"{number('context_length')} tokens" if facts.get("context_length") else None),
        ("tokenizer", f"{facts['tokenizer']}{pre}{vocabulary}" if facts.get("tokenizer") else None),
        ("chat template", "yes" if facts.get("chat_template") else "no"),
        ("answers", told(facts.get("answers"))),
        ("made to", MADE_TO.get(facts.get("task", ""))),
        ("memory", memory(facts.get("memory"))),
        ("runs here", f"no: {facts['refused']}" if facts.get("refused") else None),
        ("licence", facts.get("license") or "not stated here: look where the model came from"),
        ("size", mb(facts["size"]) if facts.get("size") else None),
        ("digest", facts.get("digest")),
        ("source", facts.get("source")),
        ("pulled", facts.get("pulled_at")),
        ("path", facts["path"]),
    ]
    return [(name, clean(str(value))) for name, value in pairs if value]


def people(count: int | None) -> str | None:
    """134515008 as 134.5 M."""
    if not count:
        return None
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return str(count)


def clean(text: str) -> str:
    """Text from a file, made unable to steer the terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
