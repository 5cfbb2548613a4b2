"""`fencepost.sync`: the same names, called plainly."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

import pytest

from fencepost import clock, sync
from fencepost.client.client import Client
from fencepost.errors import Fenced, InvalidRequest, Unavailable
from fencepost.wire import Committed, NewTask, Refused
from tests.client.faults import BOUND


def test_a_script_submits_claims_and_commits(tmp_path: Path):
    with sync.connect(f"sqlite:///{tmp_path}/tasks.db") as client:
        assert client.submit(NewTask({"x": 1}, task_id="t")).created
        (claim,) = client.claim_next(owner="me", ttl=5.0)
        assert isinstance(client.commit(claim, {"y": 2}), Committed)
        assert client.result("t").value == {"y": 2}
        assert isinstance(client.result("nothing"), Refused)
        assert client.url.startswith("sqlite:///")


def test_every_method_of_the_client_has_its_twin():
    for name, method in inspect.getmembers(Client, inspect.iscoroutinefunction):
        if name.startswith("_") or name in ("clone", "renewal"):
            continue
        twin = getattr(sync.SyncClient, name)
        assert not inspect.iscoroutinefunction(twin), name
        if name != "close":
            assert inspect.signature(twin) == inspect.signature(method), name
            assert twin.__doc__ == method.__doc__, name


def test_wrong_calls_raise_what_they_raise_elsewhere():
    with sync.connect("memory://") as client, pytest.raises(InvalidRequest, match="owner"):
        client.claim_next(owner="", ttl=1.0)
    with pytest.raises(InvalidRequest, match="url"):
        sync.connect("gopher://x")


def test_a_closed_client_says_so_and_leaves_no_thread():
    before = threading.active_count()
    client = sync.connect("memory://")
    client.close()
    client.close()
    with pytest.raises(Unavailable):
        client.pool()
    assert threading.active_count() == before


def test_hold_keeps_the_lease_of_plain_code():
    with sync.connect("memory://") as client:
        client.submit(NewTask({"x": 1}, task_id="t"))
        (claim,) = client.claim_next(owner="me", ttl=0.9)
        with client.hold(claim) as attempt:
            attempt.checkpoint("half")
            attempt.usage(tokens=2)
            assert attempt.stage([1]).startswith("sha256:")
            end = clock.elapsed() + 1.8
            while clock.elapsed() < end:
                attempt.check()
            client.commit(claim, attempt.input)
        (only,) = client.attempts("t")
        assert (only.end, only.usage) == ("COMMITTED", {"tokens": 2})
        assert only.renewals >= 2


def test_hold_raises_fenced_out_of_plain_code():
    with sync.connect("memory://") as client:
        client.submit(NewTask(1, task_id="t"))
        (claim,) = client.claim_next(owner="me", ttl=0.6)
        with pytest.raises(Fenced), client.hold(claim) as attempt:
            client.cancel("t")
            end = clock.elapsed() + BOUND
            while clock.elapsed() < end:
                attempt.check()
        client.reopen("t")
        (again,) = client.claim_next(owner="me", ttl=0.6)
        with client.hold(again):
            pass
        assert client.task("t").end == "RELEASED"


def test_a_body_that_never_looks_learns_of_the_loss_at_its_end():
    with sync.connect("memory://") as client:
        client.submit(NewTask(1, task_id="t"))
        (claim,) = client.claim_next(owner="me", ttl=0.6)
        with pytest.raises(Fenced, match="CANCELLED"), client.hold(claim) as attempt:
            client.cancel("t")
            end = clock.elapsed() + BOUND
            while attempt.remaining() > 0 and clock.elapsed() < end:
                pass


def test_watching_gives_the_events_as_they_come():
    with sync.connect("memory://") as client:
        client.submit(NewTask(1, task_id="t"))
        cursor = client.events().items[-1].cursor
        events = client.watch(cursor=cursor)
        client.submit(NewTask(2, task_id="u"))
        found = next(event for event in events if event.task_id == "u")
        assert found.name == "submitted"
        events.close()


def test_several_threads_share_one_client():
    with sync.connect("memory://") as client:
        threads = [threading.Thread(target=lambda n=n: client.submit(NewTask(n, task_id=f"t{n}"))) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(BOUND)
        assert len(client.tasks().items) == 8
