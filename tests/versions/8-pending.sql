BEGIN TRANSACTION;
DROP INDEX deliveries_pending;
CREATE INDEX deliveries_pending ON deliveries (kind, next_at) WHERE state = 'pending';
INSERT INTO _sqlite_migrations (migration_set, name, applied_at)
    VALUES ('pidispatch', '005-pending', '2026-12-01 01:00:00');
COMMIT;
