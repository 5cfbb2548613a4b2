"""What a downstream may declare, and what it must be able to do for that."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fencepost.effects.base import Absent, Answers, Call, Deadline, Declaration, Gone, Guarantee, check_downstream
from fencepost.effects.receipts import storable
from fencepost.errors import InvalidRequest
from fencepost.kernel.commands import MAX_RECEIPT_BYTES
from fencepost.kernel.digests import encode
from tests.effects.port import Reserving, Scripted, Versioned


@pytest.mark.parametrize(
    ("fields", "field", "limit"),
    [
        ({"guarantee": "IDEMPOTENT"}, "retention", "IDEMPOTENT needs it"),
        ({"guarantee": "IDEMPOTENT", "retention": 20.0}, "retention", "above margin and send_window"),
        ({"guarantee": "IDEMPOTENT", "retention": 60.0, "margin": 50.0}, "retention", "60 seconds"),
        ({"guarantee": "IDEMPOTENT", "retention": 60.0, "margin": 9.9}, "margin", "at least send_window"),
        ({"guarantee": "IDEMPOTENT", "retention": math.inf}, "retention", "finite"),
        ({"retention": 60.0}, "retention", "IDEMPOTENT alone"),
        ({"guarantee": "READ_ONLY", "margin": 60.0}, "margin", "IDEMPOTENT alone"),
        ({"guarantee": "EXACTLY_ONCE"}, "guarantee", "must be one of"),
        ({"send_window": 0.0}, "send_window", "above 0"),
        ({"send_window": True}, "send_window", "finite number"),
        ({"settle_time": -1.0}, "settle_time", "at least 0"),
        ({"name": ""}, "name", "1 to 200"),
        ({"name": "a/b"}, "name", "'/'"),
        ({"account": "a\n"}, "account", "control character"),
        ({"account": "a" * 200}, "account", "at most 199"),
        ({"approval": 1}, "approval", "true or false"),
    ],
)
def test_a_declaration_that_cannot_be_kept_is_refused_by_field_and_limit(
    fields: dict[str, Any], field: str, limit: str
) -> None:
    with pytest.raises(InvalidRequest, match=limit) as refused:
        Declaration(**{"name": "mail", **fields})
    assert refused.value.field == field


def test_undeclared_is_non_replayable() -> None:
    terms = Declaration(name="mail").terms
    assert (terms.downstream, terms.guarantee, terms.retention_us, terms.margin_us) == ("mail", "NON_REPLAYABLE", 0, 0)
    assert (terms.send_window_us, terms.settle_time_us, terms.approval) == (10_000_000, 10_000_000, False)


def test_the_account_is_part_of_where_it_goes_and_the_margin_defaults_to_the_send_window() -> None:
    declaration = Declaration(
        name="mail", account="acme", guarantee=Guarantee.IDEMPOTENT, retention=60.0, send_window=4.0, approval=True
    )
    terms = declaration.terms
    assert terms.downstream == "mail/acme"
    assert (terms.retention_us, terms.margin_us, terms.approval) == (60_000_000, 4_000_000, True)


def test_a_guarantee_needs_the_methods_that_keep_it() -> None:
    class Bare:
        def __init__(self, guarantee: Guarantee) -> None:
            retention = 60.0 if guarantee == Guarantee.IDEMPOTENT else None
            self.declaration = Declaration(name="bare", guarantee=guarantee, retention=retention)

    for guarantee, missing in {
        Guarantee.CONDITIONAL: "execute",
        Guarantee.IDEMPOTENT: "execute",
        Guarantee.READ_ONLY: "execute",
        Guarantee.NON_REPLAYABLE: "execute",
        Guarantee.RESERVATION: "reserve",
    }.items():
        with pytest.raises(InvalidRequest, match=f"{guarantee}, which needs `{missing}`"):
            check_downstream(Bare(guarantee))
    with pytest.raises(InvalidRequest, match="needs `precondition`"):
        check_downstream(Scripted(Guarantee.CONDITIONAL))
    with pytest.raises(InvalidRequest, match="not a downstream"):
        check_downstream(object())
    for fine in (Scripted(), Versioned(), Reserving(), Bare(Guarantee.TRANSACTIONAL)):
        assert check_downstream(fine) is fine.declaration


def test_methods_must_be_coroutines_and_bind_needs_same() -> None:
    class Plain(Scripted):
        def query(self, call: Call) -> None: ...

    class Binding(Scripted):
        async def bind(self, payload: Any) -> Any: ...

    with pytest.raises(InvalidRequest, match="`query` must be an `async def`"):
        check_downstream(Plain())
    with pytest.raises(InvalidRequest, match="`bind` needs `same`"):
        check_downstream(Binding())
    assert not isinstance(Scripted(), Answers)


def test_a_deadline_starts_when_it_was_asked_for_not_when_the_answer_came() -> None:
    now = 100.0
    deadline = Deadline.after(97.0, 5_000_000, 15_000_000, lambda: now)
    assert deadline.remaining == 7.0
    assert deadline.unix == 15.0
    now = 107.0
    assert deadline.expired
    assert not Deadline.none().expired
    assert Deadline.none().unix is None


def test_findings_name_only_what_the_contract_knows() -> None:
    with pytest.raises(InvalidRequest, match="REFUSED"):
        Absent("BECAUSE")
    with pytest.raises(InvalidRequest, match="MOVED_ON"):
        Gone("NOT_FOUND")


@pytest.mark.parametrize(
    "receipt",
    [
        float("nan"),
        2**63,
        "\0",
        "\ud800",
        {1: 2},
        b"x" * 300_000,
        "x" * 300_000,
        "\x01" * 300_000,
        object(),
        {"a": {1}},
    ],
    ids=lambda receipt: type(receipt).__name__,
)
def test_every_receipt_can_be_stored_in_the_end(receipt: Any) -> None:
    kept = storable(receipt)
    assert len(encode(kept, "receipt", MAX_RECEIPT_BYTES).data) <= MAX_RECEIPT_BYTES
    if kept != receipt:
        assert kept["cut"] is True
        assert kept["why"]


def test_a_receipt_that_fits_is_kept_as_it_is() -> None:
    receipt = {"id": 7, "amount": 1.5}
    assert storable(receipt) is receipt
