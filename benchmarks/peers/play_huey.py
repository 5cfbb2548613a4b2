"""huey on SQLite: WAL, synchronous=FULL, 64 MB of cache, two threads, no stored results; it polls every 1 to 10 ms."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from typing import Any

from huey import SqliteHuey
from playing import INPUT, Watch, listen, now, play, say

THREADS = 2


def at_file(path: str, results: bool = False) -> SqliteHuey:
    return SqliteHuey(filename=path, results=results, fsync=True, journal_mode="wal", cache_mb=64, timeout=30)


def consume(huey: SqliteHuey) -> Any:
    consumer = huey.create_consumer(
        workers=THREADS, periodic=False, initial_delay=0.001, backoff=1.15, max_delay=0.01, check_worker_health=False
    )
    consumer.start()
    return consumer


def prepare(path: str) -> None:
    at_file(path)


def enqueue(path: str, count: float) -> None:
    huey = at_file(path)
    task = huey.task(name="nothing")(lambda text: None)
    watch = Watch()
    for _ in range(int(count)):
        task(INPUT)
    watch.say()


def drain(path: str) -> None:
    huey = at_file(path)
    left = huey.storage.queue_size()
    lock, done = threading.Lock(), threading.Event()

    @huey.signal("complete")
    def completed(*_: Any) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == 0:
                done.set()

    @huey.task(name="nothing")
    def nothing(text: str) -> None:
        return None

    watch = Watch()
    consumer = consume(huey)
    done.wait()
    watch.say()
    consumer.stop(graceful=True)


def work(path: str, hold: float) -> None:
    huey = at_file(path, results=True)

    @huey.task(name="at")
    def at(at: float) -> str:
        say(event="started", latency=now() - at)
        if hold:
            time.sleep(hold)
            say(event="returned")
        return "done"

    listen("huey")
    consume(huey)
    say(event="ready", pid=os.getpid())
    threading.Event().wait()


def each(path: str, count: float, pause: float) -> None:
    huey = at_file(path, results=True)
    task = huey.task(name="at")(lambda at: None)
    for _ in range(int(count)):
        task(now())
        time.sleep(pause)


def completions(path: str) -> None:
    con = sqlite3.connect(path)
    [(found,)] = con.execute("SELECT count(*) FROM kv")
    con.close()
    say(count=found)


if __name__ == "__main__":
    play({part.__name__: part for part in (prepare, enqueue, drain, work, each, completions)})
