"""The database file: whether it may be opened, the connection to it, and what its errors mean to a caller.

A file is refused, each with its own message, when its folder is missing, when it is a folder, cannot be
written, is no fencepost database, or lies on a file system that several hosts can mount: there WAL's shared
memory is not shared, and the database ends up malformed.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import apsw

from fencepost.clock import elapsed
from fencepost.errors import Inconsistent, StoreRefused, Unavailable

# How long a call waits for somebody else's transaction before it is Unavailable, in seconds.
BUSY_WAIT = 15.0
# ... but at least so long from its own first look on, however long it had to queue.
LEAST_WAIT = 0.5
# The longest sleep between two looks at a lock. Random, so that many processes on one file take turns.
BUSY_NAP = 0.010

APPLICATION_ID = int.from_bytes(b"FNCP", "big")
SHM_REGION = 32768  # the least that a -shm in use holds
MAGIC = b"SQLite format 3\x00"

# By name, as the kernel names them. Any FUSE file system counts as shared unless it is listed as local.
_SHARED = """
nfs nfs3 nfs4 cifs smb smb2 smb3 smbfs virtiofs 9p afs afpfs ceph glusterfs lustre gfs gfs2 ocfs2 ncpfs coda
beegfs beegfs_nodev gpfs pvfs2 orangefs panfs vboxsf prl_fs vmhgfs fakeowner osxfs webdav davfs drvfs
"""
_LOCAL_FUSE = """
fuseblk fuse.fuse-overlayfs fuse.bindfs fuse.gocryptfs fuse.encfs fuse.cryfs fuse.ntfs-3g fuse.exfat
"""
SHARED_FILE_SYSTEMS = frozenset(_SHARED.split())
LOCAL_FUSE = frozenset(_LOCAL_FUSE.split())


def locate(path: str | os.PathLike[str]) -> str:
    """The absolute path without symbolic links: the name by which the file is opened and watched."""
    return os.path.realpath(os.fspath(path))


T = TypeVar("T")
FileSystemOf = Callable[[str], str | None]


def file_system_of(path: str) -> str | None:
    """The name of the file system that `path` lies on; None where it cannot be found out."""
    look = {"linux": _linux_file_system, "darwin": _darwin_file_system}.get(sys.platform)
    return None if look is None else look(path)


def _linux_file_system(path: str) -> str | None:
    best, name = "", None
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                left, _, right = line.partition(" - ")
                point = left.split(" ")[4]
                for octal, sign in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
                    point = point.replace(octal, sign)
                inside = point == "/" or path == point or path.startswith(point + "/")
                if inside and len(point) >= len(best):  # of two mounts on one point the later one is on top
                    best, name = point, right.split(" ")[0]
    except OSError:
        return None
    return name


def _darwin_file_system(path: str) -> str | None:
    statfs = getattr(ctypes.CDLL(None), "statfs$INODE64", None) or ctypes.CDLL(None).statfs
    found = ctypes.create_string_buffer(4096)
    if statfs(os.fsencode(path), found) != 0:
        return None
    return found.raw[72:88].split(b"\0")[0].decode("ascii", "replace")  # f_fstypename


def is_shared(name: str | None) -> bool:
    if name is None:
        return False
    return name in SHARED_FILE_SYSTEMS or (name.startswith("fuse") and name not in LOCAL_FUSE)


def check_path(path: str, create: bool, of: FileSystemOf | None = None) -> None:
    """Raises StoreRefused with the reason why `path` cannot be a store; says nothing about its schema."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        raise StoreRefused(f"the folder {folder} does not exist; create it first")
    if os.path.isdir(path):
        raise StoreRefused(f"{path} is a folder; name a file in it")
    there = os.path.exists(path)
    if not there and not create:
        raise StoreRefused(f"there is no database at {path}")
    if there and not os.path.isfile(path):
        raise StoreRefused(f"{path} is not a regular file")
    name = (of or file_system_of)(path if there else folder)
    if is_shared(name):
        raise StoreRefused(
            f"{path} lies on {name}, a network or shared file system: SQLite's WAL is not safe there and the "
            "database would end up malformed; move it to a local disk"
        )
    if there and not os.access(path, os.R_OK | os.W_OK):
        raise StoreRefused(f"{path} cannot be written by this user")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise StoreRefused(
            f"the folder {folder} cannot be written by this user: SQLite keeps its journal beside the file"
        )
    if there:
        head = _head(path)
        if head and head != MAGIC:
            raise StoreRefused(f"{path} is no fencepost database (it is not a SQLite file); it was left as it is")
        if not head and not create:
            raise StoreRefused(f"{path} is empty; it is not a database yet")


def _head(path: str) -> bytes:
    """The file's first bytes, read through SQLite's own VFS. Closing a descriptor of Python's own would drop the locks
    that SQLite holds on this file for the whole process, and the next process to leave would delete the WAL."""
    try:
        file = apsw.VFSFile("", path, [apsw.SQLITE_OPEN_MAIN_DB | apsw.SQLITE_OPEN_READONLY, 0])
        try:
            return file.xRead(min(len(MAGIC), file.xFileSize()), 0)
        finally:
            file.xClose()
    except apsw.Error as error:
        raise translate(error, path) from error


class Patience:
    """A busy handler: naps at random until `wait` seconds have passed since `asked`.

    `asked` is when the caller came, so that those who queue behind one who waited in vain do not wait in turn.
    """

    def __init__(self, wait: float) -> None:
        self.wait = wait
        self.asked = elapsed()
        self.waited = False  # set once it was asked for patience; whoever wants to know clears it beforehand
        self._until = 0.0

    def __call__(self, calls: int) -> bool:
        self.waited = True
        if calls == 0:
            now = elapsed()
            self._until = max(self.asked + self.wait, now + min(self.wait, LEAST_WAIT))
        elif elapsed() >= self._until:
            return False
        time.sleep(random.uniform(0.0002, min(BUSY_NAP, 0.001 * (calls + 1))))
        return True


def connect(path: str, patience: Patience, *, reader: bool = False) -> apsw.Connection:
    """A connection with this store's settings. The path must have been checked; a file of another program is
    refused before anything in it is changed."""
    flags = apsw.SQLITE_OPEN_READWRITE | (0 if reader else apsw.SQLITE_OPEN_CREATE) | apsw.SQLITE_OPEN_NOFOLLOW
    con = apsw.Connection(path, flags=flags, statementcachesize=200)
    try:
        con.set_busy_handler(patience)
        check_ours(con, path)
        _use_wal(con, patience.wait)
        # Plans do not depend on bound values, so that binding others never prepares a statement anew.
        con.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
        con.execute("PRAGMA synchronous = FULL")
        # Larger is slower: a commit that has split a page makes SQLite walk over its whole cache (until the file has
        # 262,145 pages), which at 256 MiB costs more than all the rest of the commit. The OS caches the file anyhow.
        con.execute(f"PRAGMA cache_size = {-16384 if reader else -32768}")
        con.wal_autocheckpoint(4000)
        # A bound for the file that stays behind after a burst; the WAL itself is bounded by the checkpoints.
        con.execute("PRAGMA journal_size_limit = 67108864")
        if reader:
            con.execute("PRAGMA query_only = 1")
    except BaseException:
        con.close()
        raise
    return con


# In one statement, so in one snapshot: another process may be making the file a store at this moment.
_MARKS = "SELECT (SELECT application_id FROM pragma_application_id), (SELECT count(*) FROM sqlite_schema)"


def is_blank(con: apsw.Connection) -> bool:
    """No table, and nobody else's mark: a file that may become a store."""
    mark, tables = con.execute(_MARKS).fetchall()[0]
    return tables == 0 and mark in (0, APPLICATION_ID)


def check_ours(con: apsw.Connection, path: str) -> None:
    mark, tables = con.execute(_MARKS).fetchall()[0]
    if mark != APPLICATION_ID and (mark != 0 or tables != 0):
        raise StoreRefused(f"{path} is no fencepost database (another program's SQLite file); it was left as it is")


def _use_wal(con: apsw.Connection, wait: float) -> None:
    mode = _patiently(lambda: con.execute("PRAGMA journal_mode = WAL").get, wait)
    if mode != "wal":
        raise StoreRefused(f"this file cannot be kept in WAL mode (SQLite answers {mode!r})")


def write_into_file(con: apsw.Connection, wait: float) -> None:
    """Copy what the WAL holds into the database file itself."""
    _patiently(lambda: con.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_FULL), wait)


def _patiently(work: Callable[[], T], wait: float) -> T:
    """For the locks about which SQLite asks no busy handler: those of a switch to WAL, and between checkpoints."""
    until = elapsed() + wait
    while True:
        try:
            return work()
        except apsw.BusyError:
            if elapsed() >= until:
                raise
        time.sleep(random.uniform(0.001, BUSY_NAP))


class FileWatch:
    """Notices that the file, its WAL or its shared memory was replaced, removed or cut underneath an open connection.

    SQLite looks at none of it: it would go on answering from its cache, and write into a file that nobody finds any
    more, or behind a hole.
    """

    def __init__(self, path: str, con: apsw.Connection) -> None:
        """`con` has the database open, and is outside a transaction."""
        self.path = path
        self._paths = (path, path + "-wal", path + "-shm")
        looks = [(path, self._stat(path)) for path in self._paths]
        self._opened = [(path, found.st_dev, found.st_ino) for path, found in looks]
        self._page_size = int(con.pragma("page_size"))
        self._wal_size = 0
        self._check_wal(con)

    @staticmethod
    def _stat(path: str) -> os.stat_result:
        try:
            return os.stat(path)
        except FileNotFoundError:
            raise Unavailable(f"{path} was removed while it was open; nothing was written; connect again") from None
        except OSError as error:
            raise Unavailable(f"{path} cannot be reached any more: {error.strerror}") from None

    def before(self, con: apsw.Connection) -> None:
        """Before a transaction on `con`."""
        _, wal_size, _ = self.check()
        if wal_size < self._wal_size:
            self._check_wal(con)
        self._wal_size = wal_size

    def check(self) -> list[int]:
        """Once more inside it where it waited for its turn, since the files may have moved meanwhile. Their sizes."""
        sizes = []
        for path, device, inode in self._opened:
            found = self._stat(path)
            if found.st_ino != inode or found.st_dev != device:
                raise Unavailable(f"{path} was replaced while it was open; nothing was written; connect again")
            sizes.append(found.st_size)
        if sizes[2] < SHM_REGION:  # touching it would end the process (SIGBUS)
            raise Unavailable(f"{self.path}-shm was cut while it was open; nothing was written; connect again")
        return sizes

    def _check_wal(self, con: apsw.Connection) -> None:
        """A checkpoint may cut the WAL, but never below the frames that SQLite counts in it."""
        counted = self._counted(con)
        while self._stat(self._paths[1]).st_size < counted:
            again = self._counted(con)
            if again == counted:
                raise Unavailable(
                    f"{self.path}-wal was cut while it was open: what was committed there is lost; stop every process "
                    "that uses it and restore the file from a backup; nothing was written"
                )
            counted = again  # somebody began the WAL anew between the two looks

    def _counted(self, con: apsw.Connection) -> int:
        """How long the WAL must be at least."""
        frames, _ = con.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
        return 32 + frames * (24 + self._page_size) if frames > 0 else 0


def translate(error: apsw.Error, path: str) -> Exception:
    """What a caller is told: Unavailable, or Inconsistent where the database refuses what must fit."""
    if isinstance(error, apsw.BusyError | apsw.LockedError | apsw.ProtocolError):
        text = f"{path} is locked by another process and did not become free in time"
    elif isinstance(error, apsw.FullError):
        text = f"the disk (or the quota) is full: {path} could not be written"
    elif isinstance(error, apsw.CorruptError):
        text = f"{path} is damaged (database disk image is malformed); restore it from a backup; it was not touched"
    elif isinstance(error, apsw.NotADBError):
        text = f"{path} is no database any more; restore it from a backup; it was not touched"
    elif isinstance(error, apsw.ReadOnlyError):
        text = f"{path} cannot be written (read-only)"
    elif isinstance(error, apsw.IOError):
        text = f"reading or writing {path} failed: {error}"
    elif isinstance(error, apsw.CantOpenError):
        text = f"{path} cannot be opened: {error}"
    elif isinstance(error, apsw.ConstraintError | apsw.MismatchError):
        return Inconsistent(f"{path} refuses a row that must fit ({error}); run fencepost audit")
    else:
        text = f"{path}: SQLite answered {type(error).__name__}: {error}"
    return Unavailable(text)


def is_damage(error: apsw.Error) -> bool:
    return isinstance(error, apsw.CorruptError | apsw.NotADBError)
