"""LitGPT's API objects for LitServe, which read a checkpoint's folder in whatever process they are set up.

Each has LitGPT's name, as LitGPT's ``run_server`` makes it by that name.
"""

from __future__ import annotations

from typing import Any

from litgpt.deploy import serve

from axo.integrations.litgpt import harmless


class _Harmless:
    """Mixed into each of them: nothing in the folder runs code."""

    def setup(self: Any, device: str) -> None:
        harmless.protect()
        with harmless.sandboxed_templates():
            super().setup(device)  # type: ignore[misc]


class SimpleLitAPI(_Harmless, serve.SimpleLitAPI):
    """A whole answer."""


class StreamLitAPI(_Harmless, serve.StreamLitAPI):
    """An answer piece by piece."""


class OpenAISpecLitAPI(_Harmless, serve.OpenAISpecLitAPI):
    """Whose requests are put into the checkpoint's own template.

    Raises:
        ValueError: (``decode_request``) The template wants what the sandbox does not give.
    """

    def decode_request(self, request: Any) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return super().decode_request(request)
        except TemplateError as error:
            raise ValueError(f"chat_template of tokenizer_config.json: {error}") from None


def replace() -> None:
    """Let ``run_server`` make these."""
    serve.SimpleLitAPI = SimpleLitAPI  # type: ignore[misc]
    serve.StreamLitAPI = StreamLitAPI  # type: ignore[misc]
    serve.OpenAISpecLitAPI = OpenAISpecLitAPI  # type: ignore[misc]
