"""Changes to mlx-lm's HTTP server: clear errors for requests that can never fit, and a longer listen backlog.

mlx-lm answers every error of a request with status 404. A prompt that exceeds the pool is a client error, so it is answered with
status 400 and an error object in the form of OpenAI's API. The queue of connections that are not accepted yet holds 5 connections by
default; if more clients connect at the same moment, the kernel resets connections.
"""
from __future__ import annotations

import functools
import http.server
import json
import logging
import sys
from typing import Any, Callable

from .._library import DoesNotFit
from .pool import Pool

BACKLOG = 1024  # maximum number of connections that wait to be accepted; the kernel may lower it


class _Rejected(BaseException):
    """Carries DoesNotFit past handle_completion(), which converts every Exception to status 404."""

    def __init__(self, error: DoesNotFit):
        self.error = error


class HTTPServer(http.server.ThreadingHTTPServer):
    """The HTTP server of mlx-lm with a longer listen backlog."""

    request_queue_size = BACKLOG


def error_body(error: DoesNotFit) -> bytes:
    """Returns the body of an error response in the form of OpenAI's API."""
    return json.dumps({"error": {"message": error.message, "type": "invalid_request_error", "param": None,
                                 "code": "context_length_exceeded"}}).encode()


def _replacements(server: Any, pool_of: Callable[[Any, Any], Pool | None]) -> list[tuple[Any, str, Any]]:
    """Returns the attributes to replace, as triples of owner, name and new value."""
    generator, handler = server.ResponseGenerator, server.APIHandler
    tokenize, generate, complete, run = generator._tokenize, generator.generate, handler.handle_completion, server._run_http_server

    @functools.wraps(tokenize)
    def _tokenize(self: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        found = tokenize(self, tokenizer, request, args)
        pool = pool_of(self.model_provider.model, None)
        if pool is not None:
            n_prompt = len(found[0])
            pool.check_request(n_prompt, 1)
            if n_prompt + args.max_tokens > pool.max_tokens:
                logging.warning("flatkv: max_tokens of a request was lowered from %d to %d, the number of tokens that fit into the pool after the prompt",
                                args.max_tokens, pool.max_tokens - n_prompt)
                args.max_tokens = pool.max_tokens - n_prompt
        return found

    @functools.wraps(generate)
    def generate_response(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return generate(self, *args, **named)
        except DoesNotFit as error:
            raise _Rejected(error) from None

    @functools.wraps(complete)
    def handle_completion(self: Any, *args: Any, **named: Any) -> None:
        try:
            complete(self, *args, **named)
        except _Rejected as rejected:
            body = error_body(rejected.error)
            self._set_completion_headers(400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    @functools.wraps(run)
    def _run_http_server(*args: Any, **named: Any) -> None:
        if len(args) < 4:  # host, port, response generator, server class
            named.setdefault("server_class", HTTPServer)
        run(*args, **named)

    return [(generator, "_tokenize", _tokenize), (generator, "generate", generate_response), (handler, "handle_completion", handle_completion),
            (server, "_run_http_server", _run_http_server)]


class ServerPatch:
    """The replaced functions of mlx_lm.server, if that module is imported."""

    def __init__(self, pool_of: Callable[[Any, Any], Pool | None]):
        self.pool_of = pool_of
        self._saved: list[tuple[Any, str, Any]] = []

    def apply(self) -> None:
        """Replaces the functions once. Does nothing while mlx_lm.server is not imported completely."""
        server = sys.modules.get("mlx_lm.server")
        if self._saved or not all(hasattr(server, name) for name in ("ResponseGenerator", "APIHandler", "_run_http_server")):
            return
        for owner, name, value in _replacements(server, self.pool_of):
            self._saved.append((owner, name, getattr(owner, name)))
            setattr(owner, name, value)

    def undo(self) -> None:
        """Restores the functions."""
        for owner, name, value in self._saved:
            setattr(owner, name, value)
        self._saved.clear()
