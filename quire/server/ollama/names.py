"""Names as Ollama's routes know them, over one server: those of its models, of their adapters, and those that were made here by /api/create.

A made name is the served model whose bytes it shares, with defaults of its own, which only these routes know; where it has an adapter or a template, a
request that chooses it is answered with those. `made` has the adapters that this dialect has loaded, and for which model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from starlette.requests import Request

from quire.observe.errors import BadRequest, NotFound, QuireError
from quire.server.callers import caller_of
from quire.server.reading import Reading
from quire.server.served import Model, Served, bare_name, canonical
from quire.server.server import Server
from quire.weights.store.manifest import Defaults, Manifest

if TYPE_CHECKING:
    from quire.chat.completer import Completer

MAX_TEMPLATES = 32  # of made names that are kept compiled


class Names:
    """What the names in requests mean."""

    def __init__(self, server: Server):
        self.server = server
        self.made: dict[str, Model] = {}
        self._completers: dict[tuple[str, str], Completer] = {}  # by model and template

    def get(self, name: str) -> Model | None:
        """The served model of that name; made names and adapters are none."""
        return self.server.models.get(name)

    def adapter(self, name: str) -> tuple[Model, str] | None:
        """The loaded adapter of that name, those included that only these routes know."""
        for own in (name, bare_name(name)):
            for model in self.server.models:
                if own in model.loaded_adapters:
                    return model, own
        return None

    def manifest(self, name: str) -> Manifest | None:
        """What the store has by that name."""
        try:
            return self.server.store.get(name) if self.server.store is not None else None
        except QuireError:
            return None  # no name of a model, or a manifest that cannot be read: `quire list` says so

    def model_at(self, path: str) -> Model | None:
        """The first served model whose file that is."""
        return next((model for model in self.server.models if model.path == path), None)

    def loaded_from(self, name: str) -> Model | None:
        """The first served model that was loaded by that name of the store, whatever it is called here."""
        return next((model for model in self.server.models if model.source == name), None)

    def defaults(self, name: str) -> tuple[Model, Defaults] | None:
        """What a name that was made from a served model says by default, and which model that is; None for any other name."""
        manifest, store = self.manifest(canonical(name)), self.server.store
        if manifest is None or store is None or manifest.defaults is None:
            return None
        model = self.model_at(str(store.blob(manifest)))
        return None if model is None else (model, manifest.defaults)

    def choose(self, name: str | None) -> tuple[Model, str, Defaults | None]:
        """The model, the adapter and the defaults that a request means; 404 with what is served, where it means nothing."""
        served = self.server.models.names
        if not name:
            raise BadRequest("model is missing", cure=f"{served} is served here", param="model")
        made = self.defaults(name)
        found = self.adapter(name)
        if found is not None:
            return *found, None if made is None else made[1]
        model = self.get(name)
        if model is not None and (made is None or made[0].path == model.path or name in model.names):
            return model, "", made[1] if made is not None and made[0].path == model.path else None
        instead = self.server.models.instead
        if made is None and instead is not None:
            return instead, "", None
        if made is None:
            raise NotFound(
                f"model {name[:128]!r} is not served here",
                cure=f"{served} is; `quire serve NAME --port PORT` starts another server",
                param="model",
                code="model_not_found",
            )
        if made[1].adapter:
            raise BadRequest(
                f"the adapter of {name[:128]!r} is not loaded: this server was started without room for it, or it did not fit",
                cure="start the server again; its first lines tell what could not be loaded",
                param="model",
                code="adapter_not_loaded",
            )
        return made[0], "", made[1]

    async def settled(self, name: str | None) -> None:
        """Wait until what the name means is loaded: a request waits here. What is no model's name may be an adapter's, which is known when the engines have it."""
        model = self.get(name) if name else None
        for one in self.server.models if model is None else (model,):
            await one.settled()

    async def resolve(self, request: Request, name: str | None) -> tuple[Served, Defaults | None]:
        """What the request is answered by, and what its name says by default."""
        model, adapter, made = self.choose(name)
        await model.settled()
        served = model.served(adapter, caller_of(request.scope), Reading(request.scope))
        return self._with_template(served, made), made

    def _with_template(self, served: Served, made: Defaults | None) -> Served:
        """Prompts and answers are written and read by the name's own template, if it has one."""
        if made is None or not made.template:
            return served
        key = served.model.name, made.template
        if key not in self._completers:
            from quire.chat.completer import Completer
            from quire.chat.templates.template import ChatTemplate

            tokenizer = served.tokenizer
            bos, eos = ("" if i is None else tokenizer.token_text(i) for i in (tokenizer.bos_id, tokenizer.eos_id))
            while len(self._completers) >= MAX_TEMPLATES:
                del self._completers[next(iter(self._completers))]
            template = ChatTemplate(made.template, bos, eos, where="template")
            own = Completer(served.client, tokenizer, template, served.info)
            self._completers[key] = own
        return replace(served, completer=self._completers[key])
