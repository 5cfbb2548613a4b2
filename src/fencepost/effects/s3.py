"""Write an object under a precondition: CONDITIONAL where the server honours it, which is tried; else NON_REPLAYABLE.

    [downstreams.reports]
    type = "s3"
    bucket = "team-reports"
    prefix = "agents/"

    await attempt.effect("report", {"key": "2026/q3.txt", "body": "text"}, using=reports)

A key that is free is written with `If-None-Match: *`, an object that stands with `If-Match` on its ETag, so of several
writes under one precondition at most one takes effect. Effect id, epoch and generation stand in the object's metadata.

Rests on this: an ETag of a single write is a hash of the content, so it returns where somebody restores old content,
and a free key returns where somebody deletes. Use it for keys of which neither is done. Where the bucket keeps
versions, they are the history that tells what became of a write that the object has moved on from; where it keeps none,
that is a person's to judge.

At its first use it tries the server: an object at `probe_key` is written twice under `If-None-Match: *` and once under
an ETag that nothing has. A server that accepts any of these but the first (`rclone serve s3` does) earns
NON_REPLAYABLE.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from typing import Any

import msgspec

from fencepost.effects.amazon import Client, Refused, Trouble, unsettled
from fencepost.effects.base import (
    Absent,
    Call,
    Checked,
    Declaration,
    Gone,
    Guarantee,
    Happened,
    Standing,
    StillUnknown,
    Unknown,
)
from fencepost.errors import InvalidRequest, Unavailable
from fencepost.kernel.digests import encode

__all__ = ["S3"]

MAX_KEY_BYTES = 1_024
MAX_VERSIONS = 1_000  # looked at for one query
FREE = "*"  # the precondition: nothing stands at the key
KEPT = "versioned"  # beside FREE: the bucket kept versions when it was looked at
NO_SUCH_ETAG = '"00000000000000000000000000000000"'
_MARK = "fencepost-effect"
_PROBE = "probe"
_FIELDS = ("key", "body", "content_type", "cache_control", "content_disposition", "content_encoding", "metadata")
_PARAMETERS = {
    "content_type": "ContentType",
    "cache_control": "CacheControl",
    "content_disposition": "ContentDisposition",
    "content_encoding": "ContentEncoding",
}


class S3:
    """One bucket. `prefix` stands before every key that a payload names.

    `endpoint`: the server, unless it is AWS's own. `addressing`: "auto", "path" (most other servers) or "virtual".
    `probe_key`: where the server is tried, below `prefix`; the object stays there.

    Raises InvalidRequest naming the setting that cannot be, and from `bind` the payload's field. Opens nothing.
    """

    def __init__(
        self,
        declaration: Declaration,
        bucket: str,
        *,
        prefix: str = "",
        region: str | None = None,
        endpoint: str | None = None,
        addressing: str = "auto",
        profile: str | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        session_token: str | None = None,
        probe_key: str = ".fencepost/probe",
        timeout: float = 20.0,
    ) -> None:
        if declaration.guarantee not in (Guarantee.CONDITIONAL, Guarantee.NON_REPLAYABLE):
            raise InvalidRequest("guarantee", "s3 is CONDITIONAL, or NON_REPLAYABLE where the server cannot do that")
        if addressing not in ("auto", "path", "virtual"):
            raise InvalidRequest("addressing", f"must be auto, path or virtual, got {addressing!r}")
        if not bucket or "/" in bucket:
            raise InvalidRequest("bucket", "must be a bucket's name")
        if prefix:
            _check_key(prefix, "prefix")
        self.declaration = declaration
        self.bucket = bucket
        self.prefix = prefix
        self.probe_key = prefix + _check_key(probe_key, "probe_key")
        self._client = Client(
            "s3",
            region=region,
            endpoint=endpoint,
            profile=profile,
            access_key=access_key,
            secret_key=secret_key,
            session_token=session_token,
            timeout=timeout,
            signature_version="s3v4",
            s3={"addressing_style": addressing},
        )
        self._trying = asyncio.Lock()
        self._earned: tuple[Declaration, str] | None = None

    # what the server earns ------------------------------------------------------------------------

    async def earn(self) -> Declaration:
        """CONDITIONAL where the server honours preconditions and keeps metadata, else NON_REPLAYABLE.

        Tried once and kept. Raises Unavailable where the server could not be tried.
        """
        return (await self._earn())[0]

    async def _earn(self) -> tuple[Declaration, str]:
        async with self._trying:
            if self._earned is None:
                declared, lacks = self.declaration, None
                if declared.guarantee == Guarantee.CONDITIONAL:
                    lacks = await self._lacks()
                    if lacks is not None:
                        declared = msgspec.structs.replace(declared, guarantee=Guarantee.NON_REPLAYABLE)
                self._earned = declared, lacks or f"as {declared.guarantee}"
            return self._earned

    async def _lacks(self) -> str | None:
        """Why the server does not earn CONDITIONAL; None: it does."""
        try:
            if why := await self._probed({"IfNoneMatch": FREE}, first=True):
                return why
            if why := await self._probed({"IfNoneMatch": FREE}):
                return why
            if why := await self._probed({"IfMatch": NO_SUCH_ETAG}):
                return why
            found = await self._client.ask("head_object", {"Bucket": self.bucket, "Key": self.probe_key})
        except Refused as error:
            return f"could not be tried at {self.probe_key}: {error}"
        except Trouble as error:
            raise Unavailable(f"{self.declaration.downstream}: {error}") from None
        return None if _names(found, _PROBE) else "the server does not keep metadata: nothing would name the effect"

    async def _probed(self, condition: dict[str, str], *, first: bool = False) -> str | None:
        """A write that must be refused, but that the first may find the key free."""
        write = {"Bucket": self.bucket, "Key": self.probe_key, "Body": b"fencepost\n", "Metadata": {_MARK: _PROBE}}
        try:
            await self._client.ask("put_object", write | condition)
        except Refused as error:
            if error.status == 501:
                return f"the server knows no preconditions: {error}"
            if error.status in (404, 409, 412) and error.code != "NoSuchBucket":
                return None
            raise
        return None if first else f"the server ignores {' and '.join(condition)}: a write that should fail went through"

    # before the prepare ---------------------------------------------------------------------------

    async def bind(self, payload: Any) -> Any:
        """`payload` with its full key. Raises InvalidRequest naming the field."""
        encode(payload, "payload")
        if not isinstance(payload, dict):
            raise InvalidRequest("payload", "must be an object with key and body")
        for field in payload:
            if field not in _FIELDS:
                raise InvalidRequest(f"payload.{field}", f"is unknown; known are {', '.join(_FIELDS)}")
        key = self.prefix + _check_key(payload.get("key"), "payload.key")
        if len(key.encode()) > MAX_KEY_BYTES:
            raise InvalidRequest("payload.key", f"with its prefix it is over the limit of {MAX_KEY_BYTES} bytes")
        if key == self.probe_key:
            raise InvalidRequest("payload.key", "is where the server is tried")
        _body(payload.get("body"))
        for field in _PARAMETERS:
            text = payload.get(field, "")
            if not isinstance(text, str) or not text.isascii() or not (text.isprintable()):
                raise InvalidRequest(f"payload.{field}", "must be printable ASCII text")
        metadata = payload.get("metadata", {})
        if not isinstance(metadata, dict):
            raise InvalidRequest("payload.metadata", "must be an object of texts")
        for name, text in metadata.items():
            if name.casefold().startswith("fencepost-"):
                raise InvalidRequest(f"payload.metadata.{name}", "is set for every call, and cannot be set here")
            if not isinstance(text, str) or not (name + text).isascii() or not (name + text).isprintable():
                raise InvalidRequest(f"payload.metadata.{name}", "must be printable ASCII text")
        return payload | {"key": key}

    async def same(self, bound: Any, payload: Any) -> bool:
        """Whether `bound` is what `payload` was bound to: the very same."""
        return bool(bound == await self.bind(payload))

    async def precondition(self, payload: Any) -> str:
        """What stands at the key: `*`, or its ETag and its version. Raises Unavailable where that cannot be had."""
        try:
            found = await self._head(payload["key"])
            if found is None:
                return f"{FREE} {KEPT}" if await self._keeps_versions() else FREE
        except Trouble as error:
            raise Unavailable(f"{self.declaration.downstream}: {error}") from None
        version = found.get("VersionId", "null")
        return found["ETag"] if version == "null" else f"{found['ETag']} {version}"

    # the call -------------------------------------------------------------------------------------

    async def execute(self, call: Call) -> Happened | Absent | Unknown:
        payload = call.payload
        write: dict[str, Any] = {
            "Bucket": self.bucket,
            "Key": payload["key"],
            "Body": _body(payload["body"]),
            "Metadata": payload.get("metadata", {}) | call.marks,
        }
        write |= {parameter: payload[field] for field, parameter in _PARAMETERS.items() if field in payload}
        if call.precondition is not None:
            stood, _, about = call.precondition.partition(" ")
            write |= {"IfNoneMatch": FREE} if stood == FREE else {"IfMatch": stood}
            if about and stood != FREE:
                # The ETag may have come back with old content; the version never does.
                try:
                    found = await self._head(payload["key"])
                except Trouble as error:
                    return Absent("REFUSED", f"not sent: {error}")
                if found is None or found.get("VersionId") != about:
                    return Absent("PRECONDITION", "the object moved on to another version")
        try:
            answer = await self._client.ask("put_object", write, call)
        except Refused as error:
            if error.status == 412 or (error.status == 404 and error.code != "NoSuchBucket"):
                return Absent("PRECONDITION", str(error))
            # 409 among them: something else was under way at this key, and this write was given up.
            return Absent("REFUSED", str(error))
        except Trouble as error:
            return unsettled(error)
        return Happened(self._receipt(payload["key"], answer), answer.get("ETag"))

    def _receipt(self, key: str, about: dict[str, Any]) -> dict[str, Any]:
        receipt = {"bucket": self.bucket, "key": key, "etag": about.get("ETag")}
        version = about.get("VersionId")
        return receipt if version in (None, "null") else receipt | {"version_id": version}

    # asking ---------------------------------------------------------------------------------------

    async def query(self, call: Call) -> Happened | Gone | Standing | StillUnknown:
        """What the object, and the versions that it had since, say."""
        key = call.payload["key"]
        stood, _, about = (call.precondition or "").partition(" ")
        try:
            found = await self._head(key)
            if found is not None and _names(found, call.effect_id):
                return Happened(self._receipt(key, found), found["ETag"])
            if not stood:
                return StillUnknown("it was sent without a precondition, and the object does not name it")
            if not about:
                standing = (found is None) if stood == FREE else (found is not None and found["ETag"] == stood)
                return (
                    Standing()
                    if standing
                    else StillUnknown("moved on, and the bucket keeps no versions", moved_on=True)
                )
            if stood != FREE and found is not None and found.get("VersionId") == about:
                return Standing()
            return await self._history(key, stood, about, call.effect_id, found is None)
        except Trouble as error:
            return StillUnknown(str(error))

    async def _history(
        self, key: str, stood: str, about: str, effect_id: str, free: bool
    ) -> Happened | Gone | Standing | StillUnknown:
        """What the versions since the precondition say; where some may be missing, they only say yes."""
        listed = await self._versions(key)
        if listed is None:
            return StillUnknown(f"more than {MAX_VERSIONS} versions", moved_on=True)
        ids = [version["VersionId"] for version in listed]
        since = listed if stood == FREE or about not in ids else listed[: ids.index(about)]
        for version in since:
            found = await self._head(key, version["VersionId"])
            if found is not None and _names(found, effect_id):
                return Happened(self._receipt(key, found), found["ETag"])
        if "null" in [version["VersionId"] for version in since] or not await self._keeps_versions():
            return StillUnknown("the bucket did not keep versions all the time", moved_on=True)
        if stood != FREE and about not in ids:
            return StillUnknown(f"version {about} is gone, and others may be", moved_on=True)
        if stood == FREE and since and await self._forgets():
            return StillUnknown("the bucket's rules take old versions away", moved_on=True)
        if stood == FREE and free:
            return Standing()
        return Gone("MOVED_ON", f"none of the {len(since)} versions since names it")

    async def _head(self, key: str, version: str | None = None) -> dict[str, Any] | None:
        which = {"Bucket": self.bucket, "Key": key} | ({} if version is None else {"VersionId": version})
        try:
            return await self._client.ask("head_object", which)
        except Refused as error:
            # A look has no body to say which: a missing bucket shows in the write.
            if error.status == 404 or (error.status == 405 and version is None):
                return None
            raise

    async def _keeps_versions(self) -> bool:
        try:
            answer = await self._client.ask("get_bucket_versioning", {"Bucket": self.bucket})
        except Refused:  # not allowed, or not known here: then they are of no use either
            return False
        return bool(answer.get("Status") == "Enabled")

    async def _versions(self, key: str) -> list[dict[str, Any]] | None:
        """Of this key, the newest first; None: too many."""
        found: list[dict[str, Any]] = []
        page: dict[str, Any] = {"Bucket": self.bucket, "Prefix": key}
        while True:
            answer = await self._client.ask("list_object_versions", page)
            mine = [version for version in answer.get("Versions", []) if version["Key"] == key]
            found += mine
            if len(found) > MAX_VERSIONS:
                return None
            others = len(answer.get("Versions", [])) > len(mine)  # longer keys come after all of this one's
            if others or not answer.get("IsTruncated"):
                return found
            page |= {"KeyMarker": answer["NextKeyMarker"], "VersionIdMarker": answer.get("NextVersionIdMarker", "")}

    async def _forgets(self) -> bool:
        """Whether some rule of the bucket may have taken versions away."""
        try:
            answer = await self._client.ask("get_bucket_lifecycle_configuration", {"Bucket": self.bucket})
        except Refused as error:
            return error.code != "NoSuchLifecycleConfiguration"
        return any(
            rule.get("Status") == "Enabled" and "NoncurrentVersionExpiration" in rule
            for rule in answer.get("Rules", [])
        )

    # the rest -------------------------------------------------------------------------------------

    async def check(self) -> Checked:
        """Tries the server as the first use would, and says what it earns and why."""
        try:
            declared, why = await self._earn()
            versions = await self._keeps_versions()
        except (Unavailable, Trouble) as error:
            return Checked(Guarantee.NON_REPLAYABLE, False, (str(error),))
        says = [why]
        if declared.guarantee == Guarantee.CONDITIONAL:
            says.append("holds for keys at which nobody restores old content or deletes")
            says.append(
                "keeps versions: they tell what became of a write that the object has moved on from"
                if versions
                else "keeps no versions: where an object moved on from an unknown write, a person decides"
            )
        return Checked(declared.guarantee, True, tuple(says))

    async def close(self) -> None:
        await self._client.close()


def _check_key(key: object, field: str) -> str:
    if not isinstance(key, str) or not key or len(key.encode()) > MAX_KEY_BYTES:
        raise InvalidRequest(field, f"must be text of 1 to {MAX_KEY_BYTES} bytes")
    if key.startswith("/") or not key.isprintable() or any(part in (".", "..") for part in key.split("/")):
        raise InvalidRequest(field, "must not begin with '/', nor contain '.', '..' or control characters")
    return key


def _body(body: object) -> bytes:
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, dict) and body.keys() == {"$bytes"} and isinstance(body["$bytes"], str):
        try:
            return base64.b64decode(body["$bytes"], validate=True)
        except binascii.Error:
            raise InvalidRequest("payload.body", "$bytes must be base64") from None
    raise InvalidRequest("payload.body", 'must be text or {"$bytes": base64}')


def _names(found: dict[str, Any], effect_id: str) -> bool:
    """Whether the object's metadata names the effect; servers differ in how they spell its keys."""
    metadata: dict[str, str] = found.get("Metadata", {})
    return any(name.lower() == _MARK and text == effect_id for name, text in metadata.items())
