-- The first schema. Columns stand in the order of the records' fields, so that a row is a record by position.
-- Times are microseconds on the store's clock. No foreign keys: `audit` looks for rows without a task.

CREATE TABLE migration (
    version INTEGER NOT NULL,
    name TEXT NOT NULL,
    step TEXT NOT NULL CHECK (step IN ('pre', 'post')),
    applied_at INTEGER NOT NULL,
    PRIMARY KEY (version, step)
) STRICT, WITHOUT ROWID;

CREATE TABLE meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    store_id TEXT NOT NULL,
    namespace TEXT NOT NULL,
    created_at INTEGER NOT NULL
) STRICT;

-- One row, written by every writing transaction: the highest time that was used, and the last number given
-- to an event or log entry (never reused, whatever is pruned).
CREATE TABLE clock (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    at INTEGER NOT NULL,
    number INTEGER NOT NULL
) STRICT;

CREATE TABLE pool (
    name TEXT NOT NULL PRIMARY KEY,
    state_version INTEGER NOT NULL CHECK (state_version > 0),
    epoch INTEGER NOT NULL CHECK (epoch > 0),
    intake_open INTEGER NOT NULL CHECK (intake_open IN (0, 1)),
    stage TEXT NOT NULL,
    min_protocol INTEGER NOT NULL,
    policy TEXT NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE task (
    task_id TEXT NOT NULL PRIMARY KEY,
    pool TEXT NOT NULL,
    queue TEXT NOT NULL,
    kind TEXT NOT NULL,
    graph_id TEXT,
    node_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    input_digest TEXT NOT NULL,
    submitted_digest TEXT NOT NULL,
    state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 6),
    state_version INTEGER NOT NULL CHECK (state_version > 0),
    scheduler_epoch INTEGER NOT NULL,
    claim_generation INTEGER NOT NULL,
    attempt_id TEXT,
    owner_id TEXT,
    claimed_at INTEGER,
    lease_expires_at INTEGER,
    cancel_generation INTEGER NOT NULL,
    result_commit_id TEXT,
    priority INTEGER NOT NULL,
    available_at INTEGER NOT NULL,
    ready_at INTEGER,
    charged_attempts INTEGER NOT NULL,
    max_attempts INTEGER NOT NULL,
    deps_total INTEGER NOT NULL,
    deps_remaining INTEGER NOT NULL,
    successors INTEGER NOT NULL,
    checkpoint_number INTEGER NOT NULL,
    checkpoint_generation INTEGER NOT NULL,
    "end" INTEGER NOT NULL CHECK ("end" BETWEEN 0 AND 6),
    cancel_with_parent INTEGER NOT NULL CHECK (cancel_with_parent IN (0, 1)),
    park_reason TEXT,
    created_at INTEGER NOT NULL,
    pruned_to_version INTEGER NOT NULL,
    trace_context TEXT
) STRICT;

-- What is alive. Kind stands before priority, so that a scan for some kinds never walks over the others; a
-- scan jumps from kind to kind and from priority to priority. A renewal changes no column of it.
CREATE INDEX task_live ON task (pool, state, queue, kind, priority, available_at, task_id) WHERE state < 3;

CREATE TABLE input (
    task_id TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL,
    data BLOB NOT NULL,
    digest TEXT NOT NULL,
    is_binary INTEGER NOT NULL CHECK (is_binary IN (0, 1))
) STRICT, WITHOUT ROWID;

CREATE TABLE dependency (
    task_id TEXT NOT NULL,
    parent_id TEXT NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (task_id, parent_id)
) STRICT, WITHOUT ROWID;

CREATE INDEX dependency_child ON dependency (parent_id, task_id);

CREATE TABLE checkpoint (
    task_id TEXT NOT NULL PRIMARY KEY,
    revision INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    number INTEGER NOT NULL,
    data BLOB NOT NULL,
    digest TEXT NOT NULL,
    is_binary INTEGER NOT NULL CHECK (is_binary IN (0, 1))
) STRICT, WITHOUT ROWID;

CREATE TABLE staged (
    task_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    digest TEXT NOT NULL,
    attempt_id TEXT NOT NULL,
    data BLOB NOT NULL,
    is_binary INTEGER NOT NULL CHECK (is_binary IN (0, 1)),
    state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 3),
    staged_at INTEGER NOT NULL,
    PRIMARY KEY (task_id, generation, digest)
) STRICT, WITHOUT ROWID;

-- `data` is NULL where the result was staged beforehand (it stands there), and once it was pruned.
-- `content_digest` is NULL where it equals `result_digest`, which it does.
CREATE TABLE result (
    task_id TEXT NOT NULL PRIMARY KEY,
    result_commit_id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    generation INTEGER NOT NULL,
    result_digest TEXT NOT NULL,
    commit_digest TEXT NOT NULL,
    parents TEXT NOT NULL,
    committed_at INTEGER NOT NULL,
    data BLOB,
    content_digest TEXT,
    is_binary INTEGER NOT NULL CHECK (is_binary IN (0, 1))
) STRICT, WITHOUT ROWID;

-- Request ids are random: in buckets of time they are written side by side and pruned as a range.
CREATE TABLE request (
    bucket INTEGER NOT NULL,
    request_id TEXT NOT NULL,
    owner TEXT NOT NULL,
    door TEXT NOT NULL,
    at INTEGER NOT NULL,
    answer TEXT NOT NULL,
    PRIMARY KEY (bucket, request_id)
) STRICT, WITHOUT ROWID;

-- Two append-only tables. Their numbers come from `clock.number` and grow in order of commit.
CREATE TABLE event (
    number INTEGER PRIMARY KEY,
    task_id TEXT NOT NULL,
    state_version INTEGER NOT NULL,
    at INTEGER NOT NULL,
    door TEXT NOT NULL,
    name TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    cancel_generation INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    attempt_id TEXT,
    compared INTEGER NOT NULL,
    state INTEGER NOT NULL,
    detail TEXT
) STRICT;

CREATE UNIQUE INDEX event_key ON event (task_id, state_version);

CREATE TABLE log (
    number INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    at INTEGER NOT NULL,
    pool TEXT,
    task_id TEXT,
    door TEXT NOT NULL,
    outcome TEXT,
    reason TEXT,
    attempt TEXT,
    generation INTEGER,
    detail TEXT,
    count INTEGER NOT NULL
) STRICT;

CREATE INDEX log_task ON log (task_id) WHERE task_id IS NOT NULL;

INSERT INTO meta (id, store_id, namespace, created_at) VALUES (1, :store_id, :namespace, :now);
INSERT INTO clock (id, at, number) VALUES (1, :now, 0);
INSERT INTO pool (name, state_version, epoch, intake_open, stage, min_protocol, policy)
VALUES ('default', 1, 1, 1, 'ENFORCED', 1, :policy);
PRAGMA application_id = 1179534160;
