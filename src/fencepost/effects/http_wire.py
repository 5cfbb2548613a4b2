"""One HTTP request, sent once. What left this machine, and what did not, is told apart exactly.

httpx2 underneath, with all that could repeat or reroute a call off: no retries, no redirects, no kept connections, no
cookies, no credentials from .netrc, no proxy from the environment unless asked for.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

from fencepost.effects.asking import says
from fencepost.effects.base import Deadline
from fencepost.effects.http_answers import Answer
from fencepost.errors import InvalidRequest

__all__ = ["CutOffError", "NotSentError", "TooLateError", "Wire"]


class TooLateError(Exception):
    """The look at send_by immediately before the first byte: not sent."""


class NotSentError(Exception):
    """No byte of the request left this machine."""


class CutOffError(Exception):
    """It left, wholly or in part, and no whole answer came back."""


class Wire:
    """How requests are sent. `verify`: True, or a file of certificates to trust."""

    def __init__(
        self, *, timeout: float, connect_timeout: float, proxy: str | None, trust_env: bool, verify: str | bool
    ) -> None:
        if verify is False:
            raise InvalidRequest("verify", "must be true, or a file of certificates: whoever answers gets the key")
        self.timeout = timeout
        self.connect_timeout = connect_timeout
        self.proxy = proxy
        self.trust_env = trust_env
        self.verify = verify
        self._ssl: ssl.SSLContext | None = None

    async def exchange(
        self,
        method: str,
        url: str,
        head: Mapping[str, str],
        content: bytes | None,
        *,
        send_by: Deadline,
        most: int,
    ) -> Answer:
        """The answer, its body read up to `most` bytes. Raises TooLateError, NotSentError or CutOffError."""
        httpx = library()
        sent = False
        left = send_by.remaining
        # What is not wholly on its way to the server by send_by is cut off: nothing may reach it later.
        window = asyncio.timeout(None if left == float("inf") else max(0.0, left))

        async def watch(step: str, info: dict[str, Any]) -> None:
            nonlocal sent
            if step.endswith("send_request_headers.started"):
                if send_by.expired:
                    raise TooLateError
                sent = True
            elif step.endswith(("send_request_body.complete", "send_request_body.failed")) and not window.expired():
                window.reschedule(None)

        timeout = httpx.Timeout(self.timeout, connect=self.connect_timeout).as_dict()
        request = httpx.Request(
            method, url, headers=dict(head), content=content, extensions={"trace": watch, "timeout": timeout}
        )
        try:
            async with window, self._client(httpx, url) as client:
                response = await client.send(request, stream=True, follow_redirects=False, auth=None)
                try:
                    body, cut = await _read(response, most)
                finally:
                    await response.aclose()
                headers = {name.lower(): value for name, value in response.headers.items()}
                return Answer(status=response.status_code, headers=headers, body=body, cut=cut)
        except (OSError, httpx.HTTPError) as error:
            if sent:
                raise CutOffError(says(error)) from error
            if isinstance(error, TimeoutError):
                raise TooLateError from error
            raise NotSentError(says(error)) from error

    def _client(self, httpx: Any, url: str) -> Any:
        """For one call: a connection of its own cannot have gone stale, and is closed with it."""
        secure = url.startswith("https:") or (self.proxy or "").startswith("https:")
        return httpx.AsyncClient(
            verify=self.context() if secure else False,
            trust_env=self.trust_env,
            proxy=self.proxy,
            follow_redirects=False,
            http2=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def context(self) -> ssl.SSLContext:
        if self._ssl is None:
            if self.verify is True:
                context: ssl.SSLContext = library().create_ssl_context(trust_env=self.trust_env)
                self._ssl = context
            else:
                self._ssl = ssl.create_default_context(cafile=str(self.verify))
        return self._ssl


async def _read(response: Any, most: int) -> tuple[bytes, bool]:
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > most:
            return body[:most], True
    return body, False


def library() -> Any:
    try:
        import httpx2
    except ImportError:
        raise InvalidRequest("type", "http needs httpx2: pip install 'fencepost[http]'") from None
    return httpx2
