BEGIN TRANSACTION;
CREATE TABLE limited (
    set_id TEXT PRIMARY KEY, kind TEXT NOT NULL, target TEXT NOT NULL, at REAL NOT NULL,
    payload TEXT, tries INTEGER NOT NULL DEFAULT 0, not_before REAL NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX limited_target ON limited (target, at);
ALTER TABLE windows ADD COLUMN freed INTEGER NOT NULL DEFAULT 0;
INSERT INTO limited (set_id, kind, target, at, payload) SELECT 'gh-much', 'github', 'octo/spoon#9', 1800000000.0, payload FROM jobs WHERE id = 'gh-no';
UPDATE windows SET freed = 1 WHERE job_id = 'gh-later';
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('pidispatch', '002-limited', '2026-11-30 15:00:00');
COMMIT;
