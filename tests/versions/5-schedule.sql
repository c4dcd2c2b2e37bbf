BEGIN TRANSACTION;
CREATE TABLE cron (
    id TEXT PRIMARY KEY, schedule TEXT NOT NULL, seen_at REAL NOT NULL
) STRICT;
CREATE INDEX jobs_scope ON jobs (scope);
INSERT INTO cron VALUES ('nightly', 'UTC 0 3 * * *', 1799982000.0);
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('pidispatch', '003-schedule', '2026-11-30 15:00:00');
COMMIT;
