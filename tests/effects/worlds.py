"""The worlds of our own downstreams, for the kit that any downstream must pass."""

from __future__ import annotations

import contextlib
import unittest
from typing import Any, ClassVar

from fencepost.effects.base import Declaration, Guarantee
from fencepost.effects.http import Http
from fencepost.effects.smtp import Smtp
from fencepost.testing import DownstreamWorld, Scenario
from tests.effects.processes import HttpServer, MailServer

WINDOWS: dict[str, Any] = {"send_window": 1.0, "settle_time": 0.5}


class HttpWorld(DownstreamWorld):
    """One server process for all of them: each scenario has effect ids of its own.

    `first`: what happens to the requests before the one that acts (a reservation comes before its confirmation).
    """

    server: ClassVar[HttpServer]
    first: ClassVar[list[dict[str, Any]]] = []

    async def __aexit__(self, *_: Any) -> None:
        assert self.server.world()["faults"] == 0, "a fault that was asked for never came about"

    def declare(self, guarantee: Guarantee, **more: Any) -> Declaration:
        return Declaration(name="http", guarantee=guarantee, **WINDOWS, **more)

    def payload(self, number: int) -> Any:
        return {"name": "report", "number": number}

    async def count(self, effect_id: str, payload: Any) -> int:
        return len([each for each in self.server.executed if each["effect"] == effect_id])

    async def lose_answer(self) -> None:
        self.server.faults(*self.first, {"drop": True})

    async def act_late(self, seconds: float) -> None:
        self.server.faults(*self.first, {"delay": seconds})


class KeyedWorld(HttpWorld):
    async def downstream(self) -> Any:
        url = f"{self.server.url}/mail"
        declaration = self.declare(Guarantee.IDEMPOTENT, retention=3600.0)
        return Http(declaration, url, query=f"{url}/by-key/{{key}}")

    async def show_late(self, seconds: float) -> None:
        self.server.faults({"drop": True, "lag": seconds})

    async def forget(self) -> None:
        self.server.control(forget=True)


class KeyedUnaskedWorld(KeyedWorld):
    """Keys, and nobody to ask: an unknown outcome is cleared by repeating alone."""

    async def downstream(self) -> Any:
        return Http(self.declare(Guarantee.IDEMPOTENT, retention=3600.0), f"{self.server.url}/mail")


class DocumentWorld(HttpWorld):
    unsupported: ClassVar = {"show_late": "this server shows a version as soon as it has it"}

    async def downstream(self) -> Any:
        url = f"{self.server.url}/docs/{{name}}"
        return Http(self.declare(Guarantee.CONDITIONAL), url, method="PUT", history=f"{url}/history")


class RoomWorld(HttpWorld):
    unsupported: ClassVar = {"show_late": "this server shows a confirmation as soon as it has it"}
    first: ClassVar = [{}]

    async def downstream(self) -> Any:
        url = f"{self.server.url}/rooms"
        return Http(
            self.declare(Guarantee.RESERVATION),
            url,
            confirm=f"{url}/{{reservation}}/confirm",
            cancel=f"{url}/{{reservation}}/cancel",
            query=f"{url}/{{reservation}}",
        )


class PlainWorld(HttpWorld):
    async def downstream(self) -> Any:
        return Http(self.declare(Guarantee.NON_REPLAYABLE), f"{self.server.url}/plain")


class ReadingWorld(HttpWorld):
    async def downstream(self) -> Any:
        return Http(self.declare(Guarantee.READ_ONLY), f"{self.server.url}/plain?{{number}}", method="GET")


class SmtpWorld(DownstreamWorld):
    """What the server does with a mail is asked for by its recipient, so that a fault is one of the payload's."""

    server: ClassVar[MailServer]
    to = "fine"

    async def downstream(self) -> Any:
        declaration = Declaration(name="mail", **WINDOWS)
        return Smtp(declaration, "127.0.0.1", port=self.server.port, security="none", sender="agent@example.org")

    def payload(self, number: int) -> Any:
        return {"to": f"{self.to}@example.org", "subject": "Invoice", "text": f"number {number}"}

    async def count(self, effect_id: str, payload: Any) -> int:
        return len([mail for mail in self.server.mails if mail["headers"]["Fencepost-Effect"] == effect_id])

    async def lose_answer(self) -> None:
        self.to = "drop"

    async def act_late(self, seconds: float) -> None:
        self.to = f"slow{seconds}"


async def passed(scenario: Scenario) -> None:
    """What cannot be brought about in a world, or means nothing for its guarantee, is left out for a reason that the
    world or the kit names: nothing that whoever runs these tests could change, and so no skipped test."""
    with contextlib.suppress(unittest.SkipTest):
        await scenario()
