BEGIN TRANSACTION;
DROP INDEX jobs_queued;
CREATE INDEX jobs_queued ON jobs (seq, not_before, scope, cancel)
    WHERE state = 'queued';
CREATE INDEX jobs_cancelled ON jobs (seq) WHERE state = 'queued' AND cancel IS NOT NULL;
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('pidispatch', '004-waiting', '2026-11-30 18:00:00');
COMMIT;
