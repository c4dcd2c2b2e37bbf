BEGIN TRANSACTION;
ALTER TABLE runs ADD COLUMN request_key TEXT;
ALTER TABLE runs ADD COLUMN ended_when REAL NOT NULL DEFAULT 0;
UPDATE runs SET record = json_set(record, '$.picked', NULL);
UPDATE runs SET request_key = (SELECT scope FROM jobs WHERE jobs.id = runs.job_id)
    || '!' || json_extract(request, '$.number') WHERE request IS NOT NULL;
CREATE INDEX runs_request ON runs (request_key) WHERE request_key IS NOT NULL;
CREATE INDEX runs_set ON runs (set_id);
CREATE TABLE sibling_notices (
    job_id TEXT NOT NULL, about TEXT NOT NULL, at INTEGER NOT NULL,
    tries INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, about, at)
) STRICT;
INSERT INTO sibling_notices (job_id, about, at) VALUES ('gh-set-r2', 'gh-set-r1', 1800000000000);
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('pidispatch', '003-picks', '2026-11-30 15:00:00');
COMMIT;
