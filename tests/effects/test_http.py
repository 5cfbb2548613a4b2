"""HTTP downstreams against a real server process that drops, delays, forgets and keeps."""

from __future__ import annotations

import asyncio
import json
import socket
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from fencepost.effects.base import (
    Absent,
    Call,
    Deadline,
    Declaration,
    Gone,
    Guarantee,
    Happened,
    NotFound,
    Standing,
    StillUnknown,
    Unknown,
    check_downstream,
)
from fencepost.effects.http import Http
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import MAX_RECEIPT_BYTES
from fencepost.kernel.digests import encode
from tests.effects.processes import HttpServer, http_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with http_server(tmp_path_factory.mktemp("http")) as running:
        yield running


def call(payload: Any = None, *, within: float = 10.0, **more: Any) -> Call:
    effect_id = uuid.uuid4().hex * 2
    fields: dict[str, Any] = {
        "effect_id": effect_id,
        "task_id": "task 1",
        "slot": "send",
        "execution": 1,
        "epoch": 2,
        "generation": 5,
        "payload": {"to": "a", "name": effect_id[:8]} if payload is None else payload,
        "send_by": Deadline.within(within),
    }
    return Call(**fields | more)


def keyed(server: HttpServer, **more: Any) -> Http:
    declaration = Declaration(name="mail", guarantee=Guarantee.IDEMPOTENT, retention=3600.0)
    return Http(declaration, f"{server.url}/mail", query=f"{server.url}/mail/by-key/{{key}}", **more)


def plain(server: HttpServer, path: str = "/plain", **more: Any) -> Http:
    return Http(Declaration(name="plain"), f"{server.url}{path}", **more)


def documents(server: HttpServer, **more: Any) -> Http:
    declaration = Declaration(name="docs", guarantee=Guarantee.CONDITIONAL)
    return Http(declaration, f"{server.url}/docs/{{name}}", method="PUT", **more)


def rooms(server: HttpServer) -> Http:
    base = f"{server.url}/rooms"
    return Http(
        Declaration(name="rooms", guarantee=Guarantee.RESERVATION),
        base,
        confirm=f"{base}/{{reservation}}/confirm",
        cancel=f"{base}/{{reservation}}/cancel",
        query=f"{base}/{{reservation}}",
    )


def executions(server: HttpServer, made: Call) -> int:
    return len([each for each in server.executed if each["effect"] == made.effect_id])


# what is sent ------------------------------------------------------------------------------------


async def test_every_call_carries_key_fence_and_deadline_and_the_same_bytes_each_time(server: HttpServer) -> None:
    made = call({"b": 1.0, "a": "ü"})
    mail = keyed(server, headers={"X-Task": "{task}"})
    assert isinstance(await mail.execute(made), Happened)
    sent = server.world()["requests"][-1]
    head = sent["headers"]
    assert head["Idempotency-Key"] == f'"{made.effect_id}"'
    assert (head["Fencepost-Effect"], head["Fencepost-Epoch"], head["Fencepost-Generation"]) == (
        made.effect_id,
        "2",
        "5",
    )
    assert head["X-Task"] == "task 1"
    assert sent["body"] == '{"a":"ü","b":1}'.encode().decode()
    assert "Fencepost-Send-By" not in head, "no store's time is known of a deadline that was made up here"
    known = Deadline.after(0.0, 5_000_000, 1_700_000_000_000_000, lambda: 0.0)
    await mail.execute(call(send_by=known))
    assert server.world()["requests"][-1]["headers"]["Fencepost-Send-By"] == "1700000000.000"


async def test_the_key_may_be_bare_and_under_another_header(server: HttpServer) -> None:
    mail = plain(server, key_header="X-Request-Key", key_quoted=False)
    made = call()
    await mail.execute(made)
    assert server.world()["requests"][-1]["headers"]["X-Request-Key"] == made.effect_id


async def test_a_repeat_is_answered_from_the_key_with_the_same_receipt(server: HttpServer) -> None:
    mail, made = keyed(server), call()
    first = await mail.execute(made)
    second = await mail.execute(made)
    assert isinstance(first, Happened)
    assert isinstance(second, Happened)
    assert first.receipt["body"] == second.receipt["body"]
    assert first.receipt["status"] == 201
    assert executions(server, made) == 1
    assert isinstance(await mail.query(made), Happened)
    assert await mail.query(call()) == NotFound()


async def test_forms_text_and_a_part_of_the_payload(server: HttpServer) -> None:
    await plain(server, body="form").execute(call({"a": "x y&", "n": 3}))
    assert server.world()["requests"][-1]["body"] == "a=x+y%26&n=3"
    await plain(server, body="text").execute(call("plain"))
    assert server.world()["requests"][-1]["body"] == "plain"
    await plain(server, body_from="part").execute(call({"part": [1], "to": "x"}))
    assert server.world()["requests"][-1]["body"] == "[1]"


# failures ----------------------------------------------------------------------------------------


async def test_a_refused_connection_and_an_unknown_host_are_absent() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        found = await Http(Declaration(name="x"), url).execute(call())
    assert isinstance(found, Absent)
    assert found.why == "REFUSED"
    assert "not sent" in (found.detail or "")
    found = await Http(Declaration(name="x"), "http://no-such-host.invalid/").execute(call())
    assert isinstance(found, Absent)


async def test_a_handshake_that_fails_is_absent_since_no_request_was_sent(server: HttpServer) -> None:
    found = await Http(Declaration(name="x"), server.url.replace("http:", "https:") + "/plain").execute(call())
    assert isinstance(found, Absent)


@pytest.mark.parametrize("fault", ["drop", "refuse", "cut"])
async def test_an_answer_that_was_lost_is_unknown_whether_it_acted_or_not(server: HttpServer, fault: str) -> None:
    server.faults({fault: True})
    made = call()
    found = await plain(server).execute(made)
    assert isinstance(found, Unknown)
    assert "no whole answer" in found.why
    assert executions(server, made) == (0 if fault == "refuse" else 1)


async def test_nothing_is_sent_again_by_itself(server: HttpServer) -> None:
    before = len(server.world()["requests"])
    for fault in ({"drop": True}, {"refuse": True}, {"status": 503}, {"status": 429}):
        server.faults(fault)
        await plain(server, method="PUT" if "drop" in fault else "POST").execute(call())
    # The server's PUT knows documents alone; what counts is one request each.
    assert len(server.world()["requests"]) == before + 4


async def test_a_time_out_is_unknown_and_the_server_acts_all_the_same(server: HttpServer) -> None:
    server.faults({"delay": 0.3})
    made = call()
    mail = keyed(server, timeout=0.1)
    assert isinstance(await mail.execute(made), Unknown)
    found = await mail.query(made)
    assert isinstance(found, StillUnknown)
    assert found.in_progress
    repeated = await mail.execute(made)
    assert isinstance(repeated, Unknown), "409: the first is in progress"
    assert repeated.retry_after == 0.0
    await until(lambda: executions(server, made) == 1)
    assert isinstance(await mail.execute(made), Happened)
    assert executions(server, made) == 1


async def until(true: Any) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("status", [500, 502, 503, 504, 408, 409, 423, 424, 301, 302])
async def test_statuses_that_say_nothing_are_unknown(server: HttpServer, status: int) -> None:
    server.faults({"status": status})
    assert isinstance(await plain(server).execute(call()), Unknown)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 412, 413, 422, 429, 307, 308])
async def test_statuses_that_refuse_are_absent(server: HttpServer, status: int) -> None:
    server.faults({"status": status, "body": {"type": "about:blank", "title": "No", "detail": "not today"}})
    found = await plain(server).execute(call())
    assert isinstance(found, Absent)
    assert found.why == "REFUSED"
    assert "not today" in (found.detail or "")


async def test_a_refusal_that_the_downstream_declares_unsure_is_unknown(server: HttpServer) -> None:
    server.faults({"status": 400})
    assert isinstance(await plain(server, unsure=[400]).execute(call()), Unknown)


async def test_409_is_what_the_downstream_says_it_is(server: HttpServer) -> None:
    server.faults({"status": 409}, {"status": 409})
    assert isinstance(await plain(server, conflict="refused").execute(call()), Absent)
    assert isinstance(await plain(server).execute(call()), Unknown)


async def test_a_key_that_was_used_for_another_payload_closes_repeat(server: HttpServer) -> None:
    mail, made = keyed(server), call()
    await mail.execute(made)
    other = call({"to": "b"}, effect_id=made.effect_id)
    found = await mail.execute(other)
    assert isinstance(found, Unknown)
    assert found.stored
    assert executions(server, made) == 1
    server.faults({"status": 422, "body": {"detail": [{"loc": ["to"]}]}})
    assert isinstance(await mail.execute(call()), Absent), "422 that is not about the key is a refusal"


async def test_a_failure_that_is_kept_under_the_key_closes_repeat(server: HttpServer) -> None:  # X38
    mail, made = keyed(server), call()
    server.faults({"status": 500, "keep": True})
    first = await mail.execute(made)
    assert isinstance(first, Unknown)
    assert not first.stored, "the first failure may pass"
    second = await mail.execute(made)
    assert isinstance(second, Unknown)
    assert second.stored, "it was the same again"
    assert executions(server, made) == 0
    server.faults({"status": 503, "headers": {"Idempotent-Replayed": "true"}})
    marked = await mail.execute(call())
    assert isinstance(marked, Unknown)
    assert marked.stored, "Idempotent-Replayed says so"


async def test_a_failure_that_comes_back_word_for_word_under_the_key_is_kept_too(server: HttpServer) -> None:
    mail, made = keyed(server), call()
    server.faults({"status": 500, "keep": True}, {"headers": {}})
    assert [(await mail.execute(made)).stored for _ in range(2)] == [False, True]  # type: ignore[union-attr]
    fresh = call()
    server.faults({"status": 503}, {"status": 503}, {"status": 500})
    assert [(await mail.execute(fresh)).stored for _ in range(3)] == [False] * 3  # type: ignore[union-attr]
    server.faults({"status": 500})
    declared = await keyed(server, stores_failures=True).execute(call())
    assert isinstance(declared, Unknown)
    assert declared.stored


async def test_redirects_are_not_followed(server: HttpServer) -> None:
    made = call()
    found = [await plain(server, f"/redirect/{status}").execute(made) for status in (302, 307, 303)]
    assert [type(each) for each in found] == [Unknown, Absent, Happened]
    assert executions(server, made) == 0


# time --------------------------------------------------------------------------------------------


async def test_a_call_past_its_send_by_sends_not_a_byte(server: HttpServer) -> None:  # X02
    before = len(server.world()["requests"])
    found = await plain(server).execute(call(send_by=Deadline.within(-0.001)))
    assert isinstance(found, Unknown)
    assert "send_by was over" in found.why
    assert len(server.world()["requests"]) == before


async def test_the_look_at_send_by_comes_after_the_connection_was_made(server: HttpServer) -> None:
    """Whatever time connecting takes counts: the look is the last thing before the first byte."""
    left = iter([60.0])

    class Passing(Deadline):
        @property
        def remaining(self) -> float:
            return next(left, -1.0)

    before = len(server.world()["requests"])
    found = await plain(server).execute(call(send_by=Passing(0.0)))
    assert isinstance(found, Unknown)
    assert "send_by was over" in found.why
    assert len(server.world()["requests"]) == before


async def test_a_body_that_is_not_on_its_way_by_send_by_is_cut_off() -> None:
    """A server that takes no bytes: what is still to be sent at send_by is never sent."""
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        mail = Http(Declaration(name="x"), f"http://127.0.0.1:{deaf.getsockname()[1]}/")
        found = await asyncio.wait_for(mail.execute(call(b"x" * 20_000_000, within=0.2)), 5)
    assert isinstance(found, Unknown)
    assert "no whole answer" in found.why


# receipts ----------------------------------------------------------------------------------------


async def test_a_long_answer_is_cut_with_a_mark_and_its_receipt_fits(server: HttpServer) -> None:
    server.faults({"body": "\x01" * 300_000}, {"body": {"text": "x" * 300_000}}, {"body": ["y" * 1000] * 250})
    for cut in (True, True, False):
        found = await plain(server).execute(call())
        assert isinstance(found, Happened)
        assert len(encode(found.receipt, "receipt", MAX_RECEIPT_BYTES).data) <= MAX_RECEIPT_BYTES
        assert found.receipt.get("cut", False) is cut


async def test_numbers_that_json_cannot_carry_are_kept_as_they_read(server: HttpServer) -> None:  # B35
    server.faults({"body": {"id": 2**60 + 1}}, {"body": float("nan")})
    found = [await plain(server).execute(call()) for _ in range(2)]
    assert [each.receipt["body"] for each in found if isinstance(each, Happened)] == [f'{{"id": {2**60 + 1}}}', "NaN"]


# CONDITIONAL -------------------------------------------------------------------------------------


async def test_a_write_is_conditional_on_the_version_that_was_bound(server: HttpServer) -> None:
    docs, made = documents(server), call()
    precondition = await docs.precondition(made.payload)
    assert precondition == "*"
    first = await docs.execute(call(made.payload, effect_id=made.effect_id, precondition="*"))
    assert isinstance(first, Happened)
    assert first.etag == '"v1"'
    late = await docs.execute(call(made.payload, precondition="*"))
    assert isinstance(late, Absent)
    assert late.why == "PRECONDITION"
    assert await docs.precondition(made.payload) == '"v1"'
    assert isinstance(await docs.execute(call(made.payload, precondition='"v1"')), Happened)


async def test_what_the_resource_tells_of_an_unknown_write(server: HttpServer) -> None:
    docs, complete = documents(server), documents(server, history=f"{server.url}/docs/{{name}}/history")
    made = call(precondition="*")
    assert await docs.query(made) == Standing()
    server.faults({"drop": True})
    assert isinstance(await docs.execute(made), Unknown)
    assert isinstance(await docs.query(made), Happened)
    server.control(third=made.payload["name"])
    moved = await docs.query(made)
    assert isinstance(moved, StillUnknown), "X05: no mark is left, and that proves nothing"
    assert moved.moved_on
    assert isinstance(await complete.query(made), Happened), "its complete history names the effect"
    lost = call(made.payload, precondition="*")
    assert await complete.query(lost) == Gone("MOVED_ON", "its complete history lacks the effect")
    missing = documents(server, history=f"{server.url}/redirect/{{name}}")
    found = await missing.query(lost)
    assert isinstance(found, StillUnknown), "a history that cannot be read is not complete"
    assert not found.moved_on


async def test_what_must_be_created_needs_no_look(server: HttpServer) -> None:
    docs = documents(server, create_only=True)
    assert await docs.precondition({"name": "anything"}) == "*"


async def test_a_server_without_strong_etags_is_not_conditional(server: HttpServer) -> None:
    declaration = Declaration(name="docs", guarantee=Guarantee.CONDITIONAL)
    docs = Http(declaration, f"{server.url}/plain", method="PUT", version_url=f"{server.url}/control")
    with pytest.raises(InvalidRequest, match="no strong ETag"):
        await docs.precondition({})


# RESERVATION -------------------------------------------------------------------------------------


async def test_a_reservation_is_confirmed_once_however_often_it_is_asked(server: HttpServer) -> None:
    hotel, made = rooms(server), call()
    reserved = await hotel.reserve(made)
    assert isinstance(reserved, str)
    stored = call(made.payload, effect_id=made.effect_id, reservation_id=reserved)
    assert isinstance(await hotel.query(stored), StillUnknown)
    server.faults({"drop": True})
    assert isinstance(await hotel.confirm(stored), Unknown)
    assert isinstance(await hotel.query(stored), Happened)
    assert isinstance(await hotel.confirm(stored), Happened)
    assert executions(server, made) == 1
    assert isinstance(await hotel.cancel(stored), StillUnknown), "what was confirmed cannot be cancelled"


async def test_a_cancelled_or_lapsed_reservation_is_gone_for_good(server: HttpServer) -> None:
    hotel = rooms(server)
    cancelled = call(reservation_id=await hotel.reserve(call()))
    assert isinstance(await hotel.cancel(cancelled), Gone)
    assert await hotel.confirm(cancelled) == Absent(
        "RESERVATION_CANCELLED", f'HTTP 410: {{"id":{cancelled.reservation_id},"state":"cancelled"}}'
    )
    found = await hotel.query(cancelled)
    assert isinstance(found, Gone)
    assert found.ground == "RESERVATION_CANCELLED"
    lapsed = call(reservation_id=await hotel.reserve(call()))
    server.control(lapse=True)
    found = await hotel.query(lapsed)
    assert isinstance(found, Gone)
    assert found.ground == "RESERVATION_LAPSED"


async def test_what_cannot_be_reserved_is_refused(server: HttpServer) -> None:
    server.faults({"status": 409}, {"drop": True})
    assert isinstance(await rooms(server).reserve(call()), Absent)
    assert isinstance(await rooms(server).reserve(call()), Absent)


# settings ----------------------------------------------------------------------------------------


async def test_a_payload_that_lacks_what_a_template_needs_is_refused_before_anything_is_prepared() -> None:
    url = "https://example.org/orders/{order.id}/refund?reason={reason}"
    http = Http(Declaration(name="x"), url, headers={"X-Who": "{who}"})
    good = {"order": {"id": 7}, "reason": "a/b ?&", "who": "me"}
    assert await http.bind(good) == good
    assert http.url.fill(good, {}) == "https://example.org/orders/7/refund?reason=a%2Fb%20%3F%26"
    for change, field in (
        ({"order": {}}, r"payload\.order\.id: is missing"),
        ({"order": {"id": ""}}, r"payload\.order\.id: '' cannot stand"),
        ({"order": {"id": ".."}}, r"payload\.order\.id: '\.\.' cannot stand"),
        ({"order": {"id": 1.5}}, r"payload\.order\.id: must be text or a whole number"),
        ({"order": {"id": True}}, r"payload\.order\.id: must be text or a whole number"),
        ({"who": "me\r\nX-Evil: 1"}, r"payload\.who: a header holds printable ASCII"),
        ({"reason": None}, r"payload\.reason"),
    ):
        with pytest.raises(InvalidRequest, match=field):
            await http.bind(good | change)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"url": "ftp://example.org/"}, "url"),
        ({"url": "https://{host}/"}, "url"),
        ({"url": "https://example.org{port}/"}, "url"),
        ({"url": "https://me:secret@example.org/"}, "url"),
        ({"url": "https://example.org/{a b}"}, "url"),
        ({"url": "https://example.org/{"}, "url"),
        ({"url": "https://example.org/#{part}"}, "url"),
        ({"method": "post"}, "method"),
        ({"method": "GET"}, "method"),
        ({"headers": {"Idempotency-Key": "x"}}, "headers.Idempotency-Key"),
        ({"headers": {"fencepost-generation": "9"}}, "headers.fencepost-generation"),
        ({"headers": {"Bad Name": "x"}}, "headers"),
        ({"headers": {"X": "a\nb"}}, "headers.X"),
        ({"body": "xml"}, "body"),
        ({"body": ""}, "body"),
        ({"conflict": "maybe"}, "conflict"),
        ({"unsure": [500]}, "unsure"),
        ({"timeout": 0}, "timeout"),
        ({"verify": False}, "verify"),
        ({"query": "https://example.org/by-name/{name}"}, "query"),
        ({"confirm": "https://example.org/{reservation}"}, "confirm"),
        ({"history": "https://example.org/log"}, "history"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings: dict[str, Any], field: str) -> None:
    declaration = Declaration(name="x", guarantee=Guarantee.IDEMPOTENT, retention=60.0)
    with pytest.raises(InvalidRequest) as refused:
        Http(declaration, **{"url": "https://example.org/", **settings})
    assert refused.value.field == field


def test_each_guarantee_needs_what_keeps_it() -> None:
    with pytest.raises(InvalidRequest, match="RESERVATION needs it"):
        Http(Declaration(name="x", guarantee=Guarantee.RESERVATION), "https://example.org/")
    with pytest.raises(InvalidRequest, match="with NON_REPLAYABLE nothing follows"):
        Http(Declaration(name="x"), "https://example.org/", query="https://example.org/{key}")
    with pytest.raises(InvalidRequest, match="never READ_ONLY"):
        Http(Declaration(name="x", guarantee=Guarantee.READ_ONLY), "https://example.org/", method="DELETE")
    for guarantee in (Guarantee.CONDITIONAL, Guarantee.READ_ONLY, Guarantee.NON_REPLAYABLE):
        http = Http(Declaration(name="x", guarantee=guarantee), "https://example.org/")
        assert check_downstream(http).guarantee == guarantee


async def test_check_connects_and_sends_nothing(server: HttpServer) -> None:
    before = len(server.world()["requests"])
    checked = await keyed(server).check()
    assert checked.ok
    assert checked.guarantee == Guarantee.IDEMPOTENT
    assert len(server.world()["requests"]) == before
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        checked = await Http(Declaration(name="x"), f"http://127.0.0.1:{taken.getsockname()[1]}/").check()
    assert not checked.ok


async def test_no_proxy_is_taken_from_the_environment(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "")
    assert isinstance(await plain(server).execute(call()), Happened)
    found = await plain(server, trust_env=True).execute(call())
    assert isinstance(found, Absent), "asked for, it is taken, and nobody listens there"
    assert json.dumps(found.detail)
