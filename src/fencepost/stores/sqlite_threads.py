"""A thread that owns one connection and does what it is given, in order.

SQLite calls block, so they stay off the event loop; a connection belongs to one thread, so it needs no lock.
Finished work wakes its event loop once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import apsw

from fencepost.clock import elapsed
from fencepost.errors import Unavailable
from fencepost.stores.sqlite_file import Patience

Work = Callable[[apsw.Connection], Any]
# Whom to tell, what to do (None: end), and when it was asked for.
Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Work | None, float]


class Lane:
    """`connect` is called on the thread, before the first work; what it raises, that work raises.

    `patience` learns when each work was asked for.
    """

    def __init__(self, name: str, connect: Callable[[Patience], apsw.Connection], patience: Patience) -> None:
        self._name = name
        self._connect = connect
        self._patience = patience
        self._queue: SimpleQueue[Job] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def do(self, work: Work) -> Any:
        """Run `work` on the thread and return what it returns. It runs to its end, even if nobody waits any more."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._put(loop, future, work)
        return await future

    def _put(self, loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], work: Work | None) -> None:
        with self._lock:
            if self._closed:
                raise Unavailable("this store is closed")
            if work is None:
                self._closed = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._queue.put((loop, future, work, elapsed()))

    async def close(self) -> None:
        """Finish what is queued, close the connection, end the thread."""
        if self._closed:
            return
        if self._thread is None:
            self._closed = True
            return
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._put(loop, future, None)
        await future
        self._thread.join()

    def _run(self) -> None:
        con: apsw.Connection | None = None
        while True:
            loop, future, work, self._patience.asked = self._queue.get()
            if work is None:
                try:
                    if con is not None:
                        con.close()
                except apsw.Error:
                    pass  # closing only tidies the WAL up; whoever opens the file next does it
                _hand_over(loop, future, None, None)
                return
            try:
                if con is None:
                    con = self._connect(self._patience)
                value = work(con)
            except BaseException as error:  # noqa: BLE001 - the caller gets it, whatever it is
                _hand_over(loop, future, None, error)
            else:
                _hand_over(loop, future, value, None)
            del loop, future, work


def _hand_over(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], value: Any, error: BaseException | None
) -> None:
    try:
        loop.call_soon_threadsafe(_settle, future, value, error)
    except RuntimeError:
        if not loop.is_closed():
            raise


def _settle(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return  # the caller was cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
