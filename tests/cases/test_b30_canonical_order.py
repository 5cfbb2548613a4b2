"""B30: a canonical order that depends on language, locale or library version."""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fencepost import InvalidRequest, NewTask, Refused, Submitted
from fencepost.kernel.digests import digest, parse
from tests.cases.cli import answered, fencepost
from tests.conformance.worlds import WORLDS

# An RFC 8785 written for this test, from the RFC: keys by UTF-16 code units, numbers as ECMAScript prints them.


def canonical(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int | float):
        return number(float(value))
    if isinstance(value, str):
        return text(value)
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
    return "{" + ",".join(f"{text(key)}:{canonical(value[key])}" for key in keys) + "}"


def text(value: str) -> str:
    short = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
    return '"' + "".join(short.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'


def number(value: float) -> str:
    if value == 0:
        return "0"
    if value < 0:
        return "-" + number(-value)
    # repr gives the shortest digits that round-trip, as ECMAScript does; only their layout differs.
    mantissa, _, exponent = f"{value!r}".partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    digits = (whole + fraction).lstrip("0")
    n = len(whole) + int(exponent or 0) - (len(whole + fraction) - len(digits))
    digits = digits.rstrip("0")
    k = len(digits)
    if k <= n <= 21:
        return digits + "0" * (n - k)
    if 0 < n <= 21:
        return digits[:n] + "." + digits[n:]
    if -6 < n <= 0:
        return "0." + "0" * -n + digits
    e = f"{n - 1:+d}"
    return (digits if k == 1 else digits[0] + "." + digits[1:]) + "e" + e


def expected(value: Any) -> str:
    return "sha256:" + hashlib.sha256(canonical(value).encode()).hexdigest()


VECTORS: dict[str, Any] = {
    "keys at three levels": {"b": {"z": [{"y": 1, "x": 2}], "a": None}, "a": {"c": True, "B": False}},
    "above the BMP": {"\ufb33": 1, "\U0001f600": 2, "a": 3},
    "case and dots": {"I": 1, "\u0130": 2, "i": 3, "\u0131": 4},
    "escapes": {"k": '\b\t\n\f\r"\\/\u001f\u007f\u2028é'},
    "numbers": [0, -0.0, 1, 1.0, -1.5, 1e21, 1e-7, 123456789012345680000.0, 0.000001, 1e300, 5e-324, 9007199254740992],
    "null": {"a": None},
    "missing": {},
    "composed": "caf\u00e9",
    "decomposed": "cafe\u0301",
    "bare": 17,
}
DIFFERENT = [("null", "missing"), ("composed", "decomposed")]


def shuffled(value: Any, dice: random.Random) -> Any:
    """Equal, with its keys in another order at every level."""
    if isinstance(value, dict):
        keys = list(value)
        dice.shuffle(keys)
        return {key: shuffled(value[key], dice) for key in keys}
    if isinstance(value, list):
        return [shuffled(item, dice) for item in value]
    return value


@pytest.mark.parametrize("store", ["memory", "sqlite"])
async def test_b30_digests_of_the_sdk_are_those_of_an_independent_rfc_8785(store: str, tmp_path: Path) -> None:
    world = WORLDS[store](tmp_path)
    try:
        client = await world.client()
        dice = random.Random(30)
        for name, value in VECTORS.items():
            first = await client.submit(NewTask(value, task_id=name))
            assert isinstance(first, Submitted) and first.task.input_digest == expected(value), name
            # An honest retry: from another process that spells it another way, and after a way through the store.
            [claim] = await client.claim_next(owner="A")  # type: ignore[misc]
            for retry in (shuffled(value, dice), json.loads(json.dumps(value, ensure_ascii=False)), claim.input):
                again = await client.submit(NewTask(retry, task_id=name))
                assert isinstance(again, Submitted) and not again.created, name
            committed = await client.commit(claim, value)
            assert not isinstance(committed, Refused) and committed.result_digest == expected(value)
        for one, other in DIFFERENT:
            refused = await client.submit(NewTask(VECTORS[one], task_id=other))
            assert isinstance(refused, Refused) and refused.outcome == "CONFLICT", (one, other)
    finally:
        await world.close()


def test_b30_numbers_keep_the_form_that_ecmascript_gives_them() -> None:
    # From the RFC's own table (appendix B), so that the independent half of this file is right too.
    for bits, wanted in {
        "0000000000000001": "5e-324",
        "7fefffffffffffff": "1.7976931348623157e+308",
        "4340000000000000": "9007199254740992",
        "c340000000000000": "-9007199254740992",
        "4430000000000000": "295147905179352830000",
        "44b52d02c7e14af5": "9.999999999999997e+22",
        "44b52d02c7e14af6": "1e+23",
        "44b52d02c7e14af7": "1.0000000000000001e+23",
        "444b1ae4d6e2ef4e": "999999999999999700000",
        "444b1ae4d6e2ef50": "1e+21",
        "3eb0c6f7a0b5ed8c": "9.999999999999997e-7",
        "3eb0c6f7a0b5ed8d": "0.000001",
        "41b3de4355555553": "333333333.3333332",
        "becbf647612f3696": "-0.0000033333333333333333",
        "43143ff3c1cb0959": "1424953923781206.2",
    }.items():
        value = struct.unpack(">d", bytes.fromhex(bits))[0]
        assert number(value) == wanted
        assert digest([value]) == "sha256:" + hashlib.sha256(f"[{wanted}]".encode()).hexdigest()


def test_b30_the_command_line_digests_alike_under_every_locale_and_hash_seed(tmp_path: Path) -> None:
    value = {name: VECTORS[name] for name in ("keys at three levels", "above the BMP", "case and dots", "numbers")}
    for n, (locale, seed) in enumerate([("C", "0"), ("tr_TR.UTF-8", "1"), ("de_DE.UTF-8", "2")]):
        spelled = json.dumps(shuffled(value, random.Random(n)), ensure_ascii=bool(n % 2), indent=n or None)
        done = answered(
            tmp_path, "submit", "--input", spelled, "--task-id", "t", LANG=locale, LC_ALL=locale, PYTHONHASHSEED=seed
        )
        assert done["created"] == (1 if n == 0 else 0), "an honest retry is no new task, and no conflict"
    shown = answered(tmp_path, "show", "t", LC_ALL="tr_TR.UTF-8")
    assert shown["task"]["input_digest"] == expected(value)
    changed = fencepost(tmp_path, "submit", "--input", '{"changed": 1}', "--task-id", "t", "--json")
    assert changed.returncode == 1 and json.loads(changed.stdout)["outcome"] == "CONFLICT"


def test_b30_duplicate_keys_are_refused_and_never_resolved_silently(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest):
        parse('{"a": 1, "a": 2}')
    (tmp_path / "t.jsonl").write_text('{"input": {"ok": 1}}\n{"input": {"a": {"b": 1, "b": 1}}}\n')
    done = fencepost(tmp_path, "submit", "t.jsonl", "--json")
    assert done.returncode == 2 and b"line 2" in done.stdout + done.stderr
    assert not (tmp_path / "fencepost.db").exists() or answered(tmp_path, "tasks")["items"] == []


SET_TASK = """
import fencepost

app = fencepost.App()

@app.task("tags")
async def tags(attempt, input): ...

print(fencepost.kernel.digests.digest(tags.task({"tags": {"beta", "alpha", "gamma", "delta"}}).input))
"""


def test_b30_a_set_given_to_a_handlers_task_has_one_digest_whatever_the_processs_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", SET_TASK],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in range(4)
    }
    assert digests == {expected({"tags": ["alpha", "beta", "delta", "gamma"]}) + "\n"}
