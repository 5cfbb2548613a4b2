"""`fencepost init`: a folder in which the next three commands work."""

from __future__ import annotations

from pathlib import Path

from cyclopts import App, Group

from fencepost import config
from fencepost.cli import output
from fencepost.cli.session import Options, opened
from fencepost.errors import InvalidRequest

SETTINGS = """\
# Settings of fencepost in this folder. What stands here is what holds without it; options and FENCEPOST_STORE win.

[store]
url = "{url}"

[work]                          # `fencepost work`; durations are seconds
queues = ["default"]
kinds = []                      # empty: every kind
pool = "default"
ttl = 30.0                      # how long a task stays with a worker that is not heard of
renew_interval = 0.0            # 0: derived from the ttl
trust_window = 0.0              # 0: derived from the ttl; renew_interval < trust_window < ttl <= the pool's max_ttl
concurrency = 1
drain_timeout = 30.0            # how long running tasks may go on after SIGTERM
on_epoch = "stop"               # or "adopt": take a raised epoch once the intake is open
result = "json"                 # of a program: its last line as JSON; or "text", "bytes": all it printed
"""

TASKS = """\
{"task_id": "doc-1", "kind": "summarise", "input": {"text": "A lease says when work may be taken back."}}
{"task_id": "doc-2", "kind": "summarise", "input": {"text": "A generation says whose write counts."}}
{"task_id": "doc-3", "kind": "summarise", "input": {"text": "A late worker is told so, and changes nothing."}, \
"depends_on": ["doc-1", "doc-2"]}
"""

AGENT = '''\
"""An agent under fencepost: `fencepost work --app agent:app`."""

import fencepost

app = fencepost.App()


@app.task("summarise", ttl=30.0)
async def summarise(attempt: fencepost.Attempt, input: dict) -> dict:
    """Put your agent here. What is returned is committed, once; an exception is tried again."""
    words = input["text"].split()
    attempt.check()  # before an expensive step: stops here when the task was taken away
    return {"words": len(words), "longest": max(words, key=len), "after": sorted(attempt.parents)}
'''


async def init(*, force: bool = False, options: Options | None = None) -> int:
    """Write fencepost.toml, sample tasks (tasks.jsonl) and a sample agent (agent.py), and make the database.

    Files that exist are kept, unless --force.

    JSON: {"written": [file], "kept": [file], "store"}.

    Parameters
    ----------
    force
        Overwrite existing files. Never touches an existing database.
    """
    options = options or Options()
    url = options.store or config.DEFAULT_URL
    if '"' in url or "\\" in url or not url.isprintable():
        raise InvalidRequest("store", "a URL has no quotes, backslashes or control characters")
    contents = {config.FILE_NAME: SETTINGS.replace("{url}", url), "tasks.jsonl": TASKS, "agent.py": AGENT}
    written = [name for name, content in contents.items() if _write(name, content, force)]
    kept = [name for name in contents if name not in written]
    store = options.url
    async with opened(options, create=True):
        pass
    if options.as_json:
        output.emit({"written": written, "kept": kept, "store": config.without_password(store)})
        return output.DONE
    for name in written:
        output.say(f"wrote {name}")
    for name in kept:
        output.say(f"kept {name} (it exists; --force overwrites it)")
    output.say(f"the tasks are kept in {config.without_password(store)}")
    output.say()
    for line in (
        "fencepost submit tasks.jsonl",
        "fencepost work --app agent:app --until-idle",
        "fencepost result doc-3",
    ):
        output.say(f"  {line}", style="bold")
    return output.DONE


def _write(name: str, content: str, force: bool) -> bool:
    """False where the file exists and is kept. `x` rather than a look beforehand: nothing is overwritten by a race."""
    try:
        with Path(name).open("w" if force else "x", encoding="utf-8") as file:
            file.write(content)
    except FileExistsError:
        return False
    except OSError as error:
        raise InvalidRequest(name, f"cannot be written here: {error.strerror}") from None
    return True


def add_to(app: App, group: Group) -> None:
    app.command(init, group=group)
