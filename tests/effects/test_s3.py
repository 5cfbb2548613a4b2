"""s3 against real servers: SeaweedFS, which honours preconditions, and rclone, which does not."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fencepost.effects.amazon import TooLate
from fencepost.effects.base import (
    Absent,
    Call,
    Deadline,
    Declaration,
    Gone,
    Guarantee,
    Happened,
    Standing,
    StillUnknown,
    Unknown,
)
from fencepost.effects.s3 import S3
from fencepost.errors import InvalidRequest, Unavailable
from tests.effects.object_stores import KEYS, Between, boto, new_bucket, rclone, seaweedfs, shared_bucket
from tools.postgres_server import free_port

pytestmark = pytest.mark.xdist_group("object_stores")  # one process starts the servers
EFFECT = "e" * 64
PAYLOAD = {"key": "report.txt", "body": "ours"}


def s3_at(address: str, bucket: str, **more: Any) -> S3:
    declaration = Declaration(name="reports", guarantee=Guarantee.CONDITIONAL)
    return S3(declaration, bucket, endpoint=address, addressing="path", **{**KEYS, **more})


def call(
    bound: Any, precondition: str | None, *, effect: str = EFFECT, execution: int = 1, within: float = 10.0
) -> Call:
    return Call(
        effect_id=effect, task_id="t", slot="report", execution=execution, epoch=2, generation=3, payload=bound,
        precondition=precondition, send_by=Deadline.within(within),
    )  # fmt: skip


async def prepared(s3: S3, payload: Any = PAYLOAD, **more: Any) -> Call:
    bound = await s3.bind(payload)
    return call(bound, await s3.precondition(bound), **more)


class Bucket:
    """A corner of a bucket, and what somebody else does there. `own`: a bucket of its own."""

    def __init__(self, *, versions: bool, own: bool = False) -> None:
        self.address = seaweedfs()
        self.name = (new_bucket if own else shared_bucket)(self.address, versions=versions)
        self.prefix = f"{next(_corners)}/"
        self.plain = boto(self.address)

    def s3(self, address: str | None = None, **more: Any) -> S3:
        return s3_at(address or self.address, self.name, **{"prefix": self.prefix, **more})

    def put(self, body: str, key: str = "report.txt") -> None:
        self.plain.put_object(Bucket=self.name, Key=self.prefix + key, Body=body.encode())

    def delete(self, version: str | None = None) -> None:
        which = {} if version is None else {"VersionId": version}
        self.plain.delete_object(Bucket=self.name, Key=f"{self.prefix}report.txt", **which)

    def get(self, key: str = "report.txt") -> str:
        return str(self.plain.get_object(Bucket=self.name, Key=self.prefix + key)["Body"].read().decode())

    def head(self) -> Any:
        return self.plain.head_object(Bucket=self.name, Key=f"{self.prefix}report.txt")


_corners = itertools.count(1)


@pytest.fixture(params=[False, True], ids=["plain", "versioned"])
def bucket(request: pytest.FixtureRequest) -> Bucket:
    return Bucket(versions=request.param)


@pytest.fixture
def plain() -> Bucket:
    return Bucket(versions=False)


@pytest.fixture
def versioned() -> Bucket:
    return Bucket(versions=True)


@pytest.fixture
def own() -> Bucket:
    """A bucket whose settings may be changed."""
    return Bucket(versions=True, own=True)


@pytest.fixture
async def between() -> AsyncIterator[Between]:
    async with Between(seaweedfs()) as proxy:
        yield proxy


async def test_an_object_is_written_once_and_names_its_effect_epoch_and_generation(bucket: Bucket) -> None:
    s3 = bucket.s3()
    sent = await prepared(s3, PAYLOAD | {"content_type": "text/plain", "metadata": {"team": "a"}})
    found = await s3.execute(sent)
    assert isinstance(found, Happened)
    head = bucket.head()
    assert found.etag == head["ETag"] == found.receipt["etag"]
    assert found.receipt.get("version_id") == head.get("VersionId")
    assert head["Metadata"] == {
        "team": "a", "fencepost-effect": EFFECT, "fencepost-epoch": "2", "fencepost-generation": "3",
    }  # fmt: skip
    assert head["ContentType"] == "text/plain"
    again = await s3.execute(sent)
    assert isinstance(again, Absent) and again.why == "PRECONDITION"
    assert isinstance(await s3.query(sent), Happened)
    await s3.close()


@pytest.mark.parametrize(("versions", "stood"), [(False, None), (True, "theirs")])
async def test_of_many_writes_under_one_precondition_one_takes_effect(versions: bool, stood: str | None) -> None:
    bucket = Bucket(versions=versions)
    if stood is not None:
        bucket.put(stood)
    s3 = bucket.s3()
    first = await prepared(s3)
    calls = [
        call(await s3.bind({"key": "report.txt", "body": str(n)}), first.precondition, effect=f"{n}" * 64)
        for n in range(3)
    ]
    found = await asyncio.gather(*(s3.execute(one) for one in calls))
    assert sum(isinstance(one, Happened) for one in found) == 1
    assert all(
        isinstance(one, Happened) or (isinstance(one, Absent) and one.why in ("PRECONDITION", "REFUSED"))
        for one in found
    )
    await s3.close()


async def test_an_object_that_moved_on_is_never_overwritten(bucket: Bucket) -> None:
    s3 = bucket.s3()
    late = await prepared(s3)
    bucket.put("theirs")
    found = await s3.execute(late)
    assert isinstance(found, Absent) and found.why == "PRECONDITION"
    late = await prepared(s3)
    bucket.delete()  # and one that is gone: 404 from some servers, 412 from others
    found = await s3.execute(late)
    assert isinstance(found, Absent) and found.why == "PRECONDITION"
    await s3.close()


async def test_a_write_whose_answer_was_lost_is_unknown_and_the_object_names_it(
    bucket: Bucket, between: Between
) -> None:
    s3 = bucket.s3(between.address)
    sent = await prepared(s3)
    between.cut = "answer"
    assert isinstance(await s3.execute(sent), Unknown)
    assert (between.requests, bucket.get()) == (1, "ours")  # sent once, whatever boto3 would like
    between.cut = None
    found = await s3.query(sent)
    assert isinstance(found, Happened) and found.etag == bucket.head()["ETag"]
    await s3.close()


async def test_a_write_that_never_arrived_is_unknown_and_the_object_still_stands(
    bucket: Bucket, between: Between
) -> None:
    bucket.put("theirs")
    s3 = bucket.s3(between.address)
    sent = await prepared(s3)
    between.cut = "request"
    assert isinstance(await s3.execute(sent), Unknown)
    between.cut = None
    assert await s3.query(sent) == Standing()
    assert isinstance(await s3.execute(call(sent.payload, sent.precondition, execution=2)), Happened)
    assert (between.requests, bucket.get()) == (1, "ours")
    await s3.close()


async def test_with_versions_an_overwritten_object_still_tells_that_it_happened(
    versioned: Bucket, between: Between
) -> None:
    versioned.put("theirs")
    s3 = versioned.s3(between.address)
    sent = await prepared(s3)
    between.cut = "answer"
    assert isinstance(await s3.execute(sent), Unknown)
    ours = versioned.head()["VersionId"]
    versioned.put("theirs again")
    found = await versioned.s3().query(sent)
    assert isinstance(found, Happened) and found.receipt["version_id"] == ours
    versioned.delete()
    assert await versioned.s3().query(sent) == found
    await s3.close()


@pytest.mark.parametrize("stood", [None, "theirs"])
async def test_with_versions_an_object_that_moved_on_without_it_is_gone(versioned: Bucket, stood: str | None) -> None:
    if stood is not None:
        versioned.put(stood)
    s3 = versioned.s3()
    sent = await prepared(s3)
    versioned.put("theirs, newer", key="report.txt.longer")  # another key with the same beginning
    assert await s3.query(sent) == Standing()
    versioned.put("theirs, newer")
    found = await s3.query(sent)
    assert isinstance(found, Gone) and found.ground == "MOVED_ON"
    await s3.close()


@pytest.mark.parametrize("stood", [None, "theirs"])
async def test_without_versions_an_object_that_moved_on_is_for_a_person(plain: Bucket, stood: str | None) -> None:
    if stood is not None:
        plain.put(stood)
    s3 = plain.s3()
    sent = await prepared(s3)
    assert await s3.query(sent) == Standing()
    plain.put("theirs, newer")
    found = await s3.query(sent)
    assert isinstance(found, StillUnknown) and found.moved_on
    await s3.close()


async def test_old_content_that_comes_back_is_another_version_and_not_the_one_that_was_bound(versioned: Bucket) -> None:
    versioned.put("theirs")
    s3 = versioned.s3()
    sent = await prepared(s3)
    etag = versioned.head()["ETag"]
    versioned.put("newer")
    versioned.put("theirs")
    assert versioned.head()["ETag"] == etag
    found = await s3.execute(sent)
    assert isinstance(found, Absent) and found.why == "PRECONDITION"
    assert isinstance(await s3.query(sent), Gone)
    await s3.close()


async def test_versions_that_somebody_took_away_prove_nothing(versioned: Bucket) -> None:
    versioned.put("theirs")
    bound = versioned.head()["VersionId"]
    s3 = versioned.s3()
    sent = await prepared(s3)
    versioned.put("newer")
    versioned.delete(version=bound)
    found = await s3.query(sent)
    assert isinstance(found, StillUnknown) and found.moved_on
    await s3.close()


async def test_versions_that_were_not_kept_all_the_time_prove_nothing(own: Bucket) -> None:
    own.put("theirs")
    s3 = own.s3()
    sent = await prepared(s3)
    own.plain.put_bucket_versioning(Bucket=own.name, VersioningConfiguration={"Status": "Suspended"})
    own.put("newer")
    found = await s3.query(sent)
    assert isinstance(found, StillUnknown) and found.moved_on
    await s3.close()


async def test_a_bucket_that_forgets_old_versions_cannot_say_that_a_free_key_was_never_written(own: Bucket) -> None:
    s3 = own.s3()
    sent = await prepared(s3)
    own.put("theirs")
    assert isinstance(await s3.query(sent), Gone)
    own.plain.put_bucket_lifecycle_configuration(
        Bucket=own.name,
        LifecycleConfiguration={
            "Rules": [
                {
                    "ID": "old", "Status": "Enabled", "Filter": {"Prefix": ""},
                    "NoncurrentVersionExpiration": {"NoncurrentDays": 1},
                }
            ]
        },
    )  # fmt: skip
    found = await s3.query(sent)
    assert isinstance(found, StillUnknown) and found.moved_on
    await s3.close()


async def test_a_server_that_honours_preconditions_earns_conditional(plain: Bucket) -> None:
    s3 = plain.s3()
    assert (await s3.earn()).guarantee == Guarantee.CONDITIONAL
    assert (await plain.s3().earn()).guarantee == Guarantee.CONDITIONAL  # the second time, too
    checked = await s3.check()
    assert checked.ok and checked.guarantee == Guarantee.CONDITIONAL
    assert "no versions" in " ".join(checked.says)
    await s3.close()


async def test_a_server_that_ignores_preconditions_earns_non_replayable_and_says_so() -> None:
    address = rclone()
    s3 = s3_at(address, new_bucket(address))
    assert (await s3.earn()).guarantee == Guarantee.NON_REPLAYABLE
    checked = await s3.check()
    assert checked.ok and checked.guarantee == Guarantee.NON_REPLAYABLE
    assert "ignores IfNoneMatch" in " ".join(checked.says)
    sent = call(await s3.bind(PAYLOAD), None)
    assert isinstance(await s3.execute(sent), Happened)
    assert isinstance(await s3.query(sent), Happened)
    other = call(sent.payload, None, effect="f" * 64)
    assert isinstance(await s3.query(other), StillUnknown)
    await s3.close()


async def test_a_server_that_refuses_the_trial_earns_nothing_and_one_out_of_reach_is_unavailable(plain: Bucket) -> None:
    stranger = plain.s3(access_key="stranger", secret_key="stranger1")
    assert (await stranger.earn()).guarantee == Guarantee.NON_REPLAYABLE
    assert "could not be tried" in " ".join((await stranger.check()).says)
    nowhere = plain.s3(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(Unavailable):
        await nowhere.earn()
    with pytest.raises(Unavailable):
        await nowhere.precondition(await nowhere.bind(PAYLOAD))
    assert not (await nowhere.check()).ok
    for s3 in (stranger, nowhere):
        await s3.close()


async def test_a_refused_connection_is_absent_and_a_question_unanswered(plain: Bucket) -> None:
    s3 = plain.s3(f"http://127.0.0.1:{free_port()}")
    sent = call(await s3.bind(PAYLOAD), "*")
    found = await s3.execute(sent)
    assert isinstance(found, Absent) and found.why == "REFUSED"
    assert isinstance(await s3.query(sent), StillUnknown)
    await s3.close()


async def test_a_refusal_by_the_server_is_absent(plain: Bucket) -> None:
    s3 = plain.s3(access_key="stranger", secret_key="stranger1")
    found = await s3.execute(call(await s3.bind(PAYLOAD), "*"))
    assert isinstance(found, Absent) and found.why == "REFUSED"
    await s3.close()


async def test_nothing_is_sent_after_send_by_nor_for_a_caller_that_is_gone(plain: Bucket, between: Between) -> None:
    s3 = plain.s3(between.address)
    sent = await prepared(s3, within=-1.0)
    assert isinstance(await s3.execute(sent), Unknown)
    # All threads are busy: the call waits for one, and its caller is cancelled meanwhile.
    between.hold = asyncio.Event()
    busy = [asyncio.ensure_future(s3.execute(await prepared(s3, {"key": f"{n}", "body": "x"}))) for n in range(8)]
    await asyncio.wait_for(between.held.wait(), 10)
    late = asyncio.ensure_future(s3.execute(call(sent.payload, "*")))
    await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    between.hold.set()
    assert all(isinstance(one, Happened) for one in await asyncio.wait_for(asyncio.gather(*busy), 20))
    assert between.requests == 8
    await s3.close()


async def test_a_thread_whose_caller_has_gone_sends_nothing(plain: Bucket, between: Between) -> None:
    s3 = plain.s3(between.address)
    sent = await prepared(s3)
    gone = threading.Event()
    gone.set()
    write = {"Bucket": plain.name, "Key": "x", "Body": b"x"}
    with pytest.raises(TooLate):
        await asyncio.to_thread(s3._client._ask, "put_object", write, sent, gone)
    assert between.requests == 0
    await s3.close()


async def test_a_redirect_is_a_refusal_and_boto3_does_not_follow_it(plain: Bucket) -> None:
    """boto3 would sign it anew for the other region and send it there."""
    asked: list[bytes] = []

    async def elsewhere(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head.partition(b" ")[0])
        body = b"<Error><Code>PermanentRedirect</Code><Message>elsewhere</Message></Error>"
        writer.write(
            b"HTTP/1.1 301 Moved\r\nx-amz-bucket-region: eu-central-1\r\nContent-Type: application/xml\r\n"
            b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(elsewhere, "127.0.0.1", 0) as server:
        s3 = plain.s3(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        found = await s3.execute(call(await s3.bind(PAYLOAD), "*"))
        await s3.close()
    assert isinstance(found, Absent) and "PermanentRedirect" in (found.detail or ""), found
    assert asked.count(b"PUT") == 1


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        ("text", "payload"),
        ({"body": "x"}, "payload.key"),
        ({"key": "/x", "body": "x"}, "payload.key"),
        ({"key": "a/../x", "body": "x"}, "payload.key"),
        ({"key": ".fencepost/probe", "body": "x"}, "payload.key"),
        ({"key": "x"}, "payload.body"),
        ({"key": "x", "body": "\ud800"}, "payload"),
        ({"key": "x", "body": {"$bytes": "?"}}, "payload.body"),
        ({"key": "x", "body": "x", "metadata": {"Fencepost-Effect": "f" * 64}}, "payload.metadata"),
        ({"key": "x", "body": "x", "metadata": {"a": "ü"}}, "payload.metadata"),
        ({"key": "x", "body": "x", "content_type": "a\nb"}, "payload.content_type"),
        ({"key": "x", "body": "x", "acl": "public-read"}, "payload.acl"),
    ],
)
async def test_a_payload_that_cannot_be_sent_is_refused_by_name(payload: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await s3_at("http://127.0.0.1:1", "bucket").bind(payload)
    assert refused.value.field.startswith(field)


async def test_a_prefix_stands_before_every_key(plain: Bucket) -> None:
    s3 = plain.s3(prefix=f"{plain.prefix}ü/")
    assert isinstance(await s3.execute(await prepared(s3)), Happened)
    assert plain.get("ü/report.txt") == "ours"
    bound = await s3.bind(PAYLOAD)
    assert await s3.same(bound, PAYLOAD) and not await s3.same(bound, PAYLOAD | {"body": "x"})
    await s3.close()
