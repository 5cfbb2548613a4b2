"""Mail by SMTP against a real server process that keeps the mail and then misbehaves."""

from __future__ import annotations

import asyncio
import smtplib
import socket
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from fencepost.effects.base import Absent, Call, Deadline, Declaration, Guarantee, Happened, Unknown, check_downstream
from fencepost.effects.smtp import Smtp
from fencepost.errors import InvalidRequest
from tests.effects.processes import MailServer, mail_server

MAIL = {"from": "Agent <agent@example.org>", "to": "fine@example.org", "subject": "Grüße", "text": ".one\n..two\nthree"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MailServer]:
    with mail_server(tmp_path_factory.mktemp("smtp")) as running:
        yield running


def smtp(server: MailServer, **more: Any) -> Smtp:
    return Smtp(Declaration(name="mail"), "127.0.0.1", port=server.port, **{"security": "none", **more})


def call(to: str | list[str] = "fine@example.org", **more: Any) -> Call:
    fields: dict[str, Any] = {
        "effect_id": uuid.uuid4().hex * 2,
        "task_id": "task",
        "slot": "send",
        "execution": 1,
        "epoch": 2,
        "generation": 5,
        "payload": MAIL | {"to": to},
        "send_by": Deadline.within(10.0),
    }
    return Call(**fields | more)


def mails(server: MailServer, made: Call) -> list[dict[str, Any]]:
    return [mail for mail in server.mails if mail["headers"]["Fencepost-Effect"] == made.effect_id]


async def test_a_mail_arrives_with_its_message_id_made_of_the_effect_id(server: MailServer) -> None:
    made = call(["fine@example.org", "Other <other@example.org>"])
    found = await smtp(server, domain="mail.example.org").execute(made)
    assert isinstance(found, Happened)
    assert found.receipt["message_id"] == f"<{made.effect_id}@mail.example.org>"
    [mail] = mails(server, made)
    assert mail["to"] == ["fine@example.org", "other@example.org"]
    assert mail["headers"]["Message-ID"] == found.receipt["message_id"]
    assert mail["headers"]["Fencepost-Generation"] == "5"
    assert mail["body"] == ".one\r\n..two\r\nthree\r\n", "dots at the beginning of a line stay what they are"


async def test_bcc_is_in_the_envelope_alone(server: MailServer) -> None:
    made = call(payload=MAIL | {"bcc": ["hidden@example.org"], "html": "<p>x</p>"})
    found = await smtp(server).execute(made)
    assert isinstance(found, Happened)
    assert found.receipt["message_id"] == f"<{made.effect_id}@example.org>", "without a domain, the sender's"
    [mail] = mails(server, made)
    assert mail["to"][-1] == "hidden@example.org"
    assert "hidden" not in str(mail["headers"])


@pytest.mark.parametrize("who", ["drop", "silent", "slow0.4"])
async def test_a_mail_that_was_kept_and_never_answered_is_unknown(server: MailServer, who: str) -> None:
    made = call(f"{who}@example.org")
    found = await smtp(server, timeout=0.2).execute(made)
    assert isinstance(found, Unknown)
    assert "end of the mail" in found.why
    async with asyncio.timeout(5):
        while not mails(server, made):
            await asyncio.sleep(0.02)
    assert len(mails(server, made)) == 1


async def test_a_connection_lost_after_the_final_dot_is_unknown_although_nothing_was_kept(server: MailServer) -> None:
    assert isinstance(await smtp(server).execute(call("cut@example.org")), Unknown)


async def test_421_after_the_final_dot_says_nothing(server: MailServer) -> None:
    assert isinstance(await smtp(server).execute(call("closing@example.org")), Unknown)


@pytest.mark.parametrize(("who", "said"), [("later", "451"), ("never", "554"), ("nobody", "550")])
async def test_what_the_server_refused_is_absent(server: MailServer, who: str, said: str) -> None:
    found = await smtp(server).execute(call(f"{who}@example.org"))
    assert isinstance(found, Absent)
    assert said in (found.detail or "")


async def test_where_one_recipient_is_refused_nobody_gets_the_mail(server: MailServer) -> None:
    made = call(["fine@example.org", "nobody@example.org"])
    assert isinstance(await smtp(server).execute(made), Absent)
    assert mails(server, made) == []


async def test_no_server_no_tls_and_no_login_are_absent(server: MailServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        gone = Smtp(Declaration(name="mail"), "127.0.0.1", port=taken.getsockname()[1], security="none")
        assert isinstance(await gone.execute(call()), Absent)
        assert not (await gone.check()).ok
    for more in ({"security": "starttls"}, {"security": "tls"}, {"user": "me", "password": "secret"}):
        made = call()
        assert isinstance(await smtp(server, **more).execute(made), Absent), more
        assert mails(server, made) == []


async def test_a_connection_lost_before_the_final_dot_is_absent() -> None:
    """The server goes away in the middle of the mail: without the dot it has none."""

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b"220 hello\r\n")
            for line in lines:
                if line.lower().startswith(b"data"):
                    connection.sendall(b"354 go on\r\n")
                    lines.readline()
                    break
                connection.sendall(b"250 fine\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the mail cannot wait there whole
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        mail = Smtp(Declaration(name="mail"), "127.0.0.1", port=listening.getsockname()[1], security="none")
        found = await mail.execute(call(payload=MAIL | {"text": ("x" * 70 + "\n") * 150_000}))
        thread.join(5)
    assert isinstance(found, Absent)


async def test_a_final_dot_that_could_not_be_seen_to_leave_is_unknown(
    server: MailServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error of a send says nothing about what had left before it."""
    send = smtplib.SMTP.send

    def sends_and_fails(session: smtplib.SMTP, data: bytes | str) -> None:
        send(session, data)
        if data == b".\r\n":
            raise ConnectionResetError

    monkeypatch.setattr(smtplib.SMTP, "send", sends_and_fails)
    assert isinstance(await smtp(server).execute(call()), Unknown)


async def test_past_send_by_no_mail_is_sent(server: MailServer) -> None:
    made = call(send_by=Deadline.within(-1))
    found = await smtp(server).execute(made)
    assert isinstance(found, Unknown)
    assert "send_by was over" in found.why
    assert mails(server, made) == []


@pytest.mark.parametrize("looks", [1, 2])
async def test_send_by_is_looked_at_before_data_and_before_the_final_dot(server: MailServer, looks: int) -> None:
    class Passing(Deadline):
        seen = 0

        @property
        def remaining(self) -> float:
            self.seen += 1
            return 1.0 if self.seen < looks else -1.0

    made = call(send_by=Passing(0.0))
    assert isinstance(await smtp(server).execute(made), Unknown)
    assert mails(server, made) == []


async def test_a_cancelled_call_cuts_the_connection_so_that_nothing_goes_on_unseen() -> None:
    """Cancelled before the final dot: the dot is never sent."""
    reached, received = threading.Event(), bytearray()

    def serve(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"220 hello\r\n")
            reached.set()
            while data := connection.recv(4096):
                received.extend(data)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        mail = Smtp(Declaration(name="mail"), "127.0.0.1", port=listening.getsockname()[1], security="none")
        task = asyncio.create_task(mail.execute(call()))
        while not reached.is_set():
            await asyncio.sleep(0.01)
        while not received:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive()
    assert b"\r\n.\r\n" not in received


async def test_check_logs_in_and_sends_nothing(server: MailServer) -> None:
    before = len(server.mails)
    checked = await smtp(server).check()
    assert checked.ok
    assert checked.guarantee == Guarantee.NON_REPLAYABLE
    assert len(server.mails) == before


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"to": None}, "payload.to"),
        ({"to": []}, "payload.to"),
        ({"to": "nowhere"}, "payload.to"),
        ({"to": "a@b.example\r\nBcc: x@y.example"}, "payload.to"),
        ({"to": ["fine@example.org", 7]}, "payload.to"),
        ({"from": "a@b.example, c@d.example"}, "payload.from"),
        ({"from": None}, "payload.from"),
        ({"subject": "a\nBcc: x@y.example"}, "payload.subject"),
        ({"subject": "a\x1b[2Jb"}, "payload.subject"),
        ({"subject": 7}, "payload.subject"),
        ({"text": None}, "payload.text"),
        ({"headers": {"Message-ID": "<mine>"}}, "payload.headers.Message-ID"),
        ({"headers": {"X-A": "b\r\nBcc: x@y.example"}}, "payload.headers.X-A"),
        ({"headers": {"X: A": "b"}}, "payload.headers"),
        ({"attach": "x"}, "payload.attach"),
    ],
)
async def test_a_payload_of_which_no_mail_can_be_made_is_refused_by_field(change: dict[str, Any], field: str) -> None:
    mail = Smtp(Declaration(name="mail"), "localhost", security="none")
    assert await mail.bind(MAIL) == MAIL
    with pytest.raises(InvalidRequest) as refused:
        await mail.bind(MAIL | change)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"security": "ssl"}, "security"),
        ({"host": "mail.example.org", "security": "none", "user": "me", "password": "secret"}, "security"),
        ({"user": "me"}, "user"),
        ({"sender": "nobody"}, "sender"),
        ({"domain": "a b"}, "domain"),
        ({"port": 70000}, "port"),
        ({"timeout": 0}, "timeout"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Smtp(Declaration(name="mail"), **{"host": "localhost", **settings})
    assert refused.value.field == field


def test_smtp_earns_no_more_than_non_replayable() -> None:
    with pytest.raises(InvalidRequest, match="cannot earn IDEMPOTENT"):
        Smtp(Declaration(name="mail", guarantee=Guarantee.IDEMPOTENT, retention=60.0), "localhost")
    assert check_downstream(Smtp(Declaration(name="mail"), "localhost")).guarantee == Guarantee.NON_REPLAYABLE
