"""`/v1/embeddings`: https://platform.openai.com/docs/api-reference/embeddings."""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec
import numpy as np

from phases.appendix.api.answers import WideAnswer
from phases.appendix.api.endpoints import ignore
from phases.appendix.embeddings.pooling import MEAN
from phases.appendix.protocols.translation import NamedErrors
from serving.completion import Choice, ChoiceGroup, Order
from serving.endpoints import COPIED, Endpoint
from serving.http.answers import Answer
from serving.http.errors import ApiError
from serving.http.exchange import Exchange
from serving.http.schema import Generation
from serving.messages import Ready

WARNING = (
    b"means of the last hidden states of a generative model, which was not trained to compare texts: "
    b"for a search take an embedding model"
)


class EmbeddingRequest(Generation, kw_only=True, forbid_unknown_fields=False):
    """`POST /v1/embeddings`."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: None = None
    stream: Literal[False] | None = False


class EmbeddingAnswer(WideAnswer):
    """The vectors of all inputs, each of length 1."""

    def shape(self, choice: Choice) -> dict[str, Any]:
        """See `Answer`."""
        if not choice.order.notes[MEAN]:
            raise ApiError(
                400, "this engine gives no embeddings: it must be of phase 04 or later"
            )
        (vector,) = choice.order.notes[MEAN]
        values: Any = np.frombuffer(vector, np.float32).tolist()
        if self.request.encoding_format == "base64":
            values = base64.b64encode(vector).decode()
        return {"object": "embedding", "embedding": values, "index": choice.index}

    async def body(self, group: ChoiceGroup) -> bytes:
        """See `Answer`."""
        used = {"prompt_tokens": group.prompt_tokens, "total_tokens": group.prompt_tokens}
        found = {"object": "list", "data": list(map(self.shape, group.choices))}
        return msgspec.json.encode(found | {"model": self.model, "usage": used})


class Embeddings(Endpoint):
    """`/v1/embeddings`: a prompt an input."""

    body: type[Generation] = EmbeddingRequest
    answers: type[Answer] = EmbeddingAnswer
    prefix, source = "embd", "input"
    form = NamedErrors({"prompt": "input", "n": "input"})

    async def orders(self, exchange: Exchange, request: Any, ready: Ready) -> list[Order]:
        """See `Endpoint`. One token comes of each prompt, and no client sees it."""
        ignore(exchange, [name for name in COPIED if getattr(request, name) is not None])
        exchange.extra.append((b"x-ladder-warning", WARNING))
        one = EmbeddingRequest(input="", max_tokens=1, temperature=0.0)
        prompts = await self.encoded(request.input, ready)
        return [Order(ids, self.params(one, ids, ready, 1), wanted=(MEAN,)) for ids in prompts]
