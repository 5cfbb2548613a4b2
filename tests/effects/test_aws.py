"""aws against moto's server: EFS, whose CreationToken moto honours; and EC2's ClientToken by its documented rule."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from fencepost.effects.aws import Aws
from fencepost.effects.base import (
    Absent,
    Call,
    Deadline,
    Declaration,
    Guarantee,
    Happened,
    NotFound,
    StillUnknown,
    Unknown,
)
from fencepost.errors import InvalidRequest
from tests.effects.object_stores import KEYS, Between, boto, moto
from tests.effects.token_server import TokenServer
from tools.postgres_server import free_port

pytestmark = pytest.mark.xdist_group("object_stores")  # one process starts the servers
MACHINE = {"ImageId": "ami-12c6146b", "MinCount": 1, "MaxCount": 1}
_numbers = iter(range(1, 10_000))


def declared(**more: Any) -> Declaration:
    return Declaration(**{"name": "aws", "guarantee": Guarantee.IDEMPOTENT, "retention": 86_400.0, **more})


def efs_at(address: str, **more: Any) -> Aws:
    return Aws(declared(), "efs", "create_file_system", endpoint=address, **{**KEYS, **more})


def ec2_at(address: str, **more: Any) -> Aws:
    return Aws(declared(), "ec2", "run_instances", endpoint=address, **{**KEYS, **more})


def call(payload: Any, *, effect: str | None = None, execution: int = 1, within: float = 20.0) -> Call:
    return Call(
        effect_id=effect or f"{next(_numbers):064x}", task_id="t", slot="make", execution=execution, epoch=2,
        generation=3, payload=payload, send_by=Deadline.within(within),
    )  # fmt: skip


def made(token: str) -> int:
    return len(boto(moto(), "efs").describe_file_systems(CreationToken=token)["FileSystems"])


@pytest.fixture
async def between() -> AsyncIterator[Between]:
    async with Between(moto(), "POST") as proxy:
        yield proxy


@pytest.fixture
def tokens() -> Iterator[TokenServer]:
    server = TokenServer(moto())
    yield server
    server.close()


async def test_a_file_system_is_made_once_and_a_second_create_answers_with_the_first_ones_receipt() -> None:
    efs = efs_at(moto())
    sent = call(await efs.bind({"Encrypted": True}))
    found = await efs.execute(sent)
    assert isinstance(found, Happened)
    assert found.receipt["CreationToken"] == sent.effect_id
    assert "ResponseMetadata" not in found.receipt
    again = await efs.execute(call(sent.payload, effect=sent.effect_id, execution=2))
    assert isinstance(again, Happened)
    assert again.receipt["FileSystemId"] == found.receipt["FileSystemId"]
    assert made(sent.effect_id) == 1
    await efs.close()


async def test_a_create_whose_answer_was_lost_is_unknown_sent_once_and_found_by_its_token(between: Between) -> None:
    efs = efs_at(between.address)
    sent = call(await efs.bind({}))
    assert await efs.query(sent) == NotFound()
    between.cut = "answer"
    assert isinstance(await efs.execute(sent), Unknown)
    assert (between.requests, made(sent.effect_id)) == (1, 1)  # once, whatever boto3 would like
    between.cut = None
    found = await efs.query(sent)
    assert isinstance(found, Happened) and found.receipt["CreationToken"] == sent.effect_id
    assert isinstance(await efs.execute(sent), Happened)
    assert made(sent.effect_id) == 1
    await efs.close()


async def test_a_create_that_never_arrived_is_unknown_and_may_be_repeated(between: Between) -> None:
    efs = efs_at(between.address)
    sent = call(await efs.bind({}))
    between.cut = "request"
    assert isinstance(await efs.execute(sent), Unknown)
    assert made(sent.effect_id) == 0
    between.cut = None
    assert isinstance(await efs.execute(sent), Happened)
    assert made(sent.effect_id) == 1
    await efs.close()


async def test_what_the_service_refuses_and_what_boto3_refuses_is_absent(tokens: TokenServer) -> None:
    ec2 = ec2_at(tokens.address)
    for payload in (MACHINE | {"SubnetId": "subnet-00000000"}, MACHINE | {"NoSuchParameter": 1}):
        found = await ec2.execute(call(payload))
        assert isinstance(found, Absent) and found.why == "REFUSED", found
    assert tokens.started == 0
    await ec2.close()


async def test_a_refused_connection_is_absent_and_a_question_unanswered() -> None:
    efs = efs_at(f"http://127.0.0.1:{free_port()}")
    found = await efs.execute(call({}))
    assert isinstance(found, Absent) and found.why == "REFUSED"
    assert isinstance(await efs.query(call({})), StillUnknown)
    assert not (await efs.check()).ok
    await efs.close()


async def test_nothing_is_created_after_send_by() -> None:
    efs = efs_at(moto())
    sent = call({}, within=-1.0)
    assert isinstance(await efs.execute(sent), Unknown)
    assert made(sent.effect_id) == 0
    await efs.close()


@pytest.mark.parametrize("name", ["CreationToken", "creationtoken"])
async def test_a_payload_that_brings_its_own_token_is_refused_by_name(name: str) -> None:
    efs = efs_at(moto())
    with pytest.raises(InvalidRequest, match=rf"payload\.{name}"):
        await efs.bind({name: "mine"})
    with pytest.raises(InvalidRequest, match="payload"):
        await efs.bind("text")
    await efs.close()


async def test_a_machine_is_started_once_whatever_is_repeated(tokens: TokenServer) -> None:
    ec2 = ec2_at(tokens.address)
    sent = call(await ec2.bind(MACHINE))
    found = await ec2.execute(sent)
    assert isinstance(found, Happened)
    again = await ec2.execute(call(MACHINE, effect=sent.effect_id, execution=2))
    assert again == found
    assert (tokens.started, tokens.tokens) == (1, [sent.effect_id] * 2)
    asked = await ec2.query(sent)
    assert isinstance(asked, Happened)
    assert asked.receipt["Instances"][0]["InstanceId"] == found.receipt["Instances"][0]["InstanceId"]
    await ec2.close()


async def test_every_request_carries_effect_epoch_and_generation(tokens: TokenServer) -> None:
    ec2 = ec2_at(tokens.address)
    sent = call(MACHINE)
    await ec2.execute(sent)
    assert f"fencepost-effect/{sent.effect_id} fencepost-epoch/2 fencepost-generation/3" in tokens.agents[0]
    await ec2.close()


@pytest.mark.parametrize("cut", ["request", "answer"])
async def test_a_machine_whose_answer_was_lost_is_asked_for_again_under_the_same_token(
    tokens: TokenServer, cut: str
) -> None:
    ec2 = ec2_at(tokens.address)
    sent = call(MACHINE)
    tokens.cut = cut
    assert isinstance(await ec2.execute(sent), Unknown)
    tokens.cut = None
    tokens.shows = False
    assert await ec2.query(sent) == NotFound()  # it may not show yet, so that this alone proves nothing
    assert isinstance(await ec2.execute(sent), Happened)
    assert tokens.started == 1
    await ec2.close()


async def test_a_token_that_was_used_with_other_parameters_is_unknown_and_not_worth_repeating(
    tokens: TokenServer,
) -> None:
    ec2 = ec2_at(tokens.address)
    sent = call(MACHINE)
    await ec2.execute(sent)
    found = await ec2.execute(call(MACHINE | {"MaxCount": 2}, effect=sent.effect_id))
    assert isinstance(found, Unknown) and found.stored
    await ec2.close()


async def test_a_machine_that_was_terminated_since_did_happen(tokens: TokenServer) -> None:
    ec2 = ec2_at(tokens.address)
    sent = call(MACHINE)
    tokens.terminated.add(sent.effect_id)
    found = await ec2.execute(sent)
    assert isinstance(found, Happened)
    assert found.receipt["code"] == "IdempotentInstanceTerminated"
    await ec2.close()


async def test_check_says_how_the_token_is_given() -> None:
    efs = efs_at(moto())
    checked = await efs.check()
    assert checked.ok and "CreationToken" in checked.says[0]
    await efs.close()


async def test_an_operation_that_nothing_is_known_of_needs_a_token_that_it_takes() -> None:
    def batch(token: str | None) -> Aws:
        return Aws(declared(), "efs", "create_access_point", token=token, endpoint=moto(), **KEYS)

    with pytest.raises(InvalidRequest, match="token"):
        batch(None)
    wrong = batch("NoSuchToken")
    with pytest.raises(InvalidRequest, match="NoSuchToken"):
        await wrong.bind({"FileSystemId": "fs-1"})
    right = batch("ClientToken")
    assert await right.bind({"FileSystemId": "fs-1"}) == {"FileSystemId": "fs-1"}
    assert isinstance(await right.query(call({})), StillUnknown)
    for aws in (wrong, right):
        await aws.close()


def test_a_longer_memory_than_the_service_promises_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="retention"):
        Aws(declared(retention=2 * 86_400.0), "ec2", "run_instances", **KEYS)
    with pytest.raises(InvalidRequest, match="guarantee"):
        Aws(Declaration(name="aws"), "ec2", "run_instances", **KEYS)
