"""boto3 without its own will: one request a call, sent by a thread, none after `send_by`, none after a cancellation.

boto3 repeats what failed and follows redirects by itself, and its functions block. Here its retries are off, and a
second request of one call is refused before it leaves, whatever the reason for it.

    answer = await client.ask("put_object", {...}, call)

raises what became of it: `NotSent` (nothing reached the service), `Refused` (it answered that it did nothing), `Lost`
(nobody knows).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
from typing import Any

from fencepost.effects.base import Absent, Call, Deadline, Unknown
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import check_seconds

__all__ = ["Client", "Lost", "NotSent", "Refused", "TooLate", "Trouble", "unsettled"]

THREADS = 8
# Refusals that are none: the request did not arrive whole, or the service does not say whether it acted.
_UNCLEAR = ("RequestTimeout", "RequestTimeoutException")


class Trouble(Exception):
    """A call that brought no answer to work with. The text is for people."""


class NotSent(Trouble):
    """Nothing reached the service: no connection, no credentials, wrong parameters."""


class TooLate(NotSent):
    """Its `send_by` was over before the first byte, or whoever called is gone."""


class Refused(Trouble):
    """The service answered that it did nothing (3xx, 4xx, 501). `response` is botocore's."""

    def __init__(self, status: int, code: str, says: str, response: dict[str, Any]) -> None:
        self.status = status
        self.code = code
        self.response = response
        super().__init__(f"{status} {code}: {says}" if says else f"{status} {code}")


class Lost(Trouble):
    """Nobody knows: a time-out, a dropped connection, a 5xx."""


class _Sending(threading.local):
    """What the request that this thread is about to send belongs to."""

    operation = ""
    call: Call | None = None
    gone: threading.Event | None = None
    send_by: Deadline = Deadline.none()
    sent = 0
    refused: Refused | None = None  # the answer to the request before


class Client:
    """One service, and as whom it is asked; what is None is left to boto3's own search (environment, profile, role).

    `timeout`: seconds for the service's answer. `settings` go to botocore's Config. Raises InvalidRequest naming the
    field. Opens nothing: at the first use, raises NotSent where boto3 is not installed.
    """

    def __init__(
        self,
        service: str,
        *,
        region: str | None = None,
        endpoint: str | None = None,
        profile: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        timeout: float = 20.0,
        **settings: Any,
    ) -> None:
        if (access_key is None) != (secret_key is None):
            raise InvalidRequest("access_key", "goes together with secret_key")
        if endpoint is not None and not endpoint.startswith(("https://", "http://")):
            raise InvalidRequest("endpoint", "must begin with https:// or http://")
        check_seconds(timeout, "timeout", above=True)
        self.service = service
        self._profile = profile
        self._account = {
            "aws_access_key_id": access_key,
            "aws_secret_access_key": secret_key,
            "aws_session_token": session_token,
            "region_name": region,
        }
        self._endpoint = endpoint
        self._timeout = timeout
        self._settings = settings
        self._making = threading.Lock()
        self._made: Any = None
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS, f"fencepost-{service}")
        self._now = _Sending()

    async def ask(self, operation: str, parameters: dict[str, Any], call: Call | None = None) -> dict[str, Any]:
        """The service's answer. With `call`, its marks travel along, and nothing leaves after its `send_by`.

        A cancelled caller leaves the thread behind: what it has not sent by then, it does not send any more.
        """
        gone = threading.Event()
        work = functools.partial(self._ask, operation, parameters, call, gone)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        except asyncio.CancelledError:
            gone.set()
            raise

    def _ask(
        self, operation: str, parameters: dict[str, Any], call: Call | None, gone: threading.Event
    ) -> dict[str, Any]:
        _, _, failures = _library()
        now = self._now
        now.call, now.gone, now.sent, now.refused = call, gone, 0, None
        now.send_by = Deadline.none() if call is None else call.send_by
        try:
            client = self._client()
            now.operation = client.meta.method_to_api_mapping[operation]
            answer: dict[str, Any] = getattr(client, operation)(**parameters)
            return answer
        except failures.ClientError as error:
            raise _answered(error.response) from None
        except Trouble:
            raise
        except (
            failures.EndpointConnectionError,
            failures.ConnectTimeoutError,
            failures.ProxyConnectionError,
        ) as error:
            raise NotSent(str(error)) from None
        except Exception as error:  # noqa: BLE001 - whatever it was: what counts is whether anything had left
            kind = Lost if now.sent else NotSent
            raise kind(f"{type(error).__name__}: {error}") from None
        finally:
            now.call = now.gone = now.refused = None

    def _client(self) -> Any:
        with self._making:
            if self._made is None:
                self._made = self._make()
            return self._made

    def _make(self) -> Any:
        botocore, config, _ = _library()
        session = botocore.Session(profile=self._profile)
        session.register_component("data_loader", _loader())
        client = session.create_client(
            self.service,
            endpoint_url=self._endpoint,
            config=config.Config(
                retries={"total_max_attempts": 1, "mode": "standard"},
                connect_timeout=min(5.0, self._timeout),
                read_timeout=self._timeout,
                max_pool_connections=THREADS,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                **self._settings,
            ),
            **self._account,
        )
        client.meta.events.register("before-send", self._before_send)
        client.meta.events.register("response-received", self._received)
        return client

    def _before_send(self, request: Any, event_name: str = "", **_: Any) -> None:
        """The last thing before the first byte, for every request that leaves."""
        now = self._now
        if not event_name.endswith(f".{now.operation}"):
            return  # what boto3 asks for first, such as a session
        if now.sent:
            # A redirect or a repeat of boto3's own making.
            raise now.refused or Lost("boto3 was about to send it again")
        if now.gone is not None and now.gone.is_set():
            raise TooLate("not sent: whoever called is gone")
        if now.send_by.expired:
            raise TooLate("not sent: its send_by was over")
        now.sent += 1
        # boto3 would wait up to a second for leave to send the body, which is small here.
        request.headers.pop("Expect", None)
        if now.call is not None:
            agent = request.headers.get("User-Agent", b"")
            plain = agent.decode() if isinstance(agent, bytes) else agent
            marks = " ".join(f"{name}/{value}" for name, value in now.call.marks.items())
            request.headers["User-Agent"] = f"{plain} {marks}".strip()

    def _received(self, parsed_response: dict[str, Any] | None = None, **_: Any) -> None:
        if parsed_response is not None and "Error" in parsed_response:
            answered = _answered(parsed_response)
            self._now.refused = answered if isinstance(answered, Refused) else None

    def has_parameter(self, operation: str, name: str) -> bool:
        """Whether the operation exists and takes this parameter."""
        client = self._client()
        method = client.meta.method_to_api_mapping.get(operation)
        if method is None:
            return False
        shape = client.meta.service_model.operation_model(method).input_shape
        return shape is not None and name in shape.members

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._made is not None:
            self._made.close()


def _library() -> tuple[Any, Any, Any]:
    try:
        from botocore import config, exceptions, session
    except ImportError:
        raise NotSent("boto3 is not installed: pip install 'fencepost[aws]'") from None
    return session, config, exceptions


@functools.cache
def _loader() -> Any:
    """The services' descriptions, read once for all clients of this process."""
    from botocore import loaders, session

    return loaders.create_loader(session.Session().get_config_variable("data_path"))


def _answered(response: dict[str, Any]) -> Refused | Lost:
    about, said = response.get("ResponseMetadata", {}), response.get("Error", {})
    status, code = int(about.get("HTTPStatusCode", 0)), str(said.get("Code", ""))
    says = str(said.get("Message", ""))
    if (300 <= status < 500 and status != 408 and code not in _UNCLEAR) or status == 501:
        return Refused(status, code, says, response)
    return Lost(f"{status} {code}: {says}")


def unsettled(trouble: Trouble) -> Absent | Unknown:
    """What a call found that ended in `trouble`, where the service's codes need no closer look."""
    if isinstance(trouble, TooLate | Lost):
        return Unknown(str(trouble))
    return Absent("REFUSED", str(trouble))
