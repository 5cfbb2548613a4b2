"""An HTTP server process with a durable memory: what it did, under which key, and which answers it keeps.

    python -m tests.effects.http_server FILE      prints its port, serves until it is ended

    POST /mail                     keyed: acts once per Idempotency-Key and answers from it
    GET  /mail/by-key/KEY          what became of a key
    POST /plain                    acts each time; no keys
    GET, PUT /docs/NAME            If-Match, If-None-Match; versions never return
    GET  /docs/NAME/history        the ids of all effects that ever changed it
    POST /rooms                    reserve; /rooms/ID/confirm, /rooms/ID/cancel, GET /rooms/ID
    GET  /redirect, POST /redirect/STATUS
    POST /control                  faults for the requests to come, or {"forget": true}
    GET  /control                  what is in the world

Faults, in the order in which they are used up by the requests that may act (not by queries): `refuse` (close before
acting), `delay` (seconds before acting), `drop` (act, then reset the connection), `hold` (seconds between acting and
answering), `status` (answer that, acting not), `keep` (with `status`: keep that answer under the key), `cut` (half an
answer), `lag` (seconds before a query shows it), `headers`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import sqlite3
import struct
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SCHEMA = """
CREATE TABLE IF NOT EXISTS executed (
    number INTEGER PRIMARY KEY, path TEXT, key TEXT, effect TEXT, generation TEXT, body TEXT);
CREATE TABLE IF NOT EXISTS kept (
    key TEXT PRIMARY KEY, print TEXT, status INTEGER, body TEXT, headers TEXT, shows_at REAL);
CREATE TABLE IF NOT EXISTS doc (name TEXT, version INTEGER, effect TEXT, body TEXT, PRIMARY KEY (name, version));
CREATE TABLE IF NOT EXISTS room (id INTEGER PRIMARY KEY, state TEXT, effect TEXT);
CREATE TABLE IF NOT EXISTS request (number INTEGER PRIMARY KEY, line TEXT, headers TEXT, body TEXT);
"""


class World:
    """Everything that happened, in one SQLite file."""

    def __init__(self, file: str) -> None:
        self.lock = threading.Lock()
        self.faults: list[dict[str, Any]] = []
        self.db = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self.db.executescript("PRAGMA synchronous=OFF;" + SCHEMA)

    @contextlib.contextmanager
    def change(self) -> Any:
        with self.lock:
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield self.db
            except BaseException:
                self.db.execute("ROLLBACK")
                raise
            self.db.execute("COMMIT")

    def rows(self, statement: str, *values: Any) -> list[Any]:
        with self.lock:
            return self.db.execute(statement, values).fetchall()

    def next_fault(self) -> dict[str, Any]:
        with self.lock:
            return self.faults.pop(0) if self.faults else {}

    def state(self) -> dict[str, Any]:
        names = ("path", "key", "effect", "generation", "body")
        executed = self.rows("SELECT path, key, effect, generation, body FROM executed ORDER BY number")
        rooms = self.rows("SELECT id, state, effect FROM room ORDER BY id")
        requests = self.rows("SELECT line, headers, body FROM request ORDER BY number")
        return {
            "executed": [dict(zip(names, row, strict=True)) for row in executed],
            "rooms": [dict(zip(("id", "state", "effect"), row, strict=True)) for row in rooms],
            "requests": [{"line": line, "headers": json.loads(head), "body": body} for line, head, body in requests],
            "faults": len(self.faults),
        }


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    # small things -----------------------------------------------------------------------------

    @property
    def world(self) -> World:
        return self.server.world

    @property
    def effect(self) -> str:
        return self.headers.get("Fencepost-Effect", "")

    def answer(
        self, status: int, value: Any = None, headers: dict[str, str] | None = None, *, cut: bool = False
    ) -> None:
        body = b"" if value is None else json.dumps(value).encode()
        kind = "application/problem+json" if status >= 400 else "application/json"
        self.send_response(status)
        for name, text in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.reset()

    def reset(self) -> None:
        """No FIN, but a reset: whoever waits learns at once that nothing more comes."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def begin(self) -> tuple[dict[str, Any], str] | None:
        """The next fault and the body; None where the connection was closed before anything was done."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length).decode("utf-8", "replace")
        fault = self.world.next_fault()
        with self.world.change() as db:
            head = json.dumps(dict(self.headers.items()))
            db.execute("INSERT INTO request (line, headers, body) VALUES (?, ?, ?)", (self.requestline, head, body))
        if fault.get("refuse"):
            self.reset()
            return None
        return fault, body

    def finish_with(
        self, fault: dict[str, Any], status: int, value: Any, headers: dict[str, str] | None = None
    ) -> None:
        time.sleep(fault.get("hold", 0))
        if fault.get("drop"):
            self.reset()
        else:
            self.answer(status, value, headers, cut=bool(fault.get("cut")))

    def act(self, db: Any, body: str) -> int:
        row = (self.path, self.key(), self.effect, self.headers.get("Fencepost-Generation", ""), body)
        done = db.execute("INSERT INTO executed (path, key, effect, generation, body) VALUES (?, ?, ?, ?, ?)", row)
        return int(done.lastrowid)

    def key(self) -> str:
        return (self.headers.get("Idempotency-Key") or "").strip('"')

    # the doors --------------------------------------------------------------------------------

    def do_POST(self) -> None:
        if self.path == "/control":
            self.control()
        elif self.path == "/mail":
            self.mail()
        elif self.path.startswith("/rooms"):
            self.rooms()
        elif self.path.startswith("/redirect/"):
            if self.begin() is not None:
                self.answer(int(self.path.rsplit("/", 1)[1]), None, {"Location": "/plain"})
        else:
            self.plain()

    def do_PUT(self) -> None:
        self.put_doc()

    def do_GET(self) -> None:
        if self.path == "/control":
            self.answer(200, self.world.state())
        elif self.path.startswith("/mail/by-key/"):
            self.by_key(self.path.rsplit("/", 1)[1])
        elif self.path.endswith("/history"):
            found = self.world.rows("SELECT effect FROM doc WHERE name = ? ORDER BY version", self.path.split("/")[2])
            self.answer(200, [row[0] for row in found])
        elif self.path.startswith("/docs/"):
            self.get_doc(self.path.split("/")[2])
        elif self.path.startswith("/rooms/"):
            found = self.world.rows("SELECT state FROM room WHERE id = ?", self.path.split("/")[2])
            self.answer(200, {"state": found[0][0]}) if found else self.answer(404, {"title": "no such room"})
        else:
            self.plain()

    def control(self) -> None:
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if told.get("forget"):
            with self.world.change() as db:
                db.execute("DELETE FROM kept")
        if "third" in told:  # somebody else writes that document
            with self.world.change() as db:
                self.write(db, told["third"], "", "a third party's")
        if "lapse" in told:
            with self.world.change() as db:
                db.execute("UPDATE room SET state = 'lapsed' WHERE state = 'held'")
        with self.world.lock:
            self.world.faults += told.get("faults", [])
        self.answer(200, {})

    def plain(self) -> None:
        begun = self.begin()
        if begun is None:
            return
        fault, body = begun
        time.sleep(fault.get("delay", 0))
        if "status" in fault:
            self.finish_with(fault, fault["status"], fault.get("body"), fault.get("headers"))
            return
        with self.world.change() as db:
            number = self.act(db, body)
        self.finish_with(fault, 201, fault.get("body", {"id": number}))

    def mail(self) -> None:
        """As the draft has it: 400 without a key, 409 while the first is in progress, 422 for another payload."""
        begun = self.begin()
        if begun is None:
            return
        fault, body = begun
        key, print_ = self.key(), hashlib.sha256(body.encode()).hexdigest()
        if not key:
            self.answer(400, {"title": "Idempotency-Key is missing"})
            return
        if "status" in fault and not fault.get("keep"):
            self.finish_with(fault, fault["status"], fault.get("body"), fault.get("headers"))
            return
        with self.world.change() as db:
            kept = db.execute("SELECT print, status, body FROM kept WHERE key = ?", (key,)).fetchone()
            if kept is None:
                db.execute("INSERT INTO kept VALUES (?, ?, NULL, NULL, NULL, ?)", (key, print_, time.time()))
        if kept is not None:
            if kept[0] != print_:
                self.answer(422, {"title": "Idempotency-Key is already used"})
            elif kept[1] is None:
                title = "A request is outstanding for this Idempotency-Key"
                self.answer(409, {"title": title}, {"Retry-After": "0"})
            else:
                marked = fault.get("headers", {"Idempotent-Replayed": "true"})
                self.finish_with(fault, kept[1], json.loads(kept[2]), marked)
            return
        time.sleep(fault.get("delay", 0))
        with self.world.change() as db:
            if "status" in fault:
                status, value = fault["status"], fault.get("body", {"title": "kept"})
            else:
                status, value = 201, {"id": self.act(db, body)}
            shows_at = time.time() + fault.get("lag", 0)
            row = (status, json.dumps(value), shows_at, key)
            db.execute("UPDATE kept SET status = ?, body = ?, shows_at = ? WHERE key = ?", row)
        self.finish_with(fault, status, value)

    def by_key(self, key: str) -> None:
        found = self.world.rows("SELECT status, body, shows_at FROM kept WHERE key = ?", key)
        if not found or time.time() < found[0][2]:
            self.answer(404, {"title": "no such key"})
        elif found[0][0] is None:
            self.answer(202, {"title": "in progress"})
        elif found[0][0] >= 400:
            self.answer(500, {"title": "it failed"})
        else:
            self.answer(200, json.loads(found[0][1]))

    def version(self, name: str, db: Any = None) -> tuple[int, str, str]:
        statement = "SELECT version, effect, body FROM doc WHERE name = ? ORDER BY version DESC LIMIT 1"
        found = db.execute(statement, (name,)).fetchall() if db is not None else self.world.rows(statement, name)
        return found[0] if found else (0, "", "")

    def write(self, db: Any, name: str, effect: str, body: str) -> int:
        version = self.version(name, db)[0] + 1
        db.execute("INSERT INTO doc VALUES (?, ?, ?, ?)", (name, version, effect, body))
        return version

    def get_doc(self, name: str) -> None:
        version, effect, body = self.version(name)
        if version == 0:
            self.answer(404, {"title": "no such document"})
        else:
            self.answer(200, body, {"ETag": f'"v{version}"', "Fencepost-Effect": effect})

    def put_doc(self) -> None:
        begun = self.begin()
        if begun is None:
            return
        fault, body = begun
        name = self.path.split("/")[2]
        time.sleep(fault.get("delay", 0))
        if "status" in fault:
            self.finish_with(fault, fault["status"], None)
            return
        with self.world.change() as db:
            version = self.version(name, db)[0]
            wanted, none = self.headers.get("If-Match"), self.headers.get("If-None-Match")
            if (wanted is not None and wanted != f'"v{version}"') or (none == "*" and version):
                holds = False
            else:
                holds = True
                version = self.write(db, name, self.effect, body)
                self.act(db, body)
        if holds:
            self.finish_with(fault, 200, {"version": version}, {"ETag": f'"v{version}"'})
        else:
            self.finish_with(fault, 412, {"title": "it has changed"})

    def rooms(self) -> None:
        begun = self.begin()
        if begun is None:
            return
        fault, body = begun
        time.sleep(fault.get("delay", 0))
        if "status" in fault:
            self.finish_with(fault, fault["status"], None)
            return
        parts = self.path.strip("/").split("/")
        with self.world.change() as db:
            if len(parts) == 1:
                made = db.execute("INSERT INTO room (state, effect) VALUES ('held', ?)", (self.effect,))
                status, value = 201, {"id": made.lastrowid, "state": "held"}
            else:
                state = db.execute("SELECT state FROM room WHERE id = ?", (parts[1],)).fetchone()
                state = state[0] if state else None
                wanted = {"confirm": "confirmed", "cancel": "cancelled"}[parts[2]]
                if state == "held":
                    db.execute("UPDATE room SET state = ? WHERE id = ?", (wanted, parts[1]))
                    if wanted == "confirmed":
                        self.act(db, body)
                    state = wanted
                status = 200 if state == wanted else 409 if state == "confirmed" else 410
                value = {"id": int(parts[1]), "state": state}
        self.finish_with(fault, status, value)


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, world: World) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.world = world

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a caller that hung up is what these tests are about


def main() -> None:
    server = Server(World(sys.argv[1]))
    print(json.dumps({"port": server.server_address[1]}), flush=True)
    server.serve_forever(poll_interval=0.05)


if __name__ == "__main__":
    main()
