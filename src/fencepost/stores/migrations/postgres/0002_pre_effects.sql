-- Side effects: one row an effect, written with its task's record. Columns stand in the order of the record's fields.
-- A payload never changes and may be long, so it stands beside, under the same key.

ALTER TABLE fencepost.task ADD COLUMN effects bigint NOT NULL DEFAULT 0;

CREATE TABLE fencepost.effect (
    task_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL CHECK (number > 0),
    effect_id text COLLATE "C" NOT NULL,
    pool text COLLATE "C" NOT NULL,
    revision bigint NOT NULL,
    node_id text COLLATE "C" NOT NULL,
    slot text COLLATE "C" NOT NULL,
    payload_digest text NOT NULL,
    terms text NOT NULL,
    state smallint NOT NULL CHECK (state BETWEEN 1 AND 7),
    version bigint NOT NULL CHECK (version > 0),
    first_prepared_at bigint NOT NULL,
    changed_at bigint NOT NULL,
    executions text NOT NULL,
    repeat_closed smallint NOT NULL CHECK (repeat_closed IN (0, 1)),
    person_only smallint NOT NULL CHECK (person_only IN (0, 1)),
    absent_ground text,
    receipt bytea,
    receipt_digest text,
    receipt_is_binary smallint NOT NULL CHECK (receipt_is_binary IN (0, 1)),
    etag text,
    approval text,
    evidence text NOT NULL,
    evidence_settled bigint NOT NULL,
    decided_by text,
    note text,
    -- What waits for a person or for the downstream: AWAITING_APPROVAL and UNKNOWN. It is what the index is on: a call
    -- that is answered never has it, so that settling one changes no indexed column, and is a HOT update.
    open_state smallint GENERATED ALWAYS AS (CASE WHEN state < 3 THEN state END) STORED,
    PRIMARY KEY (task_id, number)
) WITH (
    fillfactor = 45,
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 1
);

CREATE INDEX effect_open ON fencepost.effect (open_state, pool, first_prepared_at) WHERE open_state IS NOT NULL;

CREATE TABLE fencepost.effect_payload (
    task_id text COLLATE "C" NOT NULL,
    number bigint NOT NULL,
    data bytea,
    digest text NOT NULL,
    is_binary smallint NOT NULL CHECK (is_binary IN (0, 1)),
    PRIMARY KEY (task_id, number)
);
