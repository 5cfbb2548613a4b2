-- The first schema, in a schema of its own: nothing of the database's other tenants is in its way, and no search path
-- is needed. Columns stand in the order of the records' fields, so that a row is a record by position.
-- Times are microseconds on the store's clock. Ids order by code point whatever the database's language: COLLATE "C".

CREATE SCHEMA IF NOT EXISTS fencepost;

CREATE TABLE fencepost.migration (
    version int NOT NULL,
    name text NOT NULL,
    step text NOT NULL CHECK (step IN ('pre', 'post')),
    applied_at bigint NOT NULL,
    PRIMARY KEY (version, step)
);

CREATE TABLE fencepost.meta (
    id int PRIMARY KEY CHECK (id = 1),
    store_id text NOT NULL,
    namespace text NOT NULL,
    created_at bigint NOT NULL,
    number_base bigint NOT NULL,    -- added to each journal number: grows when the database moves to another server
    number_from bigint NOT NULL     -- no event has a number below it
);

CREATE TABLE fencepost.pool (
    name text COLLATE "C" PRIMARY KEY,
    state_version bigint NOT NULL CHECK (state_version > 0),
    epoch bigint NOT NULL CHECK (epoch > 0),
    intake_open smallint NOT NULL CHECK (intake_open IN (0, 1)),
    stage text NOT NULL,
    min_protocol int NOT NULL,
    policy text NOT NULL
);

-- Hot: every claim, renewal and commit is an update. Half of each page is left free, so that the new version of a row
-- nearly always stands on the same page, where only what changed is logged, and a renewal or checkpoint is HOT: it
-- touches no index and is pruned in passing. Vacuum comes early and in small steps, because the index of what is ready
-- is only as fast as it is free of dead entries.
CREATE TABLE fencepost.task (
    task_id text COLLATE "C" PRIMARY KEY,
    pool text COLLATE "C" NOT NULL,
    queue text COLLATE "C" NOT NULL,
    kind text COLLATE "C" NOT NULL,
    graph_id text COLLATE "C",
    node_id text COLLATE "C" NOT NULL,
    revision bigint NOT NULL,
    input_digest text NOT NULL,
    submitted_digest text NOT NULL,
    state smallint NOT NULL CHECK (state BETWEEN 1 AND 6),
    state_version bigint NOT NULL CHECK (state_version > 0),
    scheduler_epoch bigint NOT NULL,
    claim_generation bigint NOT NULL,
    attempt_id text COLLATE "C",
    owner_id text COLLATE "C",
    claimed_at bigint,
    lease_expires_at bigint,
    cancel_generation bigint NOT NULL,
    result_commit_id text COLLATE "C",
    priority smallint NOT NULL,
    available_at bigint NOT NULL,
    ready_at bigint,
    charged_attempts bigint NOT NULL,
    max_attempts bigint NOT NULL,
    deps_total int NOT NULL,
    deps_remaining int NOT NULL,
    successors bigint NOT NULL,
    checkpoint_number bigint NOT NULL,
    checkpoint_generation bigint NOT NULL,
    "end" smallint NOT NULL CHECK ("end" BETWEEN 0 AND 6),
    cancel_with_parent boolean NOT NULL,
    park_reason text,
    created_at bigint NOT NULL,
    pruned_to_version bigint NOT NULL,
    trace_context text
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 1,
    autovacuum_analyze_scale_factor = 0.05
);

-- What is ready. Kind stands before priority, so that a scan for some kinds never walks over the others; a scan jumps
-- from kind to kind and from priority to priority.
CREATE INDEX task_ready ON fencepost.task (pool, queue, kind, priority, available_at, task_id) WHERE state = 1;

-- What is claimed, for the search for lapsed leases: few at any time, so that the smallest entry is the best.
CREATE INDEX task_claimed ON fencepost.task (pool) WHERE state = 2;

CREATE TABLE fencepost.input (
    task_id text COLLATE "C" PRIMARY KEY,
    revision bigint NOT NULL,
    data bytea NOT NULL,
    digest text NOT NULL,
    is_binary smallint NOT NULL CHECK (is_binary IN (0, 1))
);

CREATE TABLE fencepost.dependency (
    task_id text COLLATE "C" NOT NULL,
    parent_id text COLLATE "C" NOT NULL,
    position int NOT NULL,
    PRIMARY KEY (task_id, parent_id)
);

CREATE INDEX dependency_child ON fencepost.dependency (parent_id, task_id);

CREATE TABLE fencepost.checkpoint (
    task_id text COLLATE "C" PRIMARY KEY,
    revision bigint NOT NULL,
    generation bigint NOT NULL,
    number bigint NOT NULL,
    data bytea NOT NULL,
    digest text NOT NULL,
    is_binary smallint NOT NULL CHECK (is_binary IN (0, 1))
) WITH (fillfactor = 70);

CREATE TABLE fencepost.staged (
    task_id text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    digest text NOT NULL,
    attempt_id text COLLATE "C" NOT NULL,
    data bytea NOT NULL,
    is_binary smallint NOT NULL CHECK (is_binary IN (0, 1)),
    state smallint NOT NULL CHECK (state BETWEEN 1 AND 3),
    staged_at bigint NOT NULL,
    PRIMARY KEY (task_id, generation, digest)
);

-- `data` is NULL where the result was staged beforehand (it stands there), and once it was pruned.
-- `content_digest` is NULL where it equals `result_digest`, which it does.
CREATE TABLE fencepost.result (
    task_id text COLLATE "C" PRIMARY KEY,
    result_commit_id text COLLATE "C" NOT NULL,
    revision bigint NOT NULL,
    attempt_id text COLLATE "C" NOT NULL,
    generation bigint NOT NULL,
    result_digest text NOT NULL,
    commit_digest text NOT NULL,
    parents text NOT NULL,
    committed_at bigint NOT NULL,
    data bytea,
    content_digest text,
    is_binary smallint NOT NULL CHECK (is_binary IN (0, 1))
);

-- One row a call, kept for ten minutes. The key is what makes a request id count once, whoever asks when; our own ids
-- grow with time, so that they are written side by side.
CREATE TABLE fencepost.request (
    request_id text COLLATE "C" PRIMARY KEY,
    owner text COLLATE "C" NOT NULL,
    door text NOT NULL,
    at bigint NOT NULL,
    answer text NOT NULL
);

CREATE INDEX request_at ON fencepost.request USING brin (at) WITH (pages_per_range = 32, autosummarize = on);

-- Two append-only tables. A row's number is its transaction's id, shifted left by 20 bits, and its place among that
-- transaction's rows: no counter that all writers wait for, and a reader knows from the number alone whether every
-- transaction up to there has ended, so that it misses none that commits late. A BRIN index costs next to nothing.
CREATE TABLE fencepost.event (
    number bigint NOT NULL,
    task_id text COLLATE "C" NOT NULL,
    state_version bigint NOT NULL,
    at bigint NOT NULL,
    door text NOT NULL,
    name text NOT NULL,
    epoch bigint NOT NULL,
    generation bigint NOT NULL,
    cancel_generation bigint NOT NULL,
    revision bigint NOT NULL,
    attempt_id text COLLATE "C",
    compared int NOT NULL,
    state smallint NOT NULL,
    detail text,
    PRIMARY KEY (task_id, state_version)
);

CREATE INDEX event_number ON fencepost.event USING brin (number) WITH (pages_per_range = 32, autosummarize = on);

CREATE TABLE fencepost.log (
    number bigint PRIMARY KEY,
    kind text NOT NULL,
    at bigint NOT NULL,
    pool text COLLATE "C",
    task_id text COLLATE "C",
    door text NOT NULL,
    outcome text,
    reason text,
    attempt text,
    generation bigint,
    detail text,
    count bigint NOT NULL
);

CREATE INDEX log_task ON fencepost.log (task_id) WHERE task_id IS NOT NULL;
