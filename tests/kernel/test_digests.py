"""Digests: RFC 8785 over JSON values, raw bytes over binaries; what would be changed silently is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from fencepost.errors import InvalidRequest
from fencepost.kernel.digests import (
    MAX_CONTENT_BYTES,
    MAX_INTEGER,
    MAX_NESTING,
    canonical,
    decode,
    digest,
    encode,
    parse,
    short_hash,
)

# RFC 8785, appendix B: doubles by their bits, and how they must be spelled.
NUMBERS = [
    ("0000000000000000", "0"),
    ("8000000000000000", "0"),
    ("0000000000000001", "5e-324"),
    ("8000000000000001", "-5e-324"),
    ("7fefffffffffffff", "1.7976931348623157e+308"),
    ("ffefffffffffffff", "-1.7976931348623157e+308"),
    ("4340000000000000", "9007199254740992"),
    ("c340000000000000", "-9007199254740992"),
    ("4430000000000000", "295147905179352830000"),
    ("44b52d02c7e14af5", "9.999999999999997e+22"),
    ("44b52d02c7e14af6", "1e+23"),
    ("44b52d02c7e14af7", "1.0000000000000001e+23"),
    ("444b1ae4d6e2ef4e", "999999999999999700000"),
    ("444b1ae4d6e2ef4f", "999999999999999900000"),
    ("444b1ae4d6e2ef50", "1e+21"),
    ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
    ("3eb0c6f7a0b5ed8d", "0.000001"),
    ("41b3de4355555553", "333333333.3333332"),
    ("41b3de4355555554", "333333333.33333325"),
    ("41b3de4355555555", "333333333.3333333"),
    ("41b3de4355555556", "333333333.3333334"),
    ("41b3de4355555557", "333333333.33333343"),
    ("becbf647612f3696", "-0.0000033333333333333333"),
    ("43143ff3c1cb0959", "1424953923781206.2"),
]


@pytest.mark.parametrize(("bits", "spelled"), NUMBERS)
def test_numbers_are_spelled_as_rfc_8785_appendix_b_says(bits: str, spelled: str) -> None:
    import struct

    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical(value) == spelled.encode()


def test_the_example_of_rfc_8785_section_3_2_has_its_canonical_form() -> None:
    value = json.loads(
        r'{"numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],'
        r'"string": "\u20ac$\u000F\u000aA'
        r"'\u0042\u0022\u005c\\\"\/"
        r'","literals": [null, true, false]}'
    )
    expected = (
        '{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],'
        '"string":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'
    )
    assert canonical(value) == expected.encode()


def test_keys_sort_by_utf_16_code_units_not_by_code_points() -> None:
    # U+FB33 stands above U+1F600 by UTF-16 code units (0xFB33 > 0xD83D), below it by code points.
    value = {"\u20ac": 1, "\r": 2, "\ufb33": 3, "1": 4, "\U0001f600": 5, "\x80": 6, "\xf6": 7}
    order = list(json.loads(canonical(value)))
    assert order == ["\r", "1", "\x80", "\xf6", "\u20ac", "\U0001f600", "\ufb33"]


# the fast path ------------------------------------------------------------------------------------

_text = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_ascii = st.text(alphabet=st.characters(max_codepoint=0x7F, exclude_characters="\0"), max_size=12)
_integers = st.integers(-MAX_INTEGER, MAX_INTEGER)
_leaves = st.none() | st.booleans() | _integers | _text
_floats = st.floats(allow_nan=False, allow_infinity=False)


def _values(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=20
    )


def reference(value: Any) -> bytes:
    """rfc8785 itself, whose integers end one below ±2^53."""

    def floats(inner: Any) -> Any:
        if isinstance(inner, dict):
            return {key: floats(item) for key, item in inner.items()}
        if isinstance(inner, list):
            return [floats(item) for item in inner]
        return float(inner) if type(inner) is int and abs(inner) == MAX_INTEGER else inner

    return rfc8785.dumps(floats(value))


@given(_values(_leaves, _ascii))
def test_the_fast_path_writes_what_rfc8785_writes(value: Any) -> None:
    assert canonical(value) == reference(value)


@given(_values(_leaves | _floats, _text))
def test_every_value_is_written_as_rfc8785_writes_it(value: Any) -> None:
    assert canonical(value) == reference(value)
    assert encode(value).digest == "sha256:" + hashlib.sha256(reference(value)).hexdigest() == digest(value)


@given(_values(_leaves | _floats, _text))
def test_what_was_stored_is_the_same_payload_when_it_is_read_back(value: Any) -> None:
    content = encode(value)
    assert digest(decode(content)) == content.digest
    assert digest(parse(content.data)) == content.digest
    assert digest(json.loads(json.dumps(value))) == content.digest


# B30: one order of keys, everywhere -----------------------------------------------------------------


def test_b30_the_order_of_keys_and_the_spacing_do_not_count_at_any_level() -> None:
    first = parse('{"a": {"x": {"p": 1, "q": [1, 2]}, "y": 2}, "b": 3}')
    second = parse('{"b":3,"a":{"y":2,"x":{"q":[1,2],"p":1}}}')
    assert digest(first) == digest(second)
    assert digest(parse('{"q": [2, 1]}')) != digest(parse('{"q": [1, 2]}'))


def test_b30_text_is_not_normalised_and_null_is_not_missing() -> None:
    assert digest("caf\u00e9") != digest("cafe\u0301")
    assert digest({"a": None}) != digest({})


def test_b30_duplicate_keys_are_refused_at_every_level() -> None:
    for text in ('{"a": 1, "a": 1}', '{"b": [{"a": 1, "a": 2}]}'):
        with pytest.raises(InvalidRequest, match="duplicate keys"):
            parse(text)


@pytest.mark.parametrize("language", ["C", "tr_TR.UTF-8", "C.UTF-8"])
def test_b30_language_and_hash_seed_of_the_process_do_not_count(language: str) -> None:
    value = {"\ufb33": 1, "\U0001f600": 2, "i": "\u0130", "I": [1.5, 2**53]}
    program = (
        "import sys; from fencepost.kernel.digests import digest, parse; print(digest(parse(sys.stdin.buffer.read())))"
    )
    environment = {**os.environ, "LANG": language, "LC_ALL": language, "PYTHONHASHSEED": str(len(language))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(value).encode(),
        env=environment,
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.decode().strip() == digest(value)


# B35: numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [2**53 + 1, -(2**53) - 1, 2**63, 10**30, 10**5000],
    ids=lambda v: f"{len(str(v)) if v < 10**40 else 5001}-digits",
)
def test_b35_integers_beyond_2_to_the_53_are_refused_and_never_rounded(value: int) -> None:
    for holder in (value, {"id": value}, [{"id": [value, 1.5]}]):
        with pytest.raises(InvalidRequest, match=r"2\^53"):
            encode(holder, "input")


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**53 - 1, 0, -1])
def test_b35_integers_up_to_2_to_the_53_come_back_exactly_beside_floats_too(value: int) -> None:
    for holder in (value, {"a": value, "b": 1.5}, [value, "\u20ac", {"\u20ac": value}]):
        assert decode(encode(holder)) == holder


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_b35_nan_and_infinities_are_refused_and_not_made_null(value: float) -> None:
    for holder in (value, {"a": value}, [[value]]):
        with pytest.raises(InvalidRequest, match="NaN and infinities"):
            encode(holder)


@pytest.mark.parametrize("text", ["1e400", "-1e400", "NaN", "Infinity", "[-Infinity]", "1" * 5000, '{"a": 1e999}'])
def test_b35_the_parser_refuses_numbers_that_json_cannot_carry(text: str) -> None:
    with pytest.raises(InvalidRequest):
        encode(parse(text))


def test_b35_the_spelling_of_a_number_does_not_count_and_is_kept() -> None:
    assert digest(1) == digest(1.0) == digest(parse("1e0")) == digest(parse("1.000"))
    assert digest(0) == digest(-0.0) == digest(0.0)
    assert digest(2**53) == digest(float(2**53))
    assert digest("1e5") != digest(1e5)
    assert encode(1.0).data == b"1.0"
    assert encode(1).data == b"1"


@pytest.mark.parametrize("depth", [MAX_NESTING + 1, 5_000, 100_000])
def test_b35_deep_nesting_is_refused_and_does_not_crash(depth: int) -> None:
    text = "[" * depth + "]" * depth
    with pytest.raises(InvalidRequest, match="nested deeper"):
        encode(parse(text))


def test_b35_nesting_up_to_the_limit_is_taken() -> None:
    value: Any = "leaf"
    for level in range(MAX_NESTING):
        value = {"a": value} if level % 2 else [value]
    assert decode(encode(value)) == value
    with pytest.raises(InvalidRequest, match="nested deeper"):
        encode([value])


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest, match="nested deeper"):
        encode(loop)


# text, binaries, size ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a\0b", {"a\0": 1}, [{"k": "\0"}]])
def test_u_0000_is_refused_in_text_and_keys(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+0000"):
        encode(value)


@pytest.mark.parametrize("value", ["\ud800", {"\udfff": 1}, ["a\udc00b"]])
def test_lone_surrogates_are_refused_in_text_and_keys(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="surrogates"):
        encode(value)


@pytest.mark.parametrize("value", [{1: "a"}, {None: 1}, {("a",): 1}, {1.5: 2}, object(), {1, 2}, [object()]])
def test_what_has_no_json_form_is_refused_with_the_field_named(value: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        encode(value, "result")
    assert refused.value.field == "result"


def test_a_binary_is_kept_as_it_is_and_its_digest_is_over_the_raw_bytes() -> None:
    for value in (b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")):
        content = encode(value)
        assert (content.data, content.binary) == (b"\x00\xff", True)
        assert content.digest == "sha256:" + hashlib.sha256(b"\x00\xff").hexdigest()
        assert decode(content) == b"\x00\xff"


def test_content_over_the_limit_is_refused_and_content_at_the_limit_is_taken() -> None:
    assert len(encode("a" * (MAX_CONTENT_BYTES - 2)).data) == MAX_CONTENT_BYTES
    with pytest.raises(InvalidRequest, match="over the limit"):
        encode("a" * (MAX_CONTENT_BYTES - 1))
    assert encode(bytes(MAX_CONTENT_BYTES)).binary
    with pytest.raises(InvalidRequest, match="over the limit"):
        encode(bytes(MAX_CONTENT_BYTES + 1))


def test_structs_and_dataclasses_have_the_digest_of_their_fields() -> None:
    class Doc(msgspec.Struct):
        title: str
        words: int

    assert digest(Doc("a", 2)) == digest({"words": 2, "title": "a"})


def test_others_see_a_short_hash_of_an_attempt_id_and_never_the_id() -> None:
    attempt = "0192d3a4-attempt"
    assert short_hash(None) is None
    assert short_hash(attempt) == hashlib.sha256(attempt.encode()).hexdigest()[:12]
