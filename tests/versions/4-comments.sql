BEGIN TRANSACTION;
CREATE TABLE comments (
    kind TEXT NOT NULL, target TEXT NOT NULL, comment TEXT NOT NULL, at REAL NOT NULL,
    PRIMARY KEY (kind, target, comment)
) STRICT;
CREATE INDEX comments_at ON comments (at);
INSERT INTO comments VALUES ('github', 'octo/spoon#9', '77', 1800000000.0);
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('pidispatch', '002-comments', '2026-11-30 15:00:00');
COMMIT;
