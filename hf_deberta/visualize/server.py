"""The attention page as a local website with a field for the text. Needs Starlette and uvicorn, the extra `page`."""

import threading
from typing import TYPE_CHECKING, Any

import torch

from .page import page_data, render_page

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse

EXAMPLE = "The new [MASK] opened beside the new [MASK]."


def attention_app(model: torch.nn.Module, tokenizer: Any, text: str = EXAMPLE, pair: str | None = None) -> "Starlette":
    """Return an ASGI app: `/?text=...&pair=...` is the page of these, `/` the page of the given text, or pair."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    one_at_a_time = threading.Lock()  # hooks on the model and fast tokenizers are not safe in several threads

    def page(request: "Request") -> "HTMLResponse":
        query = request.query_params
        first, second = (query["text"], query.get("pair")) if "text" in query else (text, pair)
        form = {"first": first, "second": second or "", "served": True}
        try:
            with one_at_a_time:
                data = page_data(model, tokenizer, first, second or None)
        except ValueError as error:
            return HTMLResponse(render_page({"error": str(error), **form}), 422)
        return HTMLResponse(render_page({**data, **form}))

    return Starlette(routes=[Route("/", page)])


def serve_attention(
    model: torch.nn.Module, tokenizer: Any, text: str, host: str, port: int, pair: str | None = None
) -> None:
    """Serve the page until Ctrl-C."""
    import uvicorn

    uvicorn.run(attention_app(model, tokenizer, text, pair), host=host, port=port, access_log=False)
