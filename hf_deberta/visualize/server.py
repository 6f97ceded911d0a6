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


def attention_app(model: torch.nn.Module, tokenizer: Any, text: str = EXAMPLE) -> "Starlette":
    """Return an ASGI app: `/?text=...` is the page of that text, `/` the page of the given text."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse
    from starlette.routing import Route

    one_at_a_time = threading.Lock()  # hooks on the model and fast tokenizers are not safe in several threads

    def page(request: "Request") -> "HTMLResponse":
        shown = request.query_params.get("text", text)
        try:
            with one_at_a_time:
                data = page_data(model, tokenizer, shown)
        except ValueError as error:
            return HTMLResponse(render_page({"text": shown, "error": str(error), "served": True}), 422)
        return HTMLResponse(render_page({**data, "served": True}))

    return Starlette(routes=[Route("/", page)])


def serve_attention(model: torch.nn.Module, tokenizer: Any, text: str, host: str, port: int) -> None:
    """Serve the page until Ctrl-C."""
    import uvicorn

    uvicorn.run(attention_app(model, tokenizer, text), host=host, port=port, access_log=False)
