-- Side effects: one row an effect, written with its task's record. Columns stand in the order of the record's fields.
-- A payload never changes and may be long, so it stands beside, under the same key.

ALTER TABLE task ADD COLUMN effects INTEGER NOT NULL DEFAULT 0;

CREATE TABLE effect (
    task_id TEXT NOT NULL,
    number INTEGER NOT NULL CHECK (number > 0),
    effect_id TEXT NOT NULL,
    pool TEXT NOT NULL,
    revision INTEGER NOT NULL,
    node_id TEXT NOT NULL,
    slot TEXT NOT NULL,
    payload_digest TEXT NOT NULL,
    terms TEXT NOT NULL,
    state INTEGER NOT NULL CHECK (state BETWEEN 1 AND 7),
    version INTEGER NOT NULL CHECK (version > 0),
    first_prepared_at INTEGER NOT NULL,
    changed_at INTEGER NOT NULL,
    executions TEXT NOT NULL,
    repeat_closed INTEGER NOT NULL CHECK (repeat_closed IN (0, 1)),
    person_only INTEGER NOT NULL CHECK (person_only IN (0, 1)),
    absent_ground TEXT,
    receipt BLOB,
    receipt_digest TEXT,
    receipt_is_binary INTEGER NOT NULL CHECK (receipt_is_binary IN (0, 1)),
    etag TEXT,
    approval TEXT,
    evidence TEXT NOT NULL,
    evidence_settled INTEGER NOT NULL,
    decided_by TEXT,
    note TEXT,
    PRIMARY KEY (task_id, number)
) STRICT, WITHOUT ROWID;

-- What waits for a person or for the downstream: AWAITING_APPROVAL and UNKNOWN. A call that is answered never enters it.
CREATE INDEX effect_open ON effect (state, pool, first_prepared_at) WHERE state < 3;

CREATE TABLE effect_payload (
    task_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    data BLOB,
    digest TEXT NOT NULL,
    is_binary INTEGER NOT NULL CHECK (is_binary IN (0, 1)),
    PRIMARY KEY (task_id, number)
) STRICT, WITHOUT ROWID;
