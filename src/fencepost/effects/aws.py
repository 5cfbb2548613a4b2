"""Create one resource at AWS under the service's own idempotency token: IDEMPOTENT, for as long as it remembers it.

    [downstreams.machines]
    type = "aws"
    service = "ec2"
    operation = "run_instances"
    region = "eu-central-1"
    retention = 86400

    await attempt.effect("worker", {"ImageId": "ami-…", "MinCount": 1, "MaxCount": 1}, using=machines)

The payload holds the operation's parameters as boto3 spells them, except for the token: that is the effect id, always,
and a payload that brings its own is refused. boto3 repeats nothing here.

What is known of each operation stands in `KNOWN`; any other needs `token`. Not promised: anything about a token whose
resource somebody deleted. EFS forgets it with the file system; EC2 keeps it for a day longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from fencepost.effects.amazon import Client, NotSent, Refused, Trouble, unsettled
from fencepost.effects.base import (
    Absent,
    Call,
    Checked,
    Declaration,
    Guarantee,
    Happened,
    NotFound,
    StillUnknown,
    Unknown,
)
from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel.digests import encode

__all__ = ["KNOWN", "Aws", "Service"]

DAY = 86_400.0
_KEY = "{key}"  # where the token goes in a question


@dataclass(frozen=True, slots=True)
class Service:
    """What a service documents of one operation and its token.

    `retention`: seconds for which it promises to remember a token; None: as long as the resource exists.
    `exists`: the refusals that say that this token was used, and so that it happened. `mismatch`: those that say that
    it was used with other parameters. `asks`, `about`, `holds`: the operation, its parameters and the field of the
    answer that find the resource by its token.
    """

    token: str
    retention: float | None = None
    exists: tuple[str, ...] = ()
    mismatch: tuple[str, ...] = ("IdempotentParameterMismatch",)
    asks: str | None = None
    about: Mapping[str, Any] | None = None
    holds: str = ""


KNOWN: Mapping[tuple[str, str], Service] = {
    ("efs", "create_file_system"): Service(
        token="CreationToken",
        exists=("FileSystemAlreadyExists",),
        asks="describe_file_systems",
        about={"CreationToken": _KEY},
        holds="FileSystems",
    ),
    ("ec2", "run_instances"): Service(
        token="ClientToken",
        retention=DAY,
        exists=("IdempotentInstanceTerminated",),
        asks="describe_instances",
        about={"Filters": [{"Name": "client-token", "Values": [_KEY]}]},
        holds="Reservations",
    ),
}


class Aws:
    """One operation of one service, as boto3 names them (`ec2`, `run_instances`).

    `token`: the parameter that takes the token; `exists`: error codes that say that a token was used before. Both are
    known for what stands in `KNOWN`. `endpoint`: the server, unless it is AWS's own.

    Raises InvalidRequest naming the setting that cannot be, and from `bind` the payload's field. Opens nothing.
    """

    def __init__(
        self,
        declaration: Declaration,
        service: str,
        operation: str,
        *,
        token: str | None = None,
        exists: Sequence[str] = (),
        region: str | None = None,
        endpoint: str | None = None,
        profile: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        timeout: float = 20.0,
    ) -> None:
        if declaration.guarantee != Guarantee.IDEMPOTENT or declaration.retention is None:
            raise InvalidRequest("guarantee", "aws is IDEMPOTENT")
        known = KNOWN.get((service, operation))
        if known is None:
            if token is None:
                raise InvalidRequest("token", f"name the parameter of {operation} that takes an idempotency token")
            known = Service(token, exists=tuple(exists))
        elif token not in (None, known.token):
            raise InvalidRequest("token", f"is {known.token} for {operation}")
        if known.retention is not None and declaration.retention > known.retention:
            raise InvalidRequest("retention", f"{service} promises {known.retention:g} seconds, not more")
        self.declaration = declaration
        self.operation = operation
        self._service = known
        self._client = Client(
            service,
            region=region,
            endpoint=endpoint,
            profile=profile,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            timeout=timeout,
        )
        self._checked = False

    async def bind(self, payload: Any) -> Any:
        """`payload` as it is. Raises InvalidRequest naming the field, Unavailable where boto3 is missing."""
        encode(payload, "payload")
        if not isinstance(payload, dict):
            raise InvalidRequest("payload", f"must be an object with the parameters of {self.operation}")
        for name in payload:
            if name.casefold() == self._service.token.casefold():
                raise InvalidRequest(f"payload.{name}", "must be left out: the token is the effect's own id")
        if not self._checked:
            try:
                known = await asyncio.to_thread(self._client.has_parameter, self.operation, self._service.token)
            except NotSent as error:
                raise Unavailable(str(error)) from None
            if not known:
                raise InvalidRequest("token", f"{self.operation} takes no {self._service.token}")
            self._checked = True
        return payload

    async def same(self, bound: Any, payload: Any) -> bool:
        """Whether `bound` is what `payload` was bound to: the very same."""
        return bool(bound == payload)

    async def execute(self, call: Call) -> Happened | Absent | Unknown:
        service = self._service
        if service.token in call.payload:
            return Absent("REFUSED", f"the payload brings its own {service.token}")
        try:
            answer = await self._client.ask(self.operation, call.payload | {service.token: call.key}, call)
        except Refused as error:
            if error.code in service.exists:
                return await self._existing(call, error)
            if error.code in service.mismatch:
                return Unknown(f"the token was used with other parameters: {error}", stored=True)
            return Absent("REFUSED", str(error))
        except Trouble as error:
            return unsettled(error)
        return Happened(_plain(answer))

    async def _existing(self, call: Call, error: Refused) -> Happened:
        """It happened before: the receipt is the resource, or, where that cannot be had, what the refusal says."""
        try:
            found = await self._find(call.key)
        except Trouble:
            found = None
        about = {name: said for name, said in error.response.items() if name not in ("Error", "ResponseMetadata")}
        return Happened(found if found is not None else _plain(about | {"code": error.code}))

    async def query(self, call: Call) -> Happened | NotFound | StillUnknown:
        """Looks for the resource by its token. What was made a moment ago may not show yet."""
        if self._service.asks is None:
            return StillUnknown(f"{self.operation} cannot be asked about by its token")
        try:
            found = await self._find(call.key)
        except Trouble as error:
            return StillUnknown(str(error))
        return NotFound() if found is None else Happened(found)

    async def _find(self, key: str) -> Any:
        """The resource that was made under this token, or None."""
        service = self._service
        if service.asks is None:
            return None
        answer = await self._client.ask(service.asks, _filled(service.about, key))
        found = answer.get(service.holds, [])
        return _plain(found[0]) if found else None

    async def check(self) -> Checked:
        """Can the service be asked, and does the operation take the token?"""
        says = [f"{self.operation} takes its token as {self._service.token}"]
        try:
            await self.bind({})
            if self._service.asks is not None:
                await self._find("0" * 64)
                says.append(f"{self._service.asks} finds what was made")
        except (InvalidRequest, Unavailable, Trouble) as error:
            return Checked(Guarantee.IDEMPOTENT, False, (str(error),))
        return Checked(Guarantee.IDEMPOTENT, True, tuple(says))

    async def close(self) -> None:
        await self._client.close()


def _filled(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return {name: _filled(one, key) for name, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, key) for one in value]
    return key if value == _KEY else value


def _plain(answer: Mapping[str, Any]) -> Any:
    """An answer as JSON: times as text, and without what belongs to the request alone."""
    return msgspec.to_builtins({name: said for name, said in answer.items() if name != "ResponseMetadata"})
