"""A toy that stands for a mail API: it keeps every mail in a file, and remembers its key for a day."""

import os
from pathlib import Path

from fencepost.effects.base import Call, Declaration, Found, Happened, NotFound, Outcome


class Mailbox:
    def __init__(self, declaration: Declaration, folder: Path) -> None:
        self.declaration = declaration
        self.folder = folder

    async def execute(self, call: Call) -> Outcome:
        self.folder.mkdir(exist_ok=True)
        mail = self.folder / f"{call.key}.txt"
        if not mail.exists():  # the same key again: the mail is there, and no second one is written
            mail.write_text(call.payload["text"])
        if os.environ.pop("CRASH", None):
            os.kill(os.getpid(), 9)  # the mail is sent, and its sender is gone before it hears so
        return Happened({"mail": call.key[:8]})

    async def query(self, call: Call) -> Found:
        mail = self.folder / f"{call.key}.txt"
        return Happened({"mail": call.key[:8]}) if mail.exists() else NotFound()
